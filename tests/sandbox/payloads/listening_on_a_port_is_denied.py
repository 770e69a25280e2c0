# role: program
# ends: ok
import socket

try:
    socket.create_server(("127.0.0.1", 0))
    print("ESCAPED")
except OSError as error:
    print("held", error)
