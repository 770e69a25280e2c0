# role: program
# ends: ok
import os, sys

for folder, folders, files in os.walk("/root"):
    if folder.startswith(sys.prefix):
        folders.clear()
    elif files or not all(sys.prefix.startswith(os.path.join(folder, name)) for name in folders):
        print("ESCAPED", folder, files, folders)
print("held")
