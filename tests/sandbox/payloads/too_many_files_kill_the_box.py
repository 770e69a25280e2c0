# role: program
# ends: memory timeout
number = 0
while True:
    open(f"/tmp/{number}", "w").close()
    number += 1
