"""What telemetry costs: the time of a sampled training step, and of the steps between, against a run without it.

    python benchmarks/telemetry_overhead.py --rounds 15 --json OUT.json
    python benchmarks/telemetry_overhead.py --preset h200 --json OUT.json      on a GPU

All programs are compiled first, in one process, and take turns, as in `emulation_overhead.py`, which says what is
timed. The step between two samples is the very program of a run without telemetry (the lowered texts are
compared here, too), so its ratio shows the noise of the measurement. A sampled step's ratio does not hold the
time to write its file.
"""

from collections.abc import Sequence
from typing import Any

from maxtext_step import Runner, TrainStep, load
from output import begin, finish, parse, parser, table
from presets import PRESETS
from rounds import cell, interleave, ratios, spread

_RECIPES = ("paper", "all_layers")
_EVERY = 100


def _keys(recipe: str, telemetry: bool) -> dict[str, Any]:
    section: dict[str, Any] = {"recipe": recipe, "backend": "emulated"}
    if telemetry:
        section["telemetry"] = {"every": _EVERY}
    return {"quantization": "nvfp4", "nvfp4": section}


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__file__, __doc__, rounds=11)
    options.add_argument("--preset", choices=PRESETS, default="cpu")
    options.add_argument("--recipe", choices=_RECIPES, default="paper")
    arguments = parse(options, argv)
    facts, preset = begin(), "tiny" if arguments.quick else arguments.preset
    model = PRESETS[preset]

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
    times = interleave({name: runner.step for name, runner in runners.items()}, arguments.rounds)
    steps = {
        name: {
            "seconds": spread(spent),
            "over_off": ratios(spent, times["off"]),
            "compile_seconds": runners[name].compile_seconds,
            "loss": runners[name].loss,
            "all_seconds": spent,
        }
        for name, spent in times.items()
    }
    rows = [("step", "ms", "over off (min to max)", "compiled in s", "loss")]
    rows += [
        (
            name,
            f"{1e3 * step['seconds']['median']:.1f}",
            cell(step["over_off"], 3),
            f"{step['compile_seconds']:.1f}",
            f"{step['loss']:.6f}",
        )
        for name, step in steps.items()
    ]
    same = len(texts) == 1
    average = 1 + (steps["sampled"]["over_off"]["median"] - 1) / _EVERY
    print(f"preset {preset}, recipe {arguments.recipe}, {arguments.rounds} rounds\n\n{table(rows)}")
    print(
        f"\nthe program between samples is {'the same text' if same else 'ANOTHER TEXT'} as without telemetry"
    )
    print(f"a run that samples every {_EVERY} steps: {average:.4f}")
    result = {
        "model": model,
        "recipe": arguments.recipe,
        "every": _EVERY,
        "same_program_between_samples": same,
        "steps": steps,
    }
    finish(arguments, facts, result)


if __name__ == "__main__":
    main()
