"""What telemetry costs: the time of a sampled training step, and of the steps between, against a run without it.

    python benchmarks/telemetry_overhead.py --rounds 15 --json OUT.json
    python benchmarks/telemetry_overhead.py --preset h200 --json OUT.json      on a GPU

All programs are compiled first, in one process, and take turns, as in `emulation_overhead.py`, which says what is
timed. The step between two samples is the very program of a run without telemetry (the lowered texts are
compared here, too), so its ratio shows the noise of the measurement. A sampled step's ratio does not hold the
time to write its file.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from emulation_overhead import PRESETS, Runner, interleave, ratios
from maxtext_step import TrainStep, header, load, machine, table

_RECIPES = ("paper", "all_layers")
_EVERY = 100


def _keys(recipe: str, telemetry: bool) -> dict[str, Any]:
    section: dict[str, Any] = {"recipe": recipe, "backend": "emulated"}
    if telemetry:
        section["telemetry"] = {"every": _EVERY}
    return {"quantization": "nvfp4", "nvfp4": section}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--recipe", choices=_RECIPES, default="paper")
    parser.add_argument("--rounds", type=int, default=11, metavar="N")
    parser.add_argument("--warmup", type=int, default=1, metavar="N", help="rounds that are not counted")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the result as JSON")
    arguments = parser.parse_args()
    facts, model = machine(), PRESETS[arguments.preset]
    print(header(facts))

    plain, with_telemetry = (_keys(arguments.recipe, telemetry) for telemetry in (False, True))
    texts = {
        TrainStep(load(decoder_block="llama2", scan_layers=True, **model, **keys)).lower().as_text()
        for keys in (plain, with_telemetry)
    }
    runners = {
        "off": Runner(model, plain),
        "between": Runner(model, with_telemetry),
        "sampled": Runner(model, with_telemetry, sampled=True),
    }
    times = interleave(runners, arguments.rounds, arguments.warmup)
    over = {name: ratios(spent, times["off"]) for name, spent in times.items()}
    rows = [("step", "ms", "over off (min to max)", "compiled in s", "loss")]
    rows += [
        (
            name,
            f"{1e3 * statistics.median(spent):.1f}",
            f"{over[name]['median']:.3f} ({over[name]['min']:.3f} to {over[name]['max']:.3f})",
            f"{runners[name].compile_seconds:.1f}",
            f"{runners[name].loss:.6f}",
        )
        for name, spent in times.items()
    ]
    same = len(texts) == 1
    average = 1 + (over["sampled"]["median"] - 1) / _EVERY
    print(f"preset {arguments.preset}, recipe {arguments.recipe}, {arguments.rounds} rounds\n\n{table(rows)}")
    print(
        f"\nthe program between samples is {'the same text' if same else 'ANOTHER TEXT'} as without telemetry"
    )
    print(f"a run that samples every {_EVERY} steps: {average:.4f}")
    if arguments.json:
        result = {
            "command": sys.argv,
            "machine": {**facts, "load_average_after": machine()["load_average"]},
            "model": model,
            "recipe": arguments.recipe,
            "rounds": arguments.rounds,
            "same_program_between_samples": same,
            "over_off": over,
            "all_seconds": times,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
