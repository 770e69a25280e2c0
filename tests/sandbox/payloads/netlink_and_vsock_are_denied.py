# role: program
# ends: ok
import socket

for family in (16, 17, 38, 40):  # netlink, packet, crypto, vsock
    for kind in (socket.SOCK_STREAM, socket.SOCK_RAW, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        try:
            socket.socket(family, kind)
            print("ESCAPED", family)
        except PermissionError:
            print("held")
