# role: program
# ends: ok
import os

seen = []
for pid in range(1, 5000):
    try:
        os.kill(pid, 0)
        seen.append(pid)
    except ProcessLookupError:
        pass
    except PermissionError:
        seen.append(pid)
print("held" if len(seen) <= 3 else "ESCAPED", seen)
