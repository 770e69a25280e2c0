# role: program
# ends: ok
import ctypes, errno, fcntl, os, platform

libc = ctypes.CDLL(None, use_errno=True)
MACHINE = ("x86_64", "aarch64").index(platform.machine())


def call(numbers, *arguments):
    """None if the call worked, else the name of its error."""
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(numbers[MACHINE]), *map(ctypes.c_long, arguments))
    return errno.errorcode[ctypes.get_errno()] if result == -1 else None


print("held" if call((294, 26), 0) == "EPERM" else "ESCAPED", "inotify")
folder = os.open("/usr", os.O_RDONLY)
for name, command, value in (("dnotify", 1026, 1), ("lease", 1024, 0), ("hint", 1036, 0)):
    try:
        fcntl.fcntl(folder, command, value)
        print("ESCAPED", name)
    except PermissionError:
        print("held", name)
