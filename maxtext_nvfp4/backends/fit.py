"""Fits plans to a backend: what it cannot run is refused, or changed in the way that the recipe allows."""

import dataclasses
from collections.abc import Mapping, Sequence

from maxtext_nvfp4.backends import Backend
from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.extent import Extent
from maxtext_nvfp4.plan import BF16, GEMMS, Gemm, LayerPlan, OperandPlan, SitePlan
from maxtext_nvfp4.policy import shortest_name
from maxtext_nvfp4.recipe import Recipe, show


def fit(
    plans: Sequence[SitePlan], extents: Mapping[str, Extent], backend: Backend, recipe: Recipe
) -> tuple[SitePlan, ...]:
    """The plans with every GEMM one that the backend can run, as `nvfp4.on_unsupported` says.

    Args:
      plans: The plans of the model's sites.
      extents: Sizes by site path.
      backend: The backend.
      recipe: The recipe the plans come from.

    Raises:
      ConfigError: With one line for each site that has a GEMM which cannot be run and may not be changed.
    """
    paths = {plan.site.path for plan in plans}
    fitted, problems = [], []
    for plan in plans:
        extent = extents[plan.site.path]
        rows = [_fit(*choice, extent, backend, recipe.on_unsupported) for choice in plan.choices]
        if any(backend.unsupported(layer, extent) for layer, _ in rows):
            name = shortest_name(plan.site.path, paths)
            problems.append(_problem(plan.site.path, name, [layer for layer, _ in rows], extent, backend))
        choices = tuple(dict.fromkeys(rows))
        table = tuple(choices.index(rows[choice]) for choice in plan.table)
        fitted.append(dataclasses.replace(plan, choices=choices, table=table))
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(fitted)


def _fit(
    layer: LayerPlan, reason: str, extent: Extent, backend: Backend, on_unsupported: str
) -> tuple[LayerPlan, str]:
    """A plan that the backend can run, with the reasons for what is not 4-bit or not transformed."""
    faults = backend.unsupported(layer, extent)
    if not faults or on_unsupported == "error":
        return layer, reason
    if on_unsupported == "no_hadamard":
        plain = _without_hadamard(layer)
        if backend.unsupported(plain, extent).keys() < faults.keys():
            text = f"wgrad without Hadamard transform: {backend.name}: {faults['wgrad']}"
            return plain, "; ".join(filter(None, (reason, text)))
        return layer, reason
    while faults:  # one GEMM less can change how the operands of the others are quantized
        layer = dataclasses.replace(layer, **dict.fromkeys(faults, BF16))
        reason = "; ".join(filter(None, (reason, *(f"{backend.name}: {text}" for text in _texts(faults)))))
        faults = backend.unsupported(layer, extent)
    return layer, reason


def _without_hadamard(layer: LayerPlan) -> LayerPlan:
    def plain(operand: OperandPlan | None) -> OperandPlan | None:
        return operand and dataclasses.replace(operand, hadamard=False)

    wgrad = dataclasses.replace(layer.wgrad, a=plain(layer.wgrad.a), b=plain(layer.wgrad.b))
    return dataclasses.replace(layer, wgrad=wgrad)


def _texts(faults: Mapping[Gemm, str]) -> list[str]:
    """Each reason once, with its GEMMs."""
    return [
        f"{', '.join(gemm for gemm in GEMMS if faults.get(gemm) == reason)}: {reason}"
        for reason in dict.fromkeys(faults.values())
    ]


def _problem(path: str, name: str, layers: Sequence[LayerPlan], extent: Extent, backend: Backend) -> str:
    """What cannot be run at a site, and each way out."""
    faults = {gemm: reason for layer in layers for gemm, reason in backend.unsupported(layer, extent).items()}
    rule = {"module": name} | {gemm: "bf16" for gemm in GEMMS if gemm in faults}
    ways = ["nvfp4.on_unsupported: bf16", f"the rule {show(rule)} first in nvfp4.rules"]
    if not any(backend.unsupported(_without_hadamard(layer), extent) for layer in layers):
        ways.insert(0, "nvfp4.on_unsupported: no_hadamard")
    return (
        f"{path}: backend {backend.name} cannot run in 4 bits: {'; '.join(_texts(faults))}; "
        f"write {', or '.join(ways)}"
    )
