# role: program
# ends: ok
import os

print(dict(os.environ), os.environb)
print("ESCAPED" if any("CANARY" in name or "TOKEN" in name for name in os.environ) else "held")
