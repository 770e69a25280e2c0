# role: program
# ends: timeout
import os, signal

child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
os.waitpid(child, 0)
