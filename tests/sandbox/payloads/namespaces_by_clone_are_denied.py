# role: program
# ends: ok
import ctypes, errno, platform

libc = ctypes.CDLL(None, use_errno=True)
MACHINE = ("x86_64", "aarch64").index(platform.machine())


def call(numbers, *arguments):
    """None if the call worked, else the name of its error."""
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(numbers[MACHINE]), *map(ctypes.c_long, arguments))
    return errno.errorcode[ctypes.get_errno()] if result == -1 else None


import os

for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000):
    error = call((56, 220), flag | 17, 0, 0, 0, 0)
    if error is None and os.getpid() == 1:
        os._exit(0)
    print("held" if error == "EPERM" else "ESCAPED", hex(flag))
