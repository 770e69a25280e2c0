# role: program
# ends: ok
import socket

try:
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as link:
        link.settimeout(1)
        link.connect(("::1", CANARY_PORT))
        print("ESCAPED", link.recv(100))
except OSError as error:
    print("held", error)
