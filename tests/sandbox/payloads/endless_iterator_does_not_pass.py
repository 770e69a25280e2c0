# role: candidate
# ends: ok killed timeout
import itertools


def answer(number):
    return itertools.count()
