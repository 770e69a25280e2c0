# role: program
# ends: ok
import os

os.chdir("/tmp")
print("held" if sorted(os.listdir("../" * 40)) == sorted(os.listdir("/")) else "ESCAPED")
folder = os.open("/", os.O_RDONLY)
print("ESCAPED" if "etc" in os.listdir(folder) or "etc" in os.listdir("..") else "held")
