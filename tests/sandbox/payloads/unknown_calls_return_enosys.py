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


print("held" if call((470, 470), 0, 0, 0) == "ENOSYS" else "ESCAPED")
print("held" if call((600, 600), 0, 0, 0) == "ENOSYS" else "ESCAPED")
print("held" if call((0x40000000 + 39, 0x40000000), 0, 0, 0) == "ENOSYS" else "ESCAPED")
