# role: program
# ends: ok
import os

cache = os.path.join(os.path.dirname(os.__file__), "__pycache__")
for path in (os.__file__, *(os.path.join(cache, name) for name in os.listdir(cache)[:20])):
    for act in (lambda: open(path, "r+b"), lambda: os.unlink(path), lambda: os.chmod(path, 0o777)):
        try:
            act()
            print("ESCAPED", path)
        except OSError:
            print("held")
