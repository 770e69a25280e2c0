# role: program
# ends: ok
import fcntl, os, struct

# Boxes share the files of the system and the devices. Two processes stand for two boxes here.
READ, WRITE, WHOLE_FILE = 0, 1, "hhqqi4x"


def try_locks():
    """The locks that somebody else holds."""
    found = []
    for path, mode in (("/usr/bin/env", os.O_RDONLY), ("/dev/null", os.O_RDWR)):
        file = os.open(path, mode)
        kept.append(file)
        kind = READ if mode == os.O_RDONLY else WRITE
        lock = struct.pack(WHOLE_FILE, kind, 0, 0, 0, 0)
        for command, argument in ((fcntl.F_SETLK, lock), (37, lock)):
            try:
                fcntl.fcntl(file, command, argument)
            except OSError:
                found.append((path, command))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            found.append((path, "flock"))
        try:
            asked = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(WHOLE_FILE, WRITE, 0, 0, 0, 0))
            found.append((path, "F_GETLK", asked))
        except PermissionError:
            pass
    return found


kept = []
ready, end = os.pipe(), os.pipe()
if os.fork() == 0:
    try_locks()
    os.write(ready[1], b"x")
    os.read(end[0], 1)
    os._exit(0)
os.read(ready[0], 1)
found = try_locks()
os.write(end[1], b"x")
print("ESCAPED" if found else "held", found)
