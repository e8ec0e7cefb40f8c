"""Public measurements, and what is predicted for them: `measurements.yml`.

They are what the constants are fitted to and, the other half of them, judged by.
"""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from maxtext_nvfp4.predict import step
from maxtext_nvfp4.predict.calibration import Calibration
from maxtext_nvfp4.predict.hardware import hardware
from maxtext_nvfp4.predict.kernels import Device
from maxtext_nvfp4.predict.remat import named
from maxtext_nvfp4.predict.workload import Format, GemmFormats, Layout, Linear, Remat, Workload, linear

_SEQUENCE = 8192
_HEAD_SIZE = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement(abc.ABC):
    """A published time.

    Attributes:
      source: Key in the file's `sources`.
      what: What was run, for people.
      hardware: Key in `hardware.yml`.
      precision: Format of the GEMMs that are quantized at all.
      seconds: The time.
      fitted: Whether the constants were fitted to it.
    """

    source: str
    what: str
    hardware: str
    precision: Format
    seconds: float
    fitted: bool

    @abc.abstractmethod
    def predicted(self, calibration: Calibration) -> float:
        """Seconds that the constants give."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Measurement):
    """A training step."""

    workload: Workload

    def predicted(self, calibration: Calibration) -> float:
        """Seconds of the step."""
        return step.step(self.workload, hardware(self.hardware), calibration).seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemms(Measurement):
    """The GEMMs of a layer.

    Attributes:
      tokens: Rows.
      sizes: Contraction size and output features of each linear layer.
      quantizing: Whether their operands are quantized in that time.
    """

    tokens: int
    sizes: Sequence[tuple[int, int]]
    quantizing: bool

    def predicted(self, calibration: Calibration) -> float:
        """Seconds of fprop, dgrad and wgrad of all."""
        device = Device(hardware=hardware(self.hardware), calibration=calibration)
        wanted, m, seconds = self.precision, self.tokens, 0.0
        for k, n in self.sizes:
            seconds += sum(device.gemm(wanted, *shape) for shape in ((m, n, k), (m, k, n), (k, n, m)))
            if self.quantizing:
                seconds += device.quantize((wanted, wanted), m * k + m * n + k * n)
        return seconds


@functools.cache
def measurements() -> tuple[Measurement, ...]:
    """All of the file."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yml").read_text())
    runs = (run for row in table["runs"] for run in _runs(row, table["models"][row["model"]]))
    return (*runs, *_gemms(table["gemms"]))


def shortest() -> float:
    """Seconds of the shortest step among them."""
    return min(found.seconds for found in measurements() if isinstance(found, Run))


def _runs(row: Mapping[str, Any], model: Mapping[str, int]) -> Iterator[Run]:
    bf16 = _workload(row, model)
    what = f"{row['model']}, {bf16.layout.devices} GPUs"
    for precision, tflops in row["tflops"].items():
        yield Run(
            source=row["source"],
            what=what,
            hardware=row["hardware"],
            precision=precision,
            seconds=bf16.model_flops / (tflops * 1e12),
            fitted=row.get("fit", False),
            workload=bf16.in_format(precision),
        )


def _workload(row: Mapping[str, Any], model: Mapping[str, int]) -> Workload:
    return Workload(
        linears=tuple(_linears(model, row.get("fused", False))),
        layers=model["layers"],
        width=model["width"],
        mlp_width=model["mlp_width"],
        mlp_inputs=2,
        query_width=model["query_width"],
        kv_width=model["kv_width"],
        head_size=_HEAD_SIZE,
        vocabulary=model["vocabulary"],
        tied=False,
        one_hot=False,
        sequence=_SEQUENCE,
        sequences=row["sequences"],
        microbatches=row.get("microbatches", 1),
        layout=Layout(**row["layout"]),
        remat=named(row["remat"]) if "remat" in row else Remat(policy="keep everything", saved=None),
        once_per_step=row["source"].startswith("megatron"),
        # Both publishers' weights are gathered, and their gradients reduced, in BF16.
        gradient_bytes=2,
    )


def _linears(model: Mapping[str, int], fused: bool) -> Iterator[Linear]:
    width, hidden, query, kv = (model[key] for key in ("width", "mlp_width", "query_width", "kv_width"))
    sizes = {"out": (query, width), "wo": (hidden, width)}
    if fused:
        sizes |= {"qkv_proj": (width, query + 2 * kv), "wi": (width, 2 * hidden)}
    else:
        sizes |= dict.fromkeys(("key", "value"), (width, kv)) | {"query": (width, query)}
        sizes |= dict.fromkeys(("wi_0", "wi_1"), (width, hidden))
    formats: Mapping[GemmFormats, int] = {("bf16", "bf16", "bf16"): model["layers"]}
    for name, (k, n) in sizes.items():
        yield linear(name, k, n, formats)


def _gemms(table: Mapping[str, Any]) -> Iterator[Gemms]:
    for precision, times in table["milliseconds"].items():
        for name, milliseconds in times.items():
            yield Gemms(
                source=table["source"],
                what=f"12 GEMMs of a layer, {'and their operands' if name == 'quantizing' else name}",
                hardware=table["hardware"],
                precision=precision,
                seconds=milliseconds / 1e3,
                fitted=precision in table["fit"],
                tokens=table["tokens"],
                sizes=table["sizes"],
                quantizing=name == "quantizing",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """Two runs of one publisher, model and number of GPUs, of which `fast` is in fewer bits or finer blocks."""

    slow: Run
    fast: Run

    @property
    def fitted(self) -> bool:
        """Whether the constants were fitted to either."""
        return self.slow.fitted or self.fast.fitted

    @property
    def measured(self) -> float:
        """How many times as many FLOPs, and so tokens, a second."""
        return _ratio(self, self.slow.seconds, self.fast.seconds)

    def predicted(self, calibration: Calibration) -> float:
        """The same as the constants give it."""
        return _ratio(self, self.slow.predicted(calibration), self.fast.predicted(calibration))


def _ratio(of: SpeedUp, slow: float, fast: float) -> float:
    return (slow / of.slow.workload.model_flops) / (fast / of.fast.workload.model_flops)


def speed_ups() -> tuple[SpeedUp, ...]:
    """Every pair of precisions in which the same was run."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for found in measurements():
        if isinstance(found, Run):
            groups.setdefault((found.source, found.what, found.hardware), []).append(found)
    return tuple(
        SpeedUp(slow=slow, fast=fast)
        for runs in groups.values()
        for slow, fast in itertools.combinations(runs, 2)
    )
