"""What a check says: a status, what was found, and what to do."""

import dataclasses
from typing import Any, Literal

type Status = Literal["ok", "problem", "note"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
      status: `problem` keeps the run from starting, `note` costs speed, precision or comfort.
      found: What was found.
      fix: What to do about it; empty if nothing needs doing.
    """

    status: Status
    found: str
    fix: str = ""


def ok(found: str) -> Finding:
    """Nothing needs doing."""
    return Finding("ok", found)


def note(found: str, fix: str) -> Finding:
    """The run can start, and would be better otherwise."""
    return Finding("note", found, fix)


def problem(found: str, fix: str) -> Finding:
    """The run cannot start, or dies soon."""
    return Finding("problem", found, fix)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A finding with the name of its check."""

    name: str
    finding: Finding

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {"name": self.name, **dataclasses.asdict(self.finding)}


def size(count: float) -> str:
    """A number of bytes as people read it, in powers of 1000 as disks and NVIDIA count them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB" if count < 1000 else f"{count:,.0f} TB"


def listed(words: list[str], most: int = 4) -> str:
    """A list in one line, cut where it gets long."""
    rest = len(words) - most
    return ", ".join(words[:most]) + (f" and {rest} more" if rest > 0 else "")
