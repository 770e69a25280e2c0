# role: program
# ends: ok
import os

print("held" if os.uname().nodename == "box" else "ESCAPED")
