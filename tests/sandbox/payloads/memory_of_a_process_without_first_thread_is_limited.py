# role: program
# ends: memory
import ctypes, os, platform, threading, time

libc = ctypes.CDLL(None)
EXIT = (60, 93)[("x86_64", "aarch64").index(platform.machine())]


def fill():
    time.sleep(0.3)  # until the first thread has ended
    kept = bytearray(150 << 20)
    for offset in range(0, len(kept), 4096):
        kept[offset] = 1
    time.sleep(60)
    print("ESCAPED", len(kept))


for _ in range(8):
    if os.fork() == 0:
        threading.Thread(target=fill).start()
        libc.syscall(ctypes.c_long(EXIT), ctypes.c_long(0))  # ends this thread only
time.sleep(60)
