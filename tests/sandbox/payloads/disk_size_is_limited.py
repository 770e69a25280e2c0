# role: program
# ends: ok
import errno

written, kept = 0, []
try:
    for number in range(1000):
        file = open(f"/tmp/{number}", "wb", buffering=0)
        kept.append(file)
        for _ in range(16):
            written += file.write(b"x" * (1 << 20))
except OSError as error:
    print("held" if written <= 65 << 20 else "ESCAPED", written, errno.errorcode[error.errno])
