# role: program
# ends: memory failed
import ctypes, mmap

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
SIZE, PAGE = 64 << 20, mmap.PAGESIZE

# Each mapping keeps all of its pages, though only one page stays mapped.
for _ in range(24):
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, ctypes.c_size_t(SIZE), 3, flags, -1, ctypes.c_long(0))
    if address == ctypes.c_void_p(-1).value:
        raise MemoryError(ctypes.get_errno())
    ctypes.memset(address, 1, SIZE)
    libc.munmap(ctypes.c_void_p(address + PAGE), ctypes.c_size_t(SIZE - PAGE))
print("ESCAPED")
