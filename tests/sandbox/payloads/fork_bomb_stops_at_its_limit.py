# role: program
# ends: timeout memory killed
import os

while True:
    try:
        os.fork()
    except OSError:
        pass
