# role: program
# ends: ok failed
import threading, time

count = 0
try:
    for _ in range(500):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        count += 1
except RuntimeError:
    pass
print("ESCAPED" if count > 64 else "held", count, flush=True)
