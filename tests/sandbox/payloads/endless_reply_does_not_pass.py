# role: candidate
# ends: ok killed timeout
import os


def answer(number):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\xff\xff\xff\x7f")
            while True:
                os.write(descriptor, b"x" * 65536)
        except OSError:
            pass
