# role: program
# ends: ok
import fcntl, os, struct

# Boxes share the files of the system and the devices. Two processes simulate two boxes.
READ, WRITE, WHOLE_FILE = 0, 1, "hhqqi4x"


def try_locks():
    """The locks that another process holds."""
    locks = []
    for path, mode in (("/usr/bin/env", os.O_RDONLY), ("/dev/null", os.O_RDWR)):
        file = os.open(path, mode)
        kept.append(file)
        kind = READ if mode == os.O_RDONLY else WRITE
        lock = struct.pack(WHOLE_FILE, kind, 0, 0, 0, 0)
        for command, argument in ((fcntl.F_SETLK, lock), (37, lock)):
            try:
                fcntl.fcntl(file, command, argument)
            except OSError:
                locks.append((path, command))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            locks.append((path, "flock"))
        try:
            conflict = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(WHOLE_FILE, WRITE, 0, 0, 0, 0))
            locks.append((path, "F_GETLK", conflict))
        except PermissionError:
            pass
    return locks


kept = []
ready, end = os.pipe(), os.pipe()
if os.fork() == 0:
    try_locks()
    os.write(ready[1], b"x")
    os.read(end[0], 1)
    os._exit(0)
os.read(ready[0], 1)
locks = try_locks()
os.write(end[1], b"x")
print("ESCAPED" if locks else "held", locks)
