# role: mapped
# ends: ok
def answer(number):
    raise StopIteration
