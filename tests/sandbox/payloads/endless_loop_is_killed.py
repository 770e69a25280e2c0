# role: program
# ends: timeout
while True:
    pass
