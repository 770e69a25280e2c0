# role: program
# ends: ok
import os

for number, target in enumerate(
    (
        "/etc/shadow",
        "CANARY_FOLDER/secret",
        "../../../../CANARY_FOLDER/secret",
        "/proc/1/root/etc/passwd",
    )
):
    os.symlink(target, f"/tmp/{number}")
    try:
        print("ESCAPED", open(f"/tmp/{number}").read())
    except OSError:
        print("held")
    try:
        open(f"/tmp/{number}", "w").write("planted")
        print("ESCAPED")
    except OSError:
        print("held")
