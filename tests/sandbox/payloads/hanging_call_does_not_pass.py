# role: candidate
# ends: timeout
import time


def answer(number):
    time.sleep(1000)
