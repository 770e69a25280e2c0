"""Print what a package requires, without some names: requirements_of.py PACKAGE NAME ..."""

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

package, *without = sys.argv[1:]
for text in requires(package) or []:
    requirement = Requirement(text)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in without:
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        print(f"{requirement.name}{extras}{requirement.specifier}")
