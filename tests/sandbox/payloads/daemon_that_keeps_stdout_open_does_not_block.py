# role: program
# ends: ok
import os, time

if os.fork() == 0:
    os.setsid()
    time.sleep(1000)
print("held", flush=True)
os._exit(0)
