"""Gives the layers of a constructed MaxText model their 4-bit matrix multiply.

MaxText builds the unquantized model. Each `DenseGeneral` that the policy selects then receives a small
module as its `quant_dot_general`. Parameters keep MaxText's structure, so checkpoints are interchangeable
with stock MaxText.
"""

import contextlib
import contextvars
import dataclasses
import functools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array, lax
from jax import numpy as jnp

from maxtext_nvfp4 import backends, policy
from maxtext_nvfp4.backends.fit import fit
from maxtext_nvfp4.dot_general import DimensionNumbers, routed_dot_general
from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration import loss_scaling, sites
from maxtext_nvfp4.integration.extents import find_extents
from maxtext_nvfp4.integration.step import site_key
from maxtext_nvfp4.integration.switch_step import check_switch
from maxtext_nvfp4.integration.te_context import name_mesh_axes
from maxtext_nvfp4.plan import GEMMS, SitePlan
from maxtext_nvfp4.recipe import Recipe, problem
from maxtext_nvfp4.routine import Routine

_ATTRIBUTE = "nvfp4_dot_general"


class LayerIndex(nnx.Cache):
    """The decoder layer number of each layer in a stack; a constant, hence never checkpointed.

    The layer scan slices it like any other state, so that each layer of one traced body knows its number.
    """


class Nvfp4DotGeneral(nnx.Module):
    """The matrix multiply of one linear layer, called by MaxText in place of `lax.dot_general`."""

    probe: nnx.Variable | None = None
    """Set while a sampled step is traced, see `probes`."""

    def __init__(
        self, backend: backends.Backend, routine: Routine, site: str, layers: Sequence[int], stacked: bool
    ):
        self.backend = backend
        self.routine = routine
        self.site = site
        self.layers = tuple(layers)
        self.layer = LayerIndex(jnp.asarray(np.array(layers, np.int32))) if stacked else layers[0]

    @property
    def site_id(self) -> int:
        """Not the path's position among the sites: the noise of a layer must not change with its neighbours."""
        return zlib.crc32(self.site.encode())

    def __call__(
        self,
        x: Array,
        kernel: Array,
        dimension_numbers: DimensionNumbers,
        precision: lax.PrecisionLike = None,
        mutable: Sequence[str] = (),
    ) -> Array:
        """Multiplies as `routed_dot_general`; `precision` and `mutable` are MaxText's and unused."""
        del precision, mutable
        layer = self.layer.get_value() if isinstance(self.layer, LayerIndex) else jnp.int32(self.layer)
        return routed_dot_general(
            self.backend,
            self.routine,
            x,
            kernel,
            dimension_numbers,
            entry=layer,
            key=site_key(self.site_id, layer) if self.routine.stochastic else None,
            probe=None if self.probe is None else self.probe.get_value(),
        )


@dataclasses.dataclass(frozen=True)
class Resolution:
    """What a recipe means for one model.

    Attributes:
      plans: The plan of every site.
      selection: Backend and why.
      high_precision: GEMMs outside `DenseGeneral` that stay in high precision.
    """

    plans: tuple[SitePlan, ...]
    selection: backends.Selection
    high_precision: tuple[sites.HighPrecision, ...]


_elsewhere: contextvars.ContextVar[bool] = contextvars.ContextVar("nvfp4_elsewhere", default=False)


@contextlib.contextmanager
def for_another_machine() -> Iterator[None]:
    """Within it a backend that is asked for by name is resolved even if it cannot run on this machine."""
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def resolve(model: nnx.Module, config: Any, recipe: Recipe) -> Resolution:
    """Applies a recipe to a (possibly abstract) model.

    Raises:
      ConfigError: A rule matches nothing, the backend cannot run here or cannot run a GEMM, or the late switch
        would never take place.
    """
    linears = sites.find_linears(model)
    found = sites.to_sites(linears)
    sites.check_layers(found, config.num_decoder_layers)
    plans = policy.resolve(recipe, found, config.num_decoder_layers)
    platform = jax.default_backend()
    selection = backends.select(recipe.backend, recipe.format, platform, elsewhere=_elsewhere.get())
    if selection.backend.name == "transformer_engine" and not config.shardy:
        why = "backend transformer_engine is partitioned by Shardy only"
        raise ConfigError(problem("shardy", False, why, "shardy: true"))
    plans = fit(plans, find_extents(linears, config), selection.backend, recipe)
    if recipe.switch:
        check_switch(recipe.switch, plans, config)
    return Resolution(plans, selection, tuple(sites.find_routed_experts(model)))


def attach(model: nnx.Module, config: Any, recipe: Recipe) -> Resolution:
    """Resolves a recipe for a model and attaches its 4-bit multiplies, in place."""
    resolution = resolve(model, config, recipe)
    if resolution.selection.backend.name == "transformer_engine" and not _elsewhere.get():
        name_mesh_axes()
    if recipe.loss_scale.mode != "off":
        setattr(model, loss_scaling.ATTRIBUTE, loss_scaling.LossScaleState(recipe.loss_scale))
    plans = {plan.site.path: plan for plan in resolution.plans if plan.quantized}
    for linear in sites.find_linears(model):
        if linear.site not in plans:
            continue
        routine = _routine(plans[linear.site], linear)
        if not any(getattr(choice, gemm).quantized for choice in routine.choices for gemm in GEMMS):
            continue
        backend = resolution.selection.backend
        module = Nvfp4DotGeneral(backend, routine, linear.site, linear.layers, linear.stacked)
        setattr(linear.module, _ATTRIBUTE, module)
        linear.module._quant_dot_general_name = _ATTRIBUTE
    return resolution


def _routine(plan: SitePlan, linear: sites.Linear) -> Routine:
    """Narrows a site's plan to the layers of one module, indexed by decoder layer number."""
    by_layer = {
        layer: plan.choices[entry][0] for layer, entry in zip(plan.site.layers, plan.table, strict=True)
    }
    choices = tuple(dict.fromkeys(by_layer[layer] for layer in linear.layers))
    table = tuple(
        choices.index(by_layer[layer]) if layer in linear.layers else 0
        for layer in range(max(linear.layers) + 1)
    )
    return Routine(choices, table, _matmul_precision(linear.module.matmul_precision))


@functools.cache
def _matmul_precision(name: str) -> lax.Precision:
    return lax.Precision(name)
