# role: program
# ends: output_limit
import sys

while True:
    sys.stderr.write("x" * 1000)
