# role: program
# ends: memory failed
import mmap

kept = []
for _ in range(64):
    block = mmap.mmap(-1, 64 << 20)
    block.write(b"x" * (64 << 20))
    kept.append(block)
print("ESCAPED")
