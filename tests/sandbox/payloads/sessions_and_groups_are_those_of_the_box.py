# role: program
# ends: ok
import os

session, group = os.getsid(0), os.getpgid(0)
os.setpgid(0, 0)
if os.fork() == 0:
    try:
        os.setsid()
    except OSError:
        pass
    os._exit(0 if (os.getsid(0), os.getpgid(0)) == (session, group) else 1)
_, status = os.wait()
print("held" if status == 0 and os.getpgid(0) == group else "ESCAPED", status)
