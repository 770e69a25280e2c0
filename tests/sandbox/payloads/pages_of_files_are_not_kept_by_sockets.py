# role: program
# ends: ok
import os, socket

# A byte of each page keeps the page, although the disk gets it back when the file is truncated.
file = os.open("/tmp/file", os.O_RDWR | os.O_CREAT)
os.write(file, bytes(1 << 16))
reader, writer = os.pipe()
other_reader, other_writer = os.pipe()
os.write(writer, b"x")
ours, theirs = socket.socketpair()
for call, arguments in (
    (os.splice, (file, writer, 1, 0)),
    (os.splice, (reader, ours.fileno(), 1)),
    (os.sendfile, (ours.fileno(), file, 0, 1)),
    (os.sendfile, (writer, file, 0, 1)),
):
    try:
        call(*arguments)
        print("ESCAPED", call, arguments)
    except PermissionError:
        print("held", call)
