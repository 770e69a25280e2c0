# role: program
# ends: ok
import gc, sys, types

seen, waiting = set(), []
frame = sys._getframe()
while frame is not None:
    waiting.append(frame.f_code)
    frame = frame.f_back
waiting += [
    function.__code__ for function in gc.get_objects() if isinstance(function, types.FunctionType)
]
while waiting:
    code = waiting.pop()
    seen.add(code.co_filename)
    waiting += [part for part in code.co_consts if isinstance(part, types.CodeType)]
known = ("<", "/python/", "/usr/", "program.py")
unexpected = [name for name in seen if not name.startswith(known) or "/rollick" in name]
print("ESCAPED" if unexpected else "held", unexpected)
