# role: program
# ends: ok
kept = []
try:
    while True:
        kept.append(open("/dev/null"))
except OSError:
    pass
print("held" if len(kept) < 200 else "ESCAPED", len(kept))
