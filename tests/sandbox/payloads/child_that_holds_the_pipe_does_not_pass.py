# role: candidate
# ends: ok killed
import os, time


def answer(number):
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
