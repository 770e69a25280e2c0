# role: candidate
# ends: ok killed
import sys


def answer(number):
    print(sys.stdin.read())
    return 0
