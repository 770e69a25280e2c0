# role: program
# ends: ok
import os, signal

print("held" if os.getppid() == 0 else "ESCAPED", flush=True)
os.kill(os.getppid(), signal.SIGKILL)
os.kill(1, signal.SIGTERM)
