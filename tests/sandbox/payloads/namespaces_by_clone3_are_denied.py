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


arguments = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17)
print("held" if call((435, 435), ctypes.addressof(arguments), 88) == "ENOSYS" else "ESCAPED")
