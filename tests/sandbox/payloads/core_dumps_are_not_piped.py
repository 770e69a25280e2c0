# role: program
# ends: ok
import ctypes, os, resource

# The kernel runs the program of a piped core pattern unless the limit is exactly 1.
print("held" if resource.getrlimit(resource.RLIMIT_CORE) == (1, 1) else "ESCAPED")
if os.fork() == 0:
    ctypes.string_at(0)
_, status = os.wait()
print("held" if os.WIFSIGNALED(status) and not os.WCOREDUMP(status) else "ESCAPED", status)
