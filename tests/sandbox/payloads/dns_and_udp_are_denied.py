# role: program
# ends: ok
import socket

try:
    socket.create_connection(("example.com", 80), timeout=1)
    print("ESCAPED")
except OSError as error:
    print("held", error)
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", CANARY_PORT))
    print("ESCAPED")
except OSError as error:
    print("held", error)
