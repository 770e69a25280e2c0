# role: program
# ends: ok
import socket

try:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(1)
        link.connect("\0CANARY_SOCKET")
        print("ESCAPED", link.recv(100))
except OSError as error:
    print("held", error)
