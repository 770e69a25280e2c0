# role: program
# ends: ok
import os, sys

places = ["/", "/usr", "/usr/bin", "/bin", "/lib", "/dev", sys.prefix, os.path.dirname(os.__file__)]
for place in places:
    try:
        with open(os.path.join(place, "planted"), "w"):
            print("ESCAPED", place)
    except OSError:
        print("held")
