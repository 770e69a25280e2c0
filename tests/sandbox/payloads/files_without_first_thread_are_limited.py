# role: program
# ends: memory
import ctypes, platform, threading, time

libc = ctypes.CDLL(None)
EXIT = (60, 93)[("x86_64", "aarch64").index(platform.machine())]


def fill():
    time.sleep(0.3)  # until the first thread has ended
    for number in range(40_000):
        open(f"/tmp/{number}", "w").close()
    time.sleep(1.0)
    print("ESCAPED", number, flush=True)


threading.Thread(target=fill).start()
libc.syscall(ctypes.c_long(EXIT), ctypes.c_long(0))  # ends this thread only
