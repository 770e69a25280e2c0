# role: program
# ends: ok
import os

try:
    os.link("/usr/bin/env", "/tmp/env")
    print("ESCAPED")
except OSError:
    print("held")
