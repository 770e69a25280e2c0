# role: program
# ends: ok
import os, signal

try:
    os.kill(VICTIM_PID, signal.SIGKILL)
    print("ESCAPED")
except ProcessLookupError:
    print("held")
