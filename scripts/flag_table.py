"""Writes the table of recipe keys into README.md, between `<!-- flags -->` and `<!-- /flags -->`.

python scripts/flag_table.py           # rewrite
python scripts/flag_table.py --check   # exit with status 1 if the table is not current
"""

import argparse
import re
import sys
from pathlib import Path

from maxtext_nvfp4.recipe import flag_rows

README = Path(__file__).parent.parent / "README.md"


def table() -> str:
    """The table in Markdown."""
    rows = [("key", "values", "default", "meaning"), ("---",) * 4]
    rows += [
        (f"`nvfp4.{key}`", values, f"`{default}`", meaning) for key, values, default, meaning in flag_rows()
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: list[str], readme: Path = README) -> None:
    """Rewrites or checks the table in `readme`; exits with a message and status 1 if that cannot be done."""
    parser = argparse.ArgumentParser(description="Write the table of recipe keys into README.md.")
    parser.add_argument("--check", action="store_true", help="only say whether the table is current")
    check = parser.parse_args(arguments).check
    if not readme.exists():
        sys.exit(f"{readme} does not exist")
    old = readme.read_text(encoding="utf-8")
    new, found = re.subn(
        r"(<!-- flags -->\n).*?(<!-- /flags -->)",
        lambda match: f"{match[1]}\n{table()}\n\n{match[2]}",
        old,
        flags=re.DOTALL,
    )
    if found != 1:
        sys.exit(f"{readme} must have one pair of <!-- flags --> and <!-- /flags -->, each on its own line")
    if check and new != old:
        sys.exit(f"{readme}: the table of recipe keys is out of date; run python scripts/flag_table.py")
    if not check:
        readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
