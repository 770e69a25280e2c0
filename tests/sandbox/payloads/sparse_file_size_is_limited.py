# role: program
# ends: ok
with open("/tmp/holes", "wb") as file:
    try:
        file.truncate(1 << 40)
        print("ESCAPED")
    except OSError as error:
        print("held", error)
