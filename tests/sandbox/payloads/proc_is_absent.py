# role: program
# ends: ok
import os, subprocess

print("ESCAPED" if os.path.exists("/proc/self") or os.path.exists("/proc/1") else "held")
os.makedirs("/tmp/proc")
done = subprocess.run(["/usr/bin/mount", "-t", "proc", "proc", "/tmp/proc"], capture_output=True)
print("ESCAPED" if done.returncode == 0 or os.listdir("/tmp/proc") else "held")
