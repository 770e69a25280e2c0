# role: program
# ends: memory timeout
import os, time

for _ in range(20):
    if os.fork() == 0:
        break
kept = bytearray(150 << 20)
for offset in range(0, len(kept), 4096):
    kept[offset] = 1
time.sleep(60)
