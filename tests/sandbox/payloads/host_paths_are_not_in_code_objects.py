# role: program
# ends: ok
import gc, sys, types

seen, waiting = set(), []
frame = sys._getframe()
while frame is not None:
    waiting.append(frame.f_code)
    frame = frame.f_back
waiting += [found.__code__ for found in gc.get_objects() if isinstance(found, types.FunctionType)]
while waiting:
    code = waiting.pop()
    seen.add(code.co_filename)
    waiting += [part for part in code.co_consts if isinstance(part, types.CodeType)]
known = ("<", "/python/", "/usr/", "program.py")
strange = [name for name in seen if not name.startswith(known) or "/rollick" in name]
print("ESCAPED" if strange else "held", strange)
