# role: program
# ends: ok
import os, sys, time

for path in (
    "/tmp/os.py",
    "/tmp/sitecustomize.py",
    "/tmp/usercustomize.py",
    "/tmp/.pythonrc",
    "/dev/shm/trap",
    "/tmp/program.py",
    "/tmp/candidate.py",
    sys.prefix + "/lib/sitecustomize.py",
    "/usr/lib/trap.pth",
):
    try:
        with open(path, "w") as file:
            file.write("print('TRAPPED')")
    except OSError:
        pass
os.chmod("/tmp", 0o777)
if os.fork() == 0:
    os.setsid()
    while True:
        time.sleep(0.01)
        for name in os.listdir("/tmp"):
            open(f"/tmp/{name}", "w").write("print('TRAPPED')")
print("held")
