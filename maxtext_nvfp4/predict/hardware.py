"""What a GPU and its network can do at best: `hardware.yml`."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from maxtext_nvfp4.predict.workload import Format

_FAMILIES: Mapping[Format, str] = {
    "nvfp4": "nvfp4",
    "fp8": "fp8",
    "fp8_current": "fp8",
    "mxfp8": "fp8",
    "bf16": "bf16",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates of one GPU, as its vendor states them.

    Attributes:
      name: Its key in the tables, such as `gb200`.
      dense_tflops: TFLOP/s of a GEMM by the width of its operands: bf16, fp8 or nvfp4.
      hbm: Bytes/s of memory.
      nvlink: Bytes/s in one direction within an NVLink domain.
      network: Bytes/s in one direction between domains.
      exponentials: Per second.
    """

    name: str
    dense_tflops: Mapping[str, float]
    hbm: float
    nvlink: float
    network: float
    exponentials: float

    def peak(self, wanted: Format) -> float:
        """FLOP/s of a GEMM with both operands in a format."""
        return self.dense_tflops[_FAMILIES[wanted]] * 1e12


@functools.cache
def hardware(name: str) -> Hardware:
    """The GPU of that name.

    Raises:
      KeyError: The table has none.
    """
    return Hardware(name=name, **_table()["hardware"][name])


@functools.cache
def names() -> tuple[str, ...]:
    """What the table has."""
    return tuple(_table()["hardware"])


@functools.cache
def _table() -> dict[str, dict]:
    table: dict[str, dict] = yaml.safe_load(Path(__file__).with_suffix(".yml").read_text())
    return table
