"""What MaxText's rematerialization policies save, by name."""

from collections.abc import Mapping

from maxtext_nvfp4.predict.workload import Remat

_INPUTS = frozenset({"query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj"})
_ATTENTION = _INPUTS | {"out_proj"}
_MINIMAL = _ATTENTION | {"mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo"}
_CONTEXT = frozenset({"context"})
_QUANTIZATION = "quantization"

POLICIES: Mapping[str, frozenset[str]] = {
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


def named(policy: str) -> Remat:
    """The policy of that name in `POLICIES`."""
    saved = POLICIES[policy]
    return Remat(policy=policy, saved=saved, quantized=_QUANTIZATION in saved)
