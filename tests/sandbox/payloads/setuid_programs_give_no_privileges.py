# role: program
# ends: ok
import os, subprocess

for name in ("su", "sudo", "mount", "passwd", "newgrp", "chfn", "umount", "pkexec"):
    path = f"/usr/bin/{name}"
    if os.path.exists(path):
        done = subprocess.run(
            [path, "-c", "id"], capture_output=True, stdin=subprocess.DEVNULL, timeout=2
        )
        print("ESCAPED" if b"uid=0" in done.stdout else "held", name)
subprocess.run(["/usr/bin/cp", "/usr/bin/id", "/tmp/id"], check=True)
os.chmod("/tmp/id", 0o6755)
print("ESCAPED" if b"uid=0" in subprocess.run(["/tmp/id"], capture_output=True).stdout else "held")
