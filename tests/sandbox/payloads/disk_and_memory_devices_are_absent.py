# role: program
# ends: ok
import os

allowed = {
    "null",
    "zero",
    "full",
    "random",
    "urandom",
    "shm",
    "fd",
    "stdin",
    "stdout",
    "stderr",
    "tty",
    "console",
    "pts",
    "ptmx",
    "core",
}
extra = set(os.listdir("/dev")) - allowed
print("ESCAPED" if extra else "held", extra)
for kind in (0o020000, 0o060000):
    try:
        os.mknod("/tmp/device", 0o666 | kind, os.makedev(1, 1))
        print("ESCAPED")
    except OSError:
        print("held")
