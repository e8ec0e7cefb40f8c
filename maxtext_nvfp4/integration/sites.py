"""Finds MaxText's linear layers in a model and gives each a path and its decoder layer numbers.

The same model is laid out in different ways: `decoder/layers_3/mlp/wi_0` unscanned,
`decoder/layers/mlp/wi_0` with all layers stacked in one kernel, `decoder/layers/layers_1/mlp/wi_0` where
one scan step is a block of several layers, `decoder/layers_remainder/layers_0/...` for what a block count
leaves over. All of them are the site `decoder/layers/mlp/wi_0` of some decoder layers.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from flax import nnx

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.plan import Site

_STACKS = ("layers", "dense_layers", "moe_layers")
_REMAINDER = "layers_remainder"
_GATES = ("gate", "shared_expert_gate")
_NUMBERED = re.compile(rf"({'|'.join(_STACKS)})_(\d+)")
_IN_BLOCK = re.compile(r"layers?_(\d+)")


@dataclasses.dataclass(frozen=True)
class Linear:
    """One `DenseGeneral` module of the model.

    Attributes:
      module: The module.
      site: Path of its site.
      layers: Decoder layers it computes, in stacking order; a single one when it is not stacked, none
        outside the layer stack.
      stacked: Whether its kernel holds several layers.
      layer_path: Path of what holds these layers, norms and all; empty outside the layer stack.
      protected: Why it is never quantized; "" when the policy may choose.
    """

    module: Any
    site: str
    layers: tuple[int, ...]
    stacked: bool
    layer_path: tuple[str, ...]
    protected: str


@dataclasses.dataclass(frozen=True)
class HighPrecision:
    """Weights of a kind that no 4-bit GEMM exists for: routed experts."""

    path: str
    reason: str


def _parts(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(str(part) for part in path)


def _modules(model: nnx.Module, kind: type) -> Iterator[tuple[tuple[str, ...], Any]]:
    for path, node in nnx.iter_graph(model):
        if isinstance(node, kind):
            yield _parts(path), node


def find_linears(model: nnx.Module) -> list[Linear]:
    """Lists the model's `DenseGeneral` layers.

    Raises:
      ConfigError: The layers of this architecture are stacked in a way that cannot be numbered.
    """
    from maxtext.layers.linears import DenseGeneral

    modules = sorted(_modules(model, DenseGeneral), key=lambda item: item[0])
    lengths = {path: _stack_length(path, module) for path, module in modules}
    block = _block_sizes(lengths)
    offsets = _stack_offsets(lengths, block)
    linears = []
    for path, module in modules:
        site, stack, inner, protected = _locate(path)
        if protected:
            linears.append(Linear(module, "/".join(path), (), False, (), protected))
            continue
        length = lengths[path]
        first = offsets[stack] + inner
        layers = tuple(first + step * block[stack] for step in range(length or 1))
        gate = path[-1] in _GATES
        layer_path = path[: 3 if _IN_BLOCK.fullmatch(path[2]) else 2]
        linears.append(
            Linear(module, site, layers, length is not None, layer_path, "router gate" if gate else "")
        )
    return linears


def find_routed_experts(model: nnx.Module) -> list[HighPrecision]:
    """Lists what a mixture-of-experts model computes outside `DenseGeneral`, once per kind."""
    from maxtext.layers.moe import GateLogit, RoutedMoE

    reasons = {
        GateLogit: "router gates always stay in high precision",
        RoutedMoE: "routed experts use grouped GEMMs, which have no NVFP4 path yet",
    }
    found = {}
    for kind, reason in reasons.items():
        for path, _ in _modules(model, kind):
            name = _locate(path)[0] or "/".join(path)
            found[name] = HighPrecision(name, reason)
    return list(found.values())


def to_sites(linears: list[Linear]) -> list[Site]:
    """Merges the modules of one site."""
    grouped: dict[str, list[Linear]] = defaultdict(list)
    for linear in linears:
        grouped[linear.site].append(linear)
    sites = []
    for path, members in grouped.items():
        layers = sorted(layer for member in members for layer in member.layers)
        assert len(set(layers)) == len(layers), f"{path}: two modules claim one decoder layer"
        module = members[0].module
        sites.append(
            Site(
                path=path,
                layers=tuple(layers),
                k=math.prod(module.in_features_shape),
                n=math.prod(module.out_features_shape),
                protected=members[0].protected,
            )
        )
    return sites


def check_layers(found: Sequence[Site], num_layers: int) -> None:
    """Verifies that the sites cover the decoder layers 0 to `num_layers - 1`.

    Raises:
      ConfigError: The model has no linear layers, or numbers them in a way that is not known here.
    """
    numbered = {layer for site in found for layer in site.layers}
    if not numbered:
        raise ConfigError(
            "decoder_block: its layers are not made of MaxText's linear layers, so nothing could be 4-bit; write "
            "another decoder_block such as llama2, or no quantization"
        )
    if numbered != set(range(num_layers)):
        raise ConfigError(
            f"the model has {num_layers} decoder layers, but its linear layers seem to belong to layers "
            f"{', '.join(map(str, sorted(numbered)))}: the layers of this architecture are stacked in a way that "
            "cannot be numbered yet; write scan_layers: false"
        )


def _locate(path: tuple[str, ...]) -> tuple[str, str, int, str]:
    """Splits a module path into (site path, stack key, layer within the stack's block, protection).

    The stack key identifies what shares one numbering: `layers`, or `layers_3` for a layer of its own.
    """
    if path[-1] == "logits_dense":
        return "", "", 0, "output head"
    if path[0] != "decoder" or len(path) < 3:
        return "", "", 0, "outside the decoder layers"
    numbered = _NUMBERED.fullmatch(path[1])
    base = numbered.group(1) if numbered else path[1]
    if base == _REMAINDER:
        base = "layers"
    if base not in _STACKS:
        raise ConfigError(
            f"the decoder layers at {'/'.join(path)} are stacked as {path[1]!r}, which cannot be numbered yet; "
            "write scan_layers: false, or use a model whose layers are named layers, dense_layers or moe_layers"
        )
    rest = path[2:]
    inner = 0
    if block := _IN_BLOCK.fullmatch(rest[0]):
        inner, rest = int(block.group(1)), rest[1:]
    return "/".join(("decoder", base, *rest)), path[1], inner, ""


def _stack_length(path: tuple[str, ...], module: Any) -> int | None:
    """Layers stacked in a kernel; None when the kernel is one layer's."""
    feature_axes = len(module.in_features_shape) + len(module.out_features_shape)
    extra = module.kernel.ndim - feature_axes
    if extra == 0:
        return None
    if extra > 1:
        raise ConfigError(
            f"the kernel of {'/'.join(path)} is stacked {extra} times (shape {module.kernel.shape}), which cannot be "
            "numbered yet; write scan_layers: false"
        )
    # MaxText puts the stacking axis at param_scan_axis; every other axis is a feature size.
    features = (*module.in_features_shape, *module.out_features_shape)
    for axis, size in enumerate(module.kernel.shape):
        if module.kernel.shape[:axis] + module.kernel.shape[axis + 1 :] == features:
            return int(size)
    raise AssertionError(f"{path}: kernel {module.kernel.shape} does not hold features {features}")


def _block_sizes(lengths: dict[tuple[str, ...], int | None]) -> dict[str, int]:
    """Decoder layers per scan step of each stack."""
    sizes: dict[str, int] = defaultdict(lambda: 1)
    for path in lengths:
        _, stack, inner, protected = _locate(path)
        if not protected:
            sizes[stack] = max(sizes[stack], inner + 1)
    return sizes


def _stack_offsets(lengths: dict[tuple[str, ...], int | None], block: dict[str, int]) -> dict[str, int]:
    """Number of the first decoder layer of each stack.

    Within a kind, numbered layers follow their number and the remainder follows the scanned blocks. Kinds
    follow each other in the order dense, then mixture-of-experts.
    """
    count: dict[str, int] = {}
    for path, length in lengths.items():
        _, stack, _, protected = _locate(path)
        if not protected:
            count[stack] = (length or 1) * block[stack]
    offsets: dict[str, int] = {}
    start = 0
    for kind in _STACKS:
        members = [stack for stack in count if (m := _NUMBERED.fullmatch(stack)) and m.group(1) == kind]
        members.sort(key=lambda stack: int(stack.rpartition("_")[2]))
        members = [stack for stack in (kind, _REMAINDER) if stack in count and _kind(stack) == kind] + members
        for stack in members:
            offsets[stack] = start
            start += count[stack]
    return offsets


def _kind(stack: str) -> str:
    return "layers" if stack == _REMAINDER else stack
