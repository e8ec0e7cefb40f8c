"""What one device computes and moves in a training step, in numbers alone."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

Format = Literal["nvfp4", "fp8", "fp8_current", "mxfp8", "bf16"]
"""How a GEMM's operands are given; `fp8` is per-tensor FP8 with delayed scaling, as MaxText's own."""

GemmFormats = tuple[Format, Format, Format]
"""Formats of fprop, dgrad and wgrad."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """A linear layer, `y[M, N] = x[M, K] @ w[K, N]`, seen once for all decoder layers that repeat it.

    Attributes:
      path: Its site, such as `decoder/layers/mlp/wi_0`.
      k: Contraction size.
      n: Output features.
      split: Which of the two tensor parallelism divides; None divides neither.
      formats: Number of decoder layers with each choice of formats.
      output: Name under which a remat policy may save what it computes, such as `mlpwi_0`.
      input: Name of what it multiplies, which linear layers may share.
    """

    path: str
    k: int
    n: int
    split: Literal["k", "n"] | None
    formats: Mapping[GemmFormats, int]
    output: str = ""
    input: str = ""

    @property
    def layers(self) -> int:
        """Decoder layers that hold it."""
        return sum(self.formats.values())


_INPUTS = {"query": "attention", "key": "attention", "value": "attention", "wi_0": "mlp", "wi_1": "mlp"}
_SPLIT_K = ("out", "wo")
_SPLIT_N = (*_INPUTS, "qkv_proj", "wi")


def linear(path: str, k: int, n: int, formats: Mapping[GemmFormats, int]) -> Linear:
    """A linear layer with what follows from MaxText's name of it, the last part of `path`."""
    name = path.rpartition("/")[2]
    # One activation function has one input layer, `wi`, which fused layers are too.
    output = f"mlp{name}" if name.startswith("w") else name if name.endswith("_proj") else f"{name}_proj"
    return Linear(
        path=path,
        k=k,
        n=n,
        split="k" if name in _SPLIT_K else "n" if name in _SPLIT_N else None,
        formats=formats,
        output=output,
        input=_INPUTS.get(name, ""),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Into how many parts what is divided.

    Attributes:
      fsdp: Weights, gradients and moments, over devices of one NVLink domain; each has its own tokens.
      fsdp_across: The same over domains.
      data: Devices of a domain that hold the same weights and have their own tokens.
      data_across: The same over domains.
      tensor: Heads and features.
      context: The sequence.
      pipeline: Decoder layers.
      interleaved: Stages of layers that a pipeline's device holds.
    """

    fsdp: int = 1
    fsdp_across: int = 1
    data: int = 1
    data_across: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    interleaved: int = 1

    @property
    def shards(self) -> int:
        """Parts of a weight that FSDP makes."""
        return self.fsdp * self.fsdp_across

    @property
    def replicas(self) -> int:
        """Copies of a weight."""
        return self.data * self.data_across

    @property
    def devices(self) -> int:
        """GPUs in all."""
        return self.shards * self.replicas * self.tensor * self.context * self.pipeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remat:
    """What the forward pass keeps for the backward pass besides each decoder layer's input.

    Attributes:
      policy: MaxText's name of it.
      saved: Names of the tensors that it keeps; None keeps all.
      quantized: Whether it keeps quantized operands, so that none is quantized twice.
    """

    policy: str
    saved: frozenset[str] | None
    quantized: bool = False

    def saves(self, name: str) -> bool:
        """Whether the tensor is there in the backward pass."""
        return self.saved is None or name in self.saved


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A training step of a dense decoder.

    Attributes:
      linears: Linear layers of the decoder.
      layers: Decoder layers.
      width: Size of the residual stream.
      mlp_width: Size of the MLP's hidden layer.
      mlp_inputs: Linear layers that feed it, 2 where it is gated.
      query_width: Query heads times their size.
      kv_width: Key heads times their size.
      head_size: Size of a head.
      vocabulary: Rows of the embedding table.
      tied: Whether the output head is the embedding table.
      one_hot: Whether tokens are embedded by a GEMM with one-hot rows instead of a lookup.
      sequence: Tokens of a sequence.
      sequences: Sequences of a microbatch that one data-parallel part holds; a device's share is divided by
        `layout.context`, and its features by `layout.tensor`.
      microbatches: Microbatches of a step, of gradient accumulation or of a pipeline.
      layout: The parallelism.
      remat: What is kept for the backward pass.
      fused_attention: Whether attention never writes its scores to memory.
      scanned: Whether the decoder layers are one traced body.
      once_per_step: Whether weights are quantized, and gradients reduced over replicas, once in a step and not in
        each microbatch, and replicas divide the update among them. Megatron does all three, MaxText none.
      chosen_update: Whether a step's new parameters and moments are made beside the old ones and then chosen or
        dropped, as loss scaling does.
      weight_bytes: Bytes of a stored weight.
      gradient_bytes: Bytes of a gradient.
      moment_bytes: Bytes of both moments of a parameter.
      compute_bytes: Bytes of an activation.
    """

    linears: tuple[Linear, ...]
    layers: int
    width: int
    mlp_width: int
    mlp_inputs: int
    query_width: int
    kv_width: int
    head_size: int
    vocabulary: int
    tied: bool
    one_hot: bool
    sequence: int
    sequences: float
    microbatches: int
    layout: Layout
    remat: Remat
    fused_attention: bool = True
    scanned: bool = True
    once_per_step: bool = False
    chosen_update: bool = False
    weight_bytes: int = 4
    gradient_bytes: int = 4
    moment_bytes: int = 8
    compute_bytes: int = 2

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch in the GEMMs of one device."""
        return self.sequences * self.sequence / self.layout.context

    @property
    def tokens_per_device(self) -> float:
        """Tokens of a step divided by devices: what throughput per GPU counts."""
        return self.tokens * self.microbatches / (self.layout.tensor * self.layout.pipeline)

    @property
    def layer_parameters(self) -> int:
        """Weights of all decoder layers, norms included."""
        return (
            sum(linear.k * linear.n * linear.layers for linear in self.linears) + 2 * self.layers * self.width
        )

    @property
    def parameters(self) -> int:
        """All weights."""
        tables = self.vocabulary * self.width * (1 if self.tied else 2)
        return self.layer_parameters + tables + self.width

    @property
    def model_flops(self) -> float:
        """FLOPs of a step per device by MaxText's convention.

        6 per token and weight of linear layers and head (2 forward, 4 backward), attention products at half
        the square (causal), nothing for norms, embedding or what is computed again.
        """
        weights = sum(linear.k * linear.n * linear.layers for linear in self.linears)
        head = self.vocabulary * self.width
        attention = self.layers * self.sequence * self.query_width
        return 6.0 * self.tokens_per_device * (weights + head + attention)

    def in_format(self, wanted: Format) -> "Workload":
        """The same step with every linear layer of the decoder in one format, and without this package's loss scaling."""
        formats = (wanted, wanted, wanted)
        linears = tuple(
            dataclasses.replace(linear, formats={formats: linear.layers}) for linear in self.linears
        )
        return dataclasses.replace(self, linears=linears, chosen_update=False)
