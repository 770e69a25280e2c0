# role: program
# ends: ok
written = 0
try:
    for number in range(100):
        with open(f"/dev/shm/{number}", "wb", buffering=0) as file:
            for _ in range(16):
                written += file.write(b"x" * (1 << 20))
except OSError:
    pass
print("held" if written <= 65 << 20 else "ESCAPED", written)
