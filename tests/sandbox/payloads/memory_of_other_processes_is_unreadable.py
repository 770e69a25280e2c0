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


for numbers in ((310, 270), (311, 271), (312, 272), (438, 438), (440, 440)):
    print("held" if call(numbers, 1, 0, 0, 0, 0, 0) == "EPERM" else "ESCAPED", numbers)
