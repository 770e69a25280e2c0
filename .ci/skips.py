"""Fail on a skipped test whose reason is not listed: skips.py LOG ALLOWED."""

import re
import sys
from pathlib import Path

log, allowed_path = sys.argv[1:]
allowed = [
    line.strip()
    for line in Path(allowed_path).read_text(encoding="utf-8").splitlines()
    if line.strip() and not line.startswith("#")
]
skips = re.findall(r"^SKIPPED \[\d+\] (.*)$", Path(log).read_text(encoding="utf-8"), re.MULTILINE)
unknown = [skip for skip in skips if not any(reason in skip for reason in allowed)]
for skip in unknown:
    print(f"skip that tests/allowed_skips.txt does not list: {skip}")
sys.exit(1 if unknown else 0)
