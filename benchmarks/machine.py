"""What a number was measured on."""

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("jax", "jaxlib", "flax", "maxtext", "qwix", "maxtext-nvfp4")
_FLAGS = ("avx512f", "avx512_bf16", "amx_bf16")
"""What decides how fast a CPU multiplies bfloat16."""


def machine() -> dict[str, Any]:
    """Devices, processor, versions, and how busy the machine is now."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", "").split()
    return {
        "devices": [device.device_kind for device in jax.devices()],
        "cpu": fields.get("model name", platform.machine()),
        "cores": os.cpu_count(),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "load_average": load_average(),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := installed(name))},
    }


def load_average() -> list[float]:
    """Processes that ran or waited to run, over 1, 5 and 15 minutes."""
    return [round(load, 2) for load in os.getloadavg()]


def installed(package: str) -> str:
    """The version of a package; empty if it is not installed."""
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return ""


def header(facts: dict[str, Any]) -> str:
    """The facts of `machine` for people."""
    devices = ", ".join(
        f"{facts['devices'].count(kind)} x {kind}" for kind in dict.fromkeys(facts["devices"])
    )
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return "\n".join(
        [
            f"{devices}; {facts['cpu']}, {facts['cores']} cores, {' '.join(facts['flags']) or 'no AVX-512'}",
            f"load average {' '.join(map(str, facts['load_average']))}",
            f"python {facts['python']}, {versions}",
        ]
    )
