# role: candidate
# ends: ok killed
class Quit(KeyboardInterrupt):
    pass


def answer(number):
    raise (Quit, SystemExit, GeneratorExit, BaseException)[number % 4](0)
