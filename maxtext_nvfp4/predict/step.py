"""Seconds of a training step on one GPU, as a sum of what it computes, moves and waits for."""

import dataclasses
from collections.abc import Mapping

from maxtext_nvfp4.predict import collectives
from maxtext_nvfp4.predict.calibration import Calibration
from maxtext_nvfp4.predict.hardware import Hardware
from maxtext_nvfp4.predict.kernels import Device
from maxtext_nvfp4.predict.workload import Format, Linear, Workload

_LOGIT_BYTES = 14
"""Traffic of a logit outside of GEMMs: written and read in BF16, exponentiated in float32, its gradient in BF16."""

_UPDATE_BYTES = 28
"""Traffic of a weight in AdamW: weight and both moments read and written in float32, its gradient read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Seconds of a step, by where they go. Nothing is counted twice, and the parts add up to the step.

    Attributes:
      gemms: GEMMs of each linear layer of the decoder, by site; what is computed again for the backward pass included.
      quantization: Of all their operands.
      attention: The products and softmax.
      elementwise: Norms, residual stream, rotation and nonlinearity.
      head: The output head, its loss, and the embedding where that is a GEMM.
      tensor_parallel: Exposed transfers of activations, context parallelism's included.
      collectives_exposed: Gathers and reductions of weights and gradients that nothing hides.
      pipeline_bubble: Waiting for the pipeline to fill and drain.
      optimizer: The update.
      collectives_hidden: Gathers and reductions that run beside computation; not part of the sum.
    """

    gemms: Mapping[str, float]
    quantization: float
    attention: float
    elementwise: float
    head: float
    tensor_parallel: float
    collectives_exposed: float
    pipeline_bubble: float
    optimizer: float
    collectives_hidden: float

    @property
    def parts(self) -> dict[str, float]:
        """What adds up to the step; all GEMMs of the decoder are one part."""
        fields = dataclasses.asdict(self)
        del fields["collectives_hidden"]
        return {**fields, "gemms": sum(self.gemms.values())}

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.parts.values())


def step(workload: Workload, hardware: Hardware, calibration: Calibration) -> Step:
    """The time of a training step on one GPU.

    Args:
      workload: The step.
      hardware: The GPU.
      calibration: How much of its rates is had.
    """
    device = Device(hardware=hardware, calibration=calibration)
    layout = workload.layout
    # What a device does of each decoder layer, as often as it has a microbatch. Layers are spread over the pipeline.
    times = workload.microbatches / layout.pipeline
    gemms = {linear.path: times * _gemms(linear, workload, device) for linear in workload.linears}
    quantization = times * _quantization(workload, device)
    attention = times * workload.layers * _attention(workload, device)
    elementwise = times * workload.layers * _elementwise(workload, device)
    head = times * _head(workload, device)
    moved = calibration.tensor_parallel * collectives.tensor_parallel(workload, hardware)
    moved += collectives.context_parallel(workload, hardware)
    tensor_parallel = times * workload.layers * moved

    computed = sum(gemms.values()) + quantization + attention + elementwise + tensor_parallel
    collected = collectives.weights(workload, hardware)
    hidden = min(collected, calibration.overlap * computed)
    bubble = (layout.pipeline - 1) / (layout.interleaved * workload.microbatches)
    return Step(
        gemms=gemms,
        quantization=quantization,
        attention=attention,
        elementwise=elementwise,
        head=head,
        tensor_parallel=tensor_parallel,
        collectives_exposed=collected - hidden,
        pipeline_bubble=bubble * (computed + head),
        optimizer=_optimizer(workload, device),
        collectives_hidden=hidden,
    )


def _gemms(linear: Linear, workload: Workload, device: Device) -> float:
    """All layers' GEMMs of a site for a microbatch."""
    tokens, (k, n) = workload.tokens, _held(linear, workload)
    again = 1 + _computed_again(linear, workload)
    return sum(
        count
        * (
            again * device.gemm(fprop, tokens, n, k)
            + device.gemm(dgrad, tokens, k, n)
            + device.gemm(wgrad, k, n, tokens)
        )
        for (fprop, dgrad, wgrad), count in linear.formats.items()
    )


def _quantization(workload: Workload, device: Device) -> float:
    """All operands of all layers for a microbatch.

    Unless what is quantized is saved, the backward pass quantizes activations and weights once more. The activation that
    several linear layers multiply is quantized once, as the compiler sees the same operation on it; not so with delayed
    scaling, where each has a scale of its own.
    """
    tokens, seconds = workload.tokens, 0.0
    saved = workload.remat.quantized or workload.remat.saved is None
    forward = 1 if saved else 2
    weights = forward / (workload.microbatches if workload.once_per_step else 1)
    shared: dict[tuple[str, Format, Format], float] = {}
    for linear in workload.linears:
        k, n = _held(linear, workload)
        for (fprop, dgrad, wgrad), count in linear.formats.items():
            source = linear.path if "fp8" in (fprop, wgrad) else linear.input or linear.path
            activation = count * forward * device.quantize((fprop, wgrad), tokens * k)
            key = (source, fprop, wgrad)
            shared[key] = max(activation, shared.get(key, 0.0))
            seconds += count * weights * device.quantize((fprop, dgrad), k * n)
            seconds += count * device.quantize((dgrad, wgrad), tokens * n)
    return seconds + sum(shared.values())


def _held(linear: Linear, workload: Workload) -> tuple[float, float]:
    """Contraction size and output features that one device has."""
    parts = workload.layout.tensor
    return (
        linear.k / (parts if linear.split == "k" else 1),
        linear.n / (parts if linear.split == "n" else 1),
    )


def _computed_again(linear: Linear, workload: Workload) -> bool:
    """Whether the backward pass repeats its fprop. Nothing needs what the MLP's last layer computes."""
    return not workload.remat.saves(linear.output) and linear.output != "mlpwo"


def _attention(workload: Workload, device: Device) -> float:
    """One layer's causal attention for a microbatch.

    2 products forward; 5 backward, as fused kernels compute the scores again. Each has `sequence * query_width` FLOPs a
    token, half of the square. Exponentials: one of each score in either pass. A kernel that is not fused computes the
    whole square, but no scores again, and keeps them in memory: forward they are written, masked and normalized, and
    read; backward read twice, and three gradients of them are written and read.
    """
    product = workload.sequence * workload.query_width * workload.tokens / workload.layout.tensor
    scores = product / (2 * workload.head_size)
    again = not workload.remat.saves("context")
    if workload.fused_attention:
        return device.attention((2 * (1 + again) + 5) * product, (2 + again) * scores)
    traffic = (4 * (1 + again) + 8) * 2 * scores * workload.compute_bytes
    return device.attention((2 * (1 + again) + 4) * 2 * product, (1 + again) * 2 * scores) + device.move(
        traffic
    )


def _elementwise(workload: Workload, device: Device) -> float:
    """Traffic of one layer's norms, residual sums, rotation and nonlinearity for a microbatch.

    Counted in passes over a tensor of a width. The residual stream: 2 norms and 2 sums, (1 read + 1 write) and (2 + 1)
    each forward, (2 + 1) and (2 + 1) backward. Queries and keys are rotated: 1 + 1 in each direction. The nonlinearity
    reads what feeds it and writes its product; backward it reads that and a gradient, and writes theirs. Every policy
    computes the forward part again, but none at all saves it.
    """
    again = 1 if workload.remat.saved is None else 2
    inputs = workload.mlp_inputs
    stream = (again * 10 + 12) * workload.width
    rotation = (again * 2 + 2) * (workload.query_width + workload.kv_width)
    hidden = (again * (inputs + 1) + 2 * inputs + 1) * workload.mlp_width
    elements = workload.tokens / workload.layout.tensor * (stream + rotation + hidden)
    return device.move(elements * workload.compute_bytes)


def _head(workload: Workload, device: Device) -> float:
    """The head's three GEMMs and its loss for a microbatch; two more where the embedding is a GEMM."""
    tokens = workload.tokens / workload.layout.tensor
    gemms = 5 if workload.one_hot else 3
    product = device.gemm("bf16", tokens, workload.vocabulary, workload.width)
    return gemms * product + device.move(tokens * workload.vocabulary * _LOGIT_BYTES)


def _optimizer(workload: Workload, device: Device) -> float:
    layout = workload.layout
    parts = layout.shards * layout.tensor * layout.pipeline * layout.context
    parts *= layout.replicas if workload.once_per_step else 1
    return device.move(workload.parameters / parts * _UPDATE_BYTES)
