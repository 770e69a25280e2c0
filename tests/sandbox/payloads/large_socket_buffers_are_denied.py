# role: program
# ends: ok
import socket

left, right = socket.socketpair()
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):
    try:
        left.setsockopt(socket.SOL_SOCKET, option, 1 << 22)
        print("ESCAPED", option)
    except PermissionError:
        print("held", option)
for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    try:
        socket.socketpair(socket.AF_UNIX, kind)
        print("ESCAPED", kind)
    except PermissionError:
        print("held", kind)
