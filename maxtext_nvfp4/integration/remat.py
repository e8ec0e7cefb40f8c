"""What MaxText's rematerialization policies save, by name."""

from typing import Any

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.predict.workload import Remat
from maxtext_nvfp4.recipe import problem

_INPUTS = frozenset({"query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj"})
_ATTENTION = _INPUTS | {"out_proj"}
_MINIMAL = _ATTENTION | {"mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo"}
_CONTEXT = frozenset({"context"})
_QUANTIZATION = "quantization"

POLICIES: dict[str, frozenset[str]] = {
    "full": frozenset(),
    "save_out_proj": frozenset({"out_proj"}),
    "save_qkv_proj": _INPUTS,
    "save_dot_except_mlp": _ATTENTION,
    "save_dot_except_mlpwi": _ATTENTION | {"mlpwo"},
    "save_dot_with_context_except_mlp": _ATTENTION | _CONTEXT,
    "minimal": _MINIMAL,
    "minimal_with_context": _MINIMAL | _CONTEXT,
    "minimal_flash": _MINIMAL | _CONTEXT,
    "minimal_with_quantization": _MINIMAL | {_QUANTIZATION},
    "minimal_with_context_and_quantization": _MINIMAL | _CONTEXT | {_QUANTIZATION},
}
"""The names of MaxText's `get_remat_policy`, which is a method of a decoder and returns functions."""


def remat_of(config: Any) -> Remat:
    """The policy of a config.

    Raises:
      ConfigError: It moves tensors to the host, or is made up of the config's own lists.
    """
    # MaxText reads `none` as no policy, and without one jax.checkpoint saves a layer's input alone.
    policy = config.remat_policy or "none"
    saved = frozenset[str]() if policy == "none" else POLICIES.get(policy)
    if saved is None:
        why = "no memory or time is predicted where tensors wait on the host or are chosen one by one"
        raise ConfigError(problem("remat_policy", policy, why, " or ".join(sorted(POLICIES))))
    return Remat(policy=policy, saved=saved, quantized=_QUANTIZATION in saved)
