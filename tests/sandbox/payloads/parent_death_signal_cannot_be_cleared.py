# role: program
# ends: ok
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
for signal in (0, 15):
    libc.prctl(1, ctypes.c_long(signal), 0, 0, 0)
    print("held" if ctypes.get_errno() == 1 else "ESCAPED", signal)
