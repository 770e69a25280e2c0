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


for numbers in (
    (246, 104),
    (320, 294),
    (175, 105),
    (313, 273),
    (176, 106),
    (169, 142),
    (167, 224),
    (103, 116),
    (164, 170),
    (227, 112),
    (170, 161),
):
    print("held" if call(numbers, 0, 0, 0, 0, 0) == "EPERM" else "ESCAPED", numbers)
