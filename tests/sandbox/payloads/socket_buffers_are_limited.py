# role: program
# ends: memory
import os, socket, time

for number in range(4):
    if os.fork() == 0:
        break
# A connection that is not accepted keeps the sent data, even if the sender has closed it.
block, total = b"x" * (1 << 16), 0
listeners = []
while total < 500 << 20:
    if not len(listeners) or full:
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
print("ESCAPED", total, flush=True)
time.sleep(60)
