# role: candidate
# ends: ok killed
def answer(number:
    return 0
