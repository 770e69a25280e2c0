# role: program
# ends: killed failed memory timeout
import sys

sys.setrecursionlimit(1 << 30)


def fall(depth):
    return fall(depth + 1) + 1


fall(0)
