# role: program
# ends: ok
import os

for act in (
    lambda: os.setuid(0),
    lambda: os.setgid(0),
    lambda: os.setresuid(0, 0, 0),
    lambda: os.setgroups([0]),
    lambda: os.seteuid(0),
    lambda: os.chown("/tmp", 0, 0),
):
    try:
        act()
        print("ESCAPED")
    except OSError:
        print("held")
