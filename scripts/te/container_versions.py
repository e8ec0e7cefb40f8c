"""Compares this Python's packages with those the plugin supports; names every mismatch and exits with 1.

python container_versions.py PYPROJECT

Reads the pins of pyproject.toml. Of Transformer Engine the first two numbers must agree, and what a vendor
appends to a version after a plus sign does not count. Runs in any Python 3, so that it can say that this one
is too old.
"""

import re
import sys
from importlib import metadata

NONE = "none"


def found(package: str) -> str:
    """Returns the installed version of a package, or NONE."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NONE


def needed(pyproject: str) -> "dict[str, str]":
    """Returns what must be there: a version, one that ends in .* or, if any will do, the word any."""
    [dependencies] = re.findall(r"^dependencies = \[\n(.*?)^\]", pyproject, re.M | re.S)
    versions = {
        name: version or "any" for name, version in re.findall(r'"([\w-]+)(?:==([^"]+))?"', dependencies)
    }
    [engine] = re.findall(r'"transformer-engine==(\d+\.\d+)', pyproject)
    return {**versions, "transformer-engine": f"{engine}.*"}


def fits(have: str, want: str) -> bool:
    """Whether a version is the one that is needed."""
    public = have.split("+")[0]
    if want.endswith(".*"):
        return f"{public}.".startswith(want[:-1])
    return have != NONE and want in ("any", public)


def main() -> int:
    """Prints the mismatches, or else what was found."""
    with open(sys.argv[1], encoding="utf-8") as file:
        pyproject = file.read()
    rows = {name: (found(name), version) for name, version in needed(pyproject).items()}
    [python] = re.findall(r'^requires-python = ">=(\d+\.\d+)', pyproject, re.M)
    rows = {"python": ("{}.{}.{}".format(*sys.version_info), f"{python}.*"), **rows}
    wrong = {name: pair for name, pair in rows.items() if not fits(*pair)}
    for name, (have, want) in (wrong or rows).items():
        print(f"  {name:<20}found {have:<24}needed {want}" if wrong else f"  {name:<20}{have}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
