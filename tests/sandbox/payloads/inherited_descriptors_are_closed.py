# role: program
# ends: ok
import os

open_descriptors = []
for descriptor in range(3, 70000):
    try:
        os.fstat(descriptor)
        open_descriptors.append(descriptor)
    except OSError:
        pass
print("ESCAPED" if open_descriptors else "held", open_descriptors)
