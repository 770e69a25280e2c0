# role: parametrized
# ends: ok
VALUES = 5


def answer(number):
    return number
