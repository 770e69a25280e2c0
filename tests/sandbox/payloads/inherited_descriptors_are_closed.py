# role: program
# ends: ok
import os

found = []
for descriptor in range(3, 70000):
    try:
        os.fstat(descriptor)
        found.append(descriptor)
    except OSError:
        pass
print("ESCAPED" if found else "held", found)
