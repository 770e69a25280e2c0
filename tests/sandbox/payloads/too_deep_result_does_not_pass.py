# role: candidate
# ends: ok killed
def answer(number):
    value = []
    for _ in range(100000):
        value = [value]
    return value
