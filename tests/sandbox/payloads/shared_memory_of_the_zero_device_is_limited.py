# role: program
# ends: memory failed
import ctypes, mmap, os

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
SIZE, PAGE = 64 << 20, mmap.PAGESIZE

zero = os.open("/dev/zero", os.O_RDWR)
assert os.read(zero, 3) == bytes(3)
for _ in range(24):
    address = libc.mmap(None, ctypes.c_size_t(SIZE), 3, mmap.MAP_SHARED, zero, ctypes.c_long(0))
    if address == ctypes.c_void_p(-1).value:
        raise MemoryError(ctypes.get_errno())
    ctypes.memset(address, 1, SIZE)
    libc.munmap(ctypes.c_void_p(address + PAGE), ctypes.c_size_t(SIZE - PAGE))
print("ESCAPED")
