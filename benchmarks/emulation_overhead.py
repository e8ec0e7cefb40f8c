"""What emulated NVFP4 costs: training-step time against stock MaxText in BF16 and in float32.

    python benchmarks/emulation_overhead.py --rounds 15 --json OUT.json
    python benchmarks/emulation_overhead.py --preset h200 --json OUT.json      on a GPU

All programs are compiled first, in one process. Then they take turns, one step each, round after round, so that
whatever else the machine does falls on all of them; a ratio is the median of the ratios within the rounds, with
the smallest and largest beside it. Timed is one call of MaxText's whole training step (forward and backward
pass, AdamW, metrics), jitted and with the state donated as in training, until its results are ready. Batches
stay on the device.

Programs: stock in BF16; stock with dtype=float32; this plugin's backends `emulated` and `xla`, with the recipe
`all_layers` so that no layer is spared; and MaxText's own emulation of FP4 through Qwix (quantization=fp4,
use_qwix_quantization=true), which has one scale per channel, no transform and no stochastic rounding.

A BF16 step is a fair yardstick only where the hardware multiplies BF16 well. On CPUs with AMX or AVX-512 BF16, XLA's fast path
needs the contracted axis last; stock's weight gradients contract the first and fall off it, so float32 may be
the faster of the two.
"""

import sys
from collections.abc import Sequence
from typing import Any

from maxtext_step import Runner
from output import begin, finish, parse, parser, table
from presets import PRESETS
from rounds import cell, interleave, ratios, spread

_NVFP4 = {"quantization": "nvfp4"}
PROGRAMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "float32": {"dtype": "float32"},
    "emulated": {**_NVFP4, "nvfp4": {"recipe": "all_layers", "backend": "emulated"}},
    "xla": {**_NVFP4, "nvfp4": {"recipe": "all_layers", "backend": "xla"}},
    "qwix_fp4": {"quantization": "fp4", "use_qwix_quantization": True},
}


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__file__, __doc__, rounds=11)
    options.add_argument("--preset", choices=PRESETS, default="cpu")
    options.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME")
    arguments = parse(options, argv)
    facts, preset = begin(), "tiny" if arguments.quick else arguments.preset
    runners = {}
    for name in dict.fromkeys(["bf16", "float32", *arguments.programs]):
        runners[name] = Runner(PRESETS[preset], PROGRAMS[name])
        print(f"{name}: compiled in {runners[name].compile_seconds:.1f} s", file=sys.stderr)
    times = interleave({name: runner.step for name, runner in runners.items()}, arguments.rounds)

    programs = {
        name: {
            "seconds": spread(spent),
            "over_bf16": ratios(spent, times["bf16"]),
            "over_float32": ratios(spent, times["float32"]),
            "compile_seconds": runners[name].compile_seconds,
            "loss": runners[name].loss,
            "all_seconds": spent,
        }
        for name, spent in times.items()
    }
    rows = [("program", "step ms", "over bf16 (min to max)", "over float32 (min to max)", "loss")]
    rows += [
        (
            name,
            f"{1e3 * program['seconds']['median']:.1f}",
            cell(program["over_bf16"]),
            cell(program["over_float32"]),
            f"{program['loss']:.4f}",
        )
        for name, program in programs.items()
    ]
    print(f"preset {preset}, {arguments.rounds} rounds\n\n{table(rows)}")
    finish(arguments, facts, {"model": PRESETS[preset], "programs": programs})


if __name__ == "__main__":
    main()
