# role: program
# ends: timeout
import os, time

os.closerange(0, 1000)
time.sleep(1000)
