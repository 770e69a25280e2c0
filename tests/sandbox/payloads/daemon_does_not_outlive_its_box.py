# role: program
# ends: ok
import os, time

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for descriptor in range(3):
            os.close(descriptor)
        time.sleep(1000)
    os._exit(0)
print("held")
