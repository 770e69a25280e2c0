# role: program
# ends: killed
import ctypes

ctypes.string_at(0)
