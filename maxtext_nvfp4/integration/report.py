"""What a recipe does to a model, in numbers and words: before a run, at its start and at its end."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration.attach import Resolution, for_another_machine, resolve
from maxtext_nvfp4.integration.config import enabled, load_config, recipe_of
from maxtext_nvfp4.integration.config_errors import raising_config_errors, raising_setup_errors
from maxtext_nvfp4.integration.config_files import merged_keys
from maxtext_nvfp4.integration.switch_step import switch_step
from maxtext_nvfp4.plan import GEMMS, GemmPlan, LayerPlan, OperandPlan
from maxtext_nvfp4.recipe import Recipe, problem
from maxtext_nvfp4.switch import SwitchShares, shares
from maxtext_nvfp4.tables import aligned


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One site over a range of decoder layers that share a plan."""

    path: str
    layers: str
    plan: LayerPlan
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The full account of a recipe on a model.

    Attributes:
      recipe: The resolved recipe.
      backend: Backend and why.
      rows: Sites and layer ranges.
      high_precision: (module path, reason) of matrix multiplies that are not linear layers of MaxText.
      nvfp4_gemms: 4-bit GEMMs per training step, counting fprop, dgrad and wgrad of every layer.
      gemms: All GEMMs of the linear layers, counted the same way.
      nvfp4_flops_fraction: Share of the step's forward and backward FLOPs, attention and head included by
        MaxText's own count (causal attention), that run in 4 bits. With a late switch, before it.
      switch: What the late switch changes; None without one.
    """

    recipe: Recipe
    backend: str
    rows: tuple[Row, ...]
    high_precision: tuple[tuple[str, str], ...]
    nvfp4_gemms: int
    gemms: int
    nvfp4_flops_fraction: float
    switch: SwitchShares | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return {
            "recipe": self.recipe.recipe,
            "fingerprint": self.recipe.fingerprint,
            "backend": self.backend,
            "sites": [
                {
                    "path": row.path,
                    "layers": row.layers,
                    **{gemm: getattr(row.plan, gemm).precision for gemm in GEMMS},
                    "reason": row.reason,
                    "operands": {gemm: _operands(gemm, getattr(row.plan, gemm)) for gemm in GEMMS},
                }
                for row in self.rows
            ],
            "high_precision": [{"path": path, "reason": reason} for path, reason in self.high_precision],
            "totals": {
                "nvfp4_flops_fraction": self.nvfp4_flops_fraction,
                "nvfp4_gemms": self.nvfp4_gemms,
                "gemms": self.gemms,
            },
            "switch": self.switch and self.switch.to_json(),
        }

    def to_text(self) -> str:
        """The report as a table for people."""
        cells = [("site", "layers", *GEMMS, "reason")]
        cells += [
            (row.path, row.layers, *(getattr(row.plan, gemm).precision for gemm in GEMMS), row.reason)
            for row in self.rows
        ]
        lines = [
            f"recipe {self.recipe.recipe} ({self.recipe.fingerprint}), {self.backend}",
            "",
            *aligned(cells),
            "",
        ]
        for gemm in GEMMS:
            for plan in dict.fromkeys(getattr(row.plan, gemm) for row in self.rows):
                if plan.quantized:
                    a, b = _operands(gemm, plan).items()
                    lines.append(f"{gemm}: {a[0]} {a[1]}; {b[0]} {b[1]}")
        lines += [f"high precision: {path}: {reason}" for path, reason in self.high_precision]
        if self.switch:
            lines.append(f"late switch: {self.switch.to_text()}")
        lines.append(self.headline())
        return "\n".join(lines)

    def headline(self) -> str:
        """One line of totals."""
        return (
            f"{self.nvfp4_gemms} of {self.gemms} linear-layer GEMMs in 4 bits, "
            f"{self.nvfp4_flops_fraction:.1%} of the step's FLOPs"
            + (f"; {self.switch.what()}" if self.switch else "")
        )


_OPERANDS = {
    "fprop": ("activation", "weight"),
    "dgrad": ("gradient", "weight"),
    "wgrad": ("activation", "gradient"),
}


def _operands(gemm: str, plan: GemmPlan) -> dict[str, str]:
    if not plan.quantized:
        return {}
    return {
        name: _describe(operand)
        for name, operand in zip(_OPERANDS[gemm], (plan.a, plan.b), strict=True)
        if operand
    }


def _describe(operand: OperandPlan) -> str:
    words = ["x".join(map(str, operand.block)), "stochastic" if operand.stochastic else "nearest"]
    return " ".join(words + ["hadamard"] * operand.hadamard)


def build(resolution: Resolution, recipe: Recipe, config: Any) -> Report:
    """Summarizes a resolution."""
    from maxtext.utils.maxtext_utils import calculate_tflops_training_per_device

    rows = []
    quantized = total = 0
    quantized_flops = 0.0
    tokens = config.per_device_batch_size * config.max_target_length * config.gradient_accumulation_steps
    for site_plan in resolution.plans:
        site = site_plan.site
        for layers, plan, reason in site_plan.ranges():
            rows.append(Row(path=site.path, layers=_span(layers), plan=plan, reason=reason))
            count = sum(getattr(plan, gemm).quantized for gemm in GEMMS) * max(1, len(layers))
            quantized += count
            total += len(GEMMS) * max(1, len(layers))
            quantized_flops += count * 2.0 * tokens * site.k * site.n
    switch = None
    if recipe.switch:
        step = switch_step(recipe.switch, config)
        switch = shares(resolution.plans, recipe.switch, step, config.steps)
    step_flops = calculate_tflops_training_per_device(config, log=False)[0] * 1e12
    return Report(
        recipe=recipe,
        backend=resolution.selection.why,
        rows=tuple(rows),
        high_precision=tuple((item.path, item.reason) for item in resolution.high_precision),
        nvfp4_gemms=quantized,
        gemms=total,
        nvfp4_flops_fraction=quantized_flops / step_flops,
        switch=switch,
    )


def _span(layers: tuple[int, ...]) -> str:
    if not layers:
        return "-"
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}..{layers[-1]}"


def explain(argv: Sequence[str]) -> Report:
    """Reports what a config would do, without allocating weights or starting a distributed job.

    Args:
      argv: Program name, YAML file, then `key=value` arguments.

    Raises:
      ConfigError: Anything a run would refuse.
    """
    here = {"hardware": "cpu", "skip_jax_distributed_system": True, "log_config": False}
    config = load_config(argv, **here, num_slices=_slices(argv))
    if not enabled(config):
        given = getattr(config.quantization, "value", config.quantization)
        why = "there is no NVFP4 recipe to explain"
        raise ConfigError(problem("quantization", given, why, "quantization: nvfp4"))
    with raising_setup_errors(), for_another_machine():
        return of_config(config)


def _slices(argv: Sequence[str]) -> int:
    """As many slices as the config's axes across slices ask for; one machine cannot tell."""
    with raising_config_errors():
        raw = merged_keys(argv, {})
    axes = [value for key, value in raw.items() if key.startswith("dcn_") and key.endswith("_parallelism")]
    return max(1, abs(math.prod(value for value in axes if isinstance(value, int))))


def of_config(config: Any) -> Report:
    """Reports on a config in the nvfp4 mode, from shapes alone and whatever devices are at hand."""
    from maxtext.utils.model_creation_utils import create_nnx_abstract_model

    devices = np.array(jax.devices()[:1]).reshape((1,) * len(config.mesh_axes))
    _, model = create_nnx_abstract_model(config, jax.sharding.Mesh(devices, config.mesh_axes))
    recipe = recipe_of(config)
    return build(resolve(model, config, recipe), recipe, config)


def announce(resolution: Resolution, config: Any) -> None:
    """Logs once, on the first process, what runs in 4 bits, where, and what does not and why."""
    for line in _announcement(build(resolution, recipe_of(config), config)):
        _log_once(line)


def _announcement(report: Report) -> Iterator[str]:
    yield f"NVFP4 recipe {report.recipe.recipe} ({report.recipe.fingerprint}), {report.backend}"
    yield f"NVFP4: {report.headline()}"
    for path, reason in report.high_precision:
        yield f"NVFP4: {path} stays in high precision: {reason}"


@functools.cache
def _log_once(line: str) -> None:
    from maxtext.utils import max_logging

    if jax.process_index() == 0:
        max_logging.log(line)
