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


parameters = (ctypes.c_uint64 * 32)()
print("held" if call((425, 425), 4, ctypes.addressof(parameters)) == "EPERM" else "ESCAPED")
for number in (426, 427):
    print("held" if call((number, number), 0, 0, 0, 0, 0, 0) == "EPERM" else "ESCAPED")
