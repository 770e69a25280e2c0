# role: program
# ends: ok killed
import os, signal

try:
    os.kill(-1, signal.SIGKILL)
except ProcessLookupError:
    pass
print("held")
