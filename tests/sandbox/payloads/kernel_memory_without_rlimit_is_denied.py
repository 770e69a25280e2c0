# role: program
# ends: ok
import ctypes, errno, os, platform, socket, struct

libc = ctypes.CDLL(None, use_errno=True)
MACHINE = ("x86_64", "aarch64").index(platform.machine())


def call(numbers, *arguments):
    """None if the call worked, else the name of its error."""
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(numbers[MACHINE]), *map(ctypes.c_long, arguments))
    return errno.errorcode[ctypes.get_errno()] if result == -1 else None


# A Landlock ruleset can hold 65,536 rules for ports.
ruleset = ctypes.create_string_buffer(struct.pack("QQ", 0, 3))
for number in (444, 445, 446):
    arguments = (ctypes.addressof(ruleset), 16, 0, 0)
    print("held" if call((number, number), *arguments) == "EPERM" else "ESCAPED", number)
open("/tmp/file", "w").close()
try:
    os.setxattr("/tmp/file", "user.a", bytes(1 << 16))
    print("ESCAPED")
except PermissionError:
    print("held")
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 1))
packet_filter = struct.pack("HxxxxxxP", 1, ctypes.addressof(code))
left, right = socket.socketpair()
try:
    left.setsockopt(socket.SOL_SOCKET, 26, packet_filter)
    print("ESCAPED")
except PermissionError:
    print("held")
filters = ctypes.create_string_buffer(packet_filter)
ctypes.set_errno(0)
libc.prctl(22, ctypes.c_long(2), filters, 0, 0)  # equivalent to the system call seccomp
print("held" if ctypes.get_errno() == errno.EPERM else "ESCAPED")
