# role: program
# ends: ok
import os, socket

# A pipe or socket that holds one byte keeps its whole page, which the disk limit no longer counts
# once the file is truncated.
file = os.open("/tmp/file", os.O_RDWR | os.O_CREAT)
os.write(file, bytes(1 << 16))
reader, writer = os.pipe()
other_reader, other_writer = os.pipe()
os.write(writer, b"x")
left, right = socket.socketpair()
for call, arguments in (
    (os.splice, (file, writer, 1, 0)),
    (os.splice, (reader, left.fileno(), 1)),
    (os.sendfile, (left.fileno(), file, 0, 1)),
    (os.sendfile, (writer, file, 0, 1)),
):
    try:
        call(*arguments)
        print("ESCAPED", call, arguments)
    except PermissionError:
        print("held", call)
