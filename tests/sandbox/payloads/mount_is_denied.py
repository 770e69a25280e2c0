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
    (165, 40),
    (166, 39),
    (155, 41),
    (161, 51),
    (428, 428),
    (429, 429),
    (430, 430),
    (432, 432),
    (433, 433),
    (442, 442),
):
    print("held" if call(numbers, 0, 0, 0, 0, 0) == "EPERM" else "ESCAPED", numbers)
