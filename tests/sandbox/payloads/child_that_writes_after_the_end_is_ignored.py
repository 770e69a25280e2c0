# role: program
# ends: ok
import os, time

if os.fork() == 0:
    os.setsid()
    time.sleep(0.3)
    print("ESCAPED", flush=True)
print("held", flush=True)
os._exit(0)
