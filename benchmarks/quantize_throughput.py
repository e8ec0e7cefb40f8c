"""How fast values become 4-bit codes, against the memory's bandwidth and against other emulations of the format.

    python benchmarks/quantize_throughput.py --json OUT.json

Each case of `quantize_cases.CASES` is one call on the same bfloat16 matrix, normal with a few outlier features. All
implementations of a case take turns; PyTorch's run in a process of their own, which is idle in between. Timed is one
call until its results are ready; jitted code is compiled before.

The bound is a jitted pass over the same matrix that negates it: two bytes in and two out for each element. A quantizer
reads each element twice, as the tensor's scale must be known before the first code, and writes 9/16 of a byte.
GB/s counts the bytes that it must read and write once.

The agreement says whether a peer does the same work: the share of its block scales and codes that are those of
`maxtext_nvfp4.quantize`, in the cases without noise. One level of scales (Qwix) and stochastic rounding, which each
does with noise of its own, have no such figure; Transformer Engine and fouroversix round the block scale once more (docs/numerics.md),
torchao has a least block scale of 2**-6.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import Array
from machine import installed
from output import begin, finish, parse, parser, table
from peer_process import PeerProcess, peer_process
from quantize_cases import (
    CASES,
    OPERAND,
    OURS,
    Implementation,
    Stored,
    operands,
    ours,
    qwix,
    transformer_engine,
)
from rounds import Trial, cell, interleave, ratios, spread

COPY = "copy"
_STORED_BYTES = 4 / 8 + 1 / 16  # a code, and its share of a block scale


def matrix(tokens: int, features: int) -> np.ndarray:
    """A bfloat16 matrix like an activation: normal, one feature in 64 sixteen times as large."""
    random = np.random.default_rng(0)
    x = random.standard_normal((tokens, features), np.float32)
    x[:, ::64] *= 16
    return x.astype(ml_dtypes.bfloat16)


def seconds(run: Any, x: Array) -> float:
    """Of one call until its results are ready."""
    start = time.perf_counter()
    jax.block_until_ready(run(x))
    return time.perf_counter() - start


def trials(
    case: str, x: Array, implementations: dict[str, dict[str, Implementation]], process: PeerProcess | None
) -> Iterator[tuple[str, Trial]]:
    """Everything that can do a case."""
    copy = jax.jit(lambda x: -x)
    yield COPY, lambda: seconds(copy, x)
    for name, cases in implementations.items():
        if case in cases:
            yield name, lambda run=cases[case].run: seconds(run, x)
    for name, cases in process.cases.items() if process else ():
        if case in cases:
            yield name, lambda name=name: process.seconds(name, case)


def agreement(ours: tuple[Stored, ...], other: tuple[Stored, ...]) -> dict[str, float]:
    """Shares of equal block scales and of equal codes, -0 being equal to 0."""
    scales = [np.mean(a.scales == b.scales) for a, b in zip(ours, other, strict=True)]
    codes = [
        np.mean(_positive_zero(a.codes) == _positive_zero(b.codes)) for a, b in zip(ours, other, strict=True)
    ]
    return {"equal_scales": float(np.mean(scales)), "equal_codes": float(np.mean(codes))}


def _positive_zero(codes: np.ndarray) -> np.ndarray:
    return np.where(codes == 8, 0, codes)


def compare(
    case: str, x: Array, implementations: dict[str, dict[str, Implementation]], process: PeerProcess | None
) -> dict[str, dict[str, float]]:
    """The agreement of each peer that does the same arithmetic."""
    if "stochastic" in case:
        return {}

    def stored(implementation: Implementation) -> tuple[Stored, ...]:
        return implementation.stored(implementation.run(x))

    expected = stored(implementations[OURS][case])
    found = {
        name: stored(cases[case])
        for name, cases in implementations.items()
        if case in cases and name not in (OURS, OPERAND, "qwix")
    }
    for name, cases in process.cases.items() if process else ():
        if case in cases:
            found[name] = process.stored(name, case)
    return {name: agreement(expected, result) for name, result in found.items()}


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__file__, __doc__, rounds=15)
    options.add_argument("--shape", type=int, nargs=2, metavar=("TOKENS", "FEATURES"), default=[4096, 2048])
    options.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    arguments = parse(options, argv)
    shape = (256, 512) if arguments.quick else tuple(arguments.shape)
    facts = begin()
    values = matrix(*shape)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        np.save(folder / "x.npy", values.view(np.uint16))
        process = stack.enter_context(peer_process(folder, compiled=not arguments.quick))
        implementations = {OURS: ours(), OPERAND: operands(), "qwix": qwix()}
        versions = {"qwix": installed("qwix"), "transformer_engine": installed("transformer_engine")}
        if versions["transformer_engine"]:
            implementations["transformer_engine"] = stack.enter_context(transformer_engine())
        versions |= {"torch": "", "torchao": "", "fouroversix": ""} | (process.versions if process else {})
        print(
            "peers: " + ", ".join(f"{name} {found or 'not installed'}" for name, found in versions.items()),
            f"\n{shape[0]} tokens, {shape[1]} features, {arguments.rounds} rounds",
        )
        x = jax.numpy.asarray(values)
        cases = {}
        for case in arguments.cases:
            found = interleave(dict(trials(case, x, implementations, process)), arguments.rounds, warmup=2)
            cases[case] = summary(case, x.size, found, compare(case, x, implementations, process))
            print(f"\n{case}: {CASES[case]}\n{show(cases[case])}", flush=True)
    finish(arguments, facts, {"shape": shape, "peers": versions, "cases": cases})


def summary(
    case: str, size: int, times: dict[str, list[float]], agreements: dict[str, dict[str, float]]
) -> dict[str, dict[str, Any]]:
    """The figures of a case by implementation.

    `over_ours` above 1 means slower than this package, `over_copy` is how many passes over the matrix it takes.
    """
    copies = 2 if case == "both" else 1
    result: dict[str, dict[str, Any]] = {}
    for name, spent in times.items():
        middle = spread(spent)["median"]
        moved = 4.0 if name == COPY else 2 + copies * _STORED_BYTES
        result[name] = {
            "seconds": spread(spent),
            "elements_per_second": size / middle,
            "gigabytes_per_second": moved * size / middle / 1e9,
            "over_ours": ratios(spent, times[OURS]),
            "over_copy": ratios(spent, times[COPY]),
            "agreement": agreements.get(name),
            "all_seconds": spent,
        }
    return result


def show(figures: dict[str, dict[str, Any]]) -> str:
    """A table of one case."""
    rows = [("", "ms", "elements/s", "GB/s", "time over ours", "over copy", "equal scales", "equal codes")]
    for name, row in figures.items():
        same = row["agreement"]
        rows.append(
            (
                name,
                f"{1e3 * row['seconds']['median']:.2f}",
                f"{row['elements_per_second']:.2e}",
                f"{row['gigabytes_per_second']:.2f}",
                cell(row["over_ours"]),
                f"{row['over_copy']['median']:.1f}",
                f"{same['equal_scales']:.4%}" if same else "",
                f"{same['equal_codes']:.4%}" if same else "",
            )
        )
    return table(rows)


if __name__ == "__main__":
    main()
