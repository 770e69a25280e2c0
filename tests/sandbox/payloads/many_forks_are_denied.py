# role: program
# ends: ok
import os, signal, time

children = []
try:
    for _ in range(200):
        child = os.fork()
        if child == 0:
            time.sleep(60)
        children.append(child)
except OSError:
    pass
print("ESCAPED" if len(children) > 64 else "held", len(children))
