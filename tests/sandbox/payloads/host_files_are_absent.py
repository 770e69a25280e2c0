# role: program
# ends: ok
import os

for path in (
    "/etc/passwd",
    "/etc/shadow",
    "/home",
    "/work",
    "/var",
    "/run",
    "/mnt",
    "/sys",
    "CANARY_FOLDER",
):
    print("ESCAPED" if os.path.exists(path) else "held", path)
