# role: program
# ends: ok
import fcntl, os

total, kept = 0, []
try:
    while True:
        reader, writer = os.pipe()
        kept.append((reader, writer))
        try:
            total += fcntl.fcntl(writer, 1031, 1 << 20)
        except OSError:
            total += 1 << 16
except OSError:
    pass
print("held" if total <= 128 << 20 else "ESCAPED", total)
