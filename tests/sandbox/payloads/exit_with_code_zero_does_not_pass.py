# role: candidate
# ends: ok killed
import os

os._exit(0)
