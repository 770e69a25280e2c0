# role: program
# ends: memory
kept = []
while True:
    kept.append(bytearray(1 << 20))
