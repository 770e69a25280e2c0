# role: program
# ends: memory
block = bytearray(4 << 30)
print("ESCAPED")
