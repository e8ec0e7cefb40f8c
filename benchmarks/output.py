"""What all benchmarks have in common on their command lines, on the screen and in their JSON files."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import header, load_average, machine


def parser(script: str, description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Command line of a benchmark.

    Args:
      script: Its file.
      description: Its docstring.
      rounds: How many there are if the command line does not say.
    """
    arguments = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    arguments.add_argument("--rounds", type=int, metavar="N", help=f"{rounds} if not given, 1 if quick")
    arguments.add_argument(
        "--quick", action="store_true", help="small sizes: shows that it runs, measures little"
    )
    arguments.add_argument("--json", type=Path, metavar="OUT", help="also write the result as JSON")
    arguments.set_defaults(benchmark=Path(script).stem, usual_rounds=rounds)
    return arguments


def parse(options: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads a command line, that of the process if it is None, and keeps it for `finish`."""
    given = sys.argv[1:] if argv is None else list(argv)
    options.set_defaults(command=given)
    arguments = options.parse_args(given)
    arguments.rounds = arguments.rounds or (1 if arguments.quick else arguments.usual_rounds)
    return arguments


def begin() -> dict[str, Any]:
    """Prints what the machine is, and returns it for `finish`."""
    facts = machine()
    print(header(facts), flush=True)
    return facts


def finish(arguments: argparse.Namespace, facts: dict[str, Any], result: dict[str, Any]) -> None:
    """Prints how busy the machine was in the end, and writes the result if the command line says where."""
    after = load_average()
    print(f"\nload average after: {' '.join(map(str, after))}")
    if arguments.json:
        whole = {
            "benchmark": arguments.benchmark,
            "command": [f"benchmarks/{arguments.benchmark}.py", *arguments.command],
            "quick": arguments.quick,
            "rounds": arguments.rounds,
            "machine": {**facts, "load_average_after": after},
            **result,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(whole, indent=2) + "\n")


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows of text in columns, the first row a heading, the first column to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *rest = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join((first, *rest)).rstrip())
    return "\n".join(lines)
