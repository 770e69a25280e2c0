# role: candidate
# ends: ok killed
def another(number):
    return number
