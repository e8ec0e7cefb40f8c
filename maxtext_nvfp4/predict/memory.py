"""Memory of one device in a training step, from what must be there at its three fullest moments.

Parameters and optimizer state are there throughout. To them comes what one of these moments needs:

    loss      the logits; everything saved for the backward pass; the gradients that a scan over layers adds to
    backward  one layer's operands and gradients, in the first layer whose backward pass runs, when most is still
              saved, or the last, when all gradients are there
    update    all gradients

How much of that is there at once was read from XLA's buffer assignment of MaxText's compiled step, and the whole is
compared with XLA's own count in `tests/test_predict_memory.py`. Sizes are bytes.
"""

import dataclasses
from typing import Literal

from maxtext_nvfp4.predict.workload import Format, Linear, Workload

_FLOAT32 = 4

_CODES: dict[Format, float] = {
    "nvfp4": 1 / 2 + 1 / 16,  # E2M1, and an E4M3 scale for 16 of them
    "mxfp8": 1 + 1 / 32,  # E4M3, and an E8M0 scale for 32 of them
    "fp8": 1,
    "fp8_current": 1,
    "bf16": 0,  # nothing but the operand itself
}
"""Bytes of an element that is quantized along one of its axes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """What a compiler and its kernels do with memory.

    Attributes:
      codes: Whether 4- and 8-bit operands are held as codes. Otherwise they are emulated.
      emulated_bytes: Of an emulated element: of float32, or of bfloat16 where the CPU multiplies that.
      reduce_scatter: Whether summing gradients over devices leaves each its shard. Otherwise each holds whole sums,
        outside of loops until the last of them.
      scan_copies: Copies of all layers' weights that a scan over them needs. MaxText stacks them along the second
        axis, and XLA for CPUs brings the stacking axis to the front before the loop.
      gathered_layers: Layers whose weights are gathered at a time; two where one is fetched in advance.
      logit_bytes: Of a logit when the backward pass starts: its exponential in float32, its gradient in the compute
        dtype for the head's two GEMMs and, where the conversion to that is no part of the same kernel, in float32.
    """

    codes: bool = True
    emulated_bytes: int = _FLOAT32
    reduce_scatter: bool = True
    scan_copies: int = 0
    gathered_layers: int = 2
    logit_bytes: int = 4 + 2


GPU = Backend()
CPU = Backend(codes=False, reduce_scatter=False, scan_copies=1, gathered_layers=1, logit_bytes=4 + 4 + 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device at the fullest moment of a step.

    Attributes:
      moment: That moment.
      parameters: Weights.
      optimizer: Both moments of each.
      gradients: Gradients that wait for others, and the sums over microbatches.
      activations: What is saved for the backward pass under the remat policy, in the compute dtype.
      quantized: Quantized operands that are saved.
      gathered: Whole weights of the layers, or of the head, that are at work.
      logits: Logits and their gradient.
      workspace: What one layer's backward pass computes and needs at once.
      copies: Weights in another order.
      updated: New parameters and moments, until they are chosen.
    """

    moment: Literal["loss", "backward", "update"]
    parameters: float
    optimizer: float
    gradients: float = 0
    activations: float = 0
    quantized: float = 0
    gathered: float = 0
    logits: float = 0
    workspace: float = 0
    copies: float = 0
    updated: float = 0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(value for value in dataclasses.astuple(self) if not isinstance(value, str))

    def to_json(self) -> dict[str, str | float]:
        """The fields and their total."""
        return {**dataclasses.asdict(self), "total": self.total}


def memory(workload: Workload, backend: Backend = GPU) -> Memory:
    """The memory of one device in a training step.

    Args:
      workload: The step.
      backend: What runs it.

    Returns:
      Its fullest moment.
    """
    return max(_moments(workload, backend), key=lambda moment: moment.total)


def _moments(workload: Workload, backend: Backend) -> list[Memory]:
    weights = _Weights(workload)
    gradients = _Gradients(workload, backend)
    layers, scanned = weights.layers_held, workload.scanned
    kept, codes = _saved(workload), _saved_codes(workload) if backend.codes else 0.0
    copies = backend.scan_copies * weights.layers * workload.weight_bytes if scanned else 0.0
    state = {
        "parameters": weights.all * workload.weight_bytes,
        "optimizer": weights.all * workload.moment_bytes,
    }
    gathered = backend.gathered_layers * weights.gathered_layer
    work = _workspace(workload, backend)

    def saved(count: float) -> dict[str, float]:
        """What is saved of some layers. A scan's stack lasts until its end, and a layer works on copies from it."""
        count = layers if scanned else count
        return {
            "activations": count * kept * weights.in_flight,
            "quantized": count * codes * weights.in_flight,
        }

    return [
        Memory(
            **state,
            **saved(layers),
            moment="loss",
            gradients=gradients.sums + (gradients.layers if scanned else 0),
            gathered=weights.gathered_head,
            logits=_logits(workload, backend),
            copies=copies,
        ),
        *(
            Memory(
                **state,
                **saved(others),
                moment="backward",
                gradients=gradients.sums
                + gradients.tables
                + gradients.layers * (1 if scanned else (layers - others) / layers),
                gathered=gathered,
                workspace=work,
                copies=copies,
            )
            for others in (layers - 1, 0)
        ),
        Memory(**state, moment="update", gradients=gradients.sums + gradients.tables + gradients.layers),
        # Gradients go as they turn into new values; all of those wait for the last.
        Memory(**state, moment="update", updated=sum(state.values()) if workload.chosen_update else 0.0),
    ]


class _Weights:
    """Numbers of elements that a device holds.

    FSDP divides every matrix, and so does whatever divides the sequence (MaxText shards `embed` over `context`).
    Every layer is on one pipeline stage; the embedding and the head are on each.
    """

    def __init__(self, workload: Workload):
        layout = workload.layout
        whole = layout.tensor
        parts = layout.shards * layout.context * whole
        self.layers_held = workload.layers / layout.pipeline
        self.layers = workload.layer_parameters / (parts * layout.pipeline)
        self.tables = (workload.parameters - workload.layer_parameters) / parts
        self.all = self.layers + self.tables
        divided = parts > whole
        bytes_ = workload.compute_bytes if divided else 0
        self.gathered_layer = workload.layer_parameters / (workload.layers * whole) * bytes_
        self.gathered_head = workload.vocabulary * workload.width / whole * bytes_
        # A pipeline keeps a microbatch's activations until it comes back, and computes on padding as it fills.
        self.in_flight = (
            (workload.microbatches * layout.interleaved + layout.pipeline - 1) / layout.interleaved
            if layout.pipeline > 1
            else 1
        )


class _Gradients:
    """Bytes of a device's gradients.

    Attributes:
      layers: Those of all its layers.
      tables: Those of embedding and head.
      sums: Of all weights, where several microbatches are added up.
    """

    def __init__(self, workload: Workload, backend: Backend):
        layout, weights = workload.layout, _Weights(workload)
        parts = layout.shards * layout.context
        summed = parts * layout.replicas > 1
        # A scan stacks the gradients of the weights, which are in their dtype. Elsewhere XLA leaves the conversion
        # from the GEMM's dtype to the update, which reads each but once, unless they are summed over devices before.
        width = workload.gradient_bytes if summed else workload.compute_bytes
        whole = 1 if backend.reduce_scatter else parts
        self.layers = weights.layers * (workload.gradient_bytes if workload.scanned else width * whole)
        # A looked-up embedding is divided by features, and each device adds up its own for all tokens.
        head = workload.vocabulary * workload.width / (parts * layout.tensor)
        looked_up = 0 if workload.tied else 1
        self.tables = head * width * whole
        self.tables += looked_up * head * (width * whole if workload.one_hot else workload.compute_bytes)
        accumulated = workload.microbatches > 1 and layout.pipeline == 1
        self.sums = weights.all * workload.gradient_bytes if accumulated else 0.0


def _elements(workload: Workload, width: int) -> float:
    """Elements of a device's activation of some width."""
    return workload.tokens * width / workload.layout.tensor


def _scores(workload: Workload) -> float:
    """Elements of a layer's attention scores; none where the kernel keeps them to itself."""
    if workload.fused_attention:
        return 0.0
    heads = workload.query_width / workload.head_size
    return workload.tokens * workload.sequence * heads / workload.layout.tensor


def _context(workload: Workload) -> float:
    """Bytes of the result of fused attention and its log-sum-exp in float32, which its backward pass reads."""
    heads = workload.query_width // workload.head_size
    return _elements(workload, workload.query_width) * workload.compute_bytes + _FLOAT32 * _elements(
        workload, heads
    )


def _saved(workload: Workload) -> float:
    """Bytes that one layer saves in the compute dtype."""
    remat, size = workload.remat, workload.compute_bytes
    # The MLP's result is only added to the residual stream, so that no derivative needs it, whatever the policy says.
    widths = workload.width + sum(
        linear.n for linear in _layer(workload) if linear.output != "mlpwo" and remat.saves(linear.output)
    )
    if remat.saved is None:
        # Also what no policy names: the results of both norms, the attention's and the MLP's hidden layer.
        widths += 2 * workload.width + workload.mlp_width
        if not workload.fused_attention:
            return _elements(workload, widths) * size + 2 * _scores(workload) * size
    context = _context(workload) if workload.fused_attention and remat.saves("context") else 0.0
    return _elements(workload, widths) * size + context


def _layer(workload: Workload) -> tuple[Linear, ...]:
    """The linear layers, which every decoder layer has."""
    assert all(linear.layers == workload.layers for linear in workload.linears)
    return workload.linears


def _saved_codes(workload: Workload) -> float:
    """Bytes of codes that an average layer saves: of the activation for wgrad, of the weight for dgrad.

    A scan stacks the same arrays for every layer: one of other formats holds zeros.
    """
    if not workload.remat.quantized and workload.remat.saved is not None:
        return 0.0
    parts, found = workload.layout.tensor, 0.0
    for linear in workload.linears:
        choices = {formats: count / linear.layers for formats, count in linear.formats.items()}
        for gemm, size in ((2, workload.tokens * linear.k), (1, linear.k * linear.n)):
            if workload.scanned:
                found += max(_CODES[formats[gemm]] for formats in choices) * size / parts
            else:
                found += (
                    sum(share * _CODES[formats[gemm]] for formats, share in choices.items()) * size / parts
                )
    return found


def _logits(workload: Workload, backend: Backend) -> float:
    """Bytes at the start of the backward pass.

    What is there of the logits; and around the head the final norm's input in float32, and its input, its result and
    that transposed for wgrad.
    """
    size = workload.compute_bytes
    logits = _elements(workload, workload.vocabulary) * backend.logit_bytes
    return logits + _elements(workload, workload.width) * (_FLOAT32 + 3 * size)


def _workspace(workload: Workload, backend: Backend) -> float:
    """Bytes that the backward pass of one layer has at once, beside what was saved."""
    size, scores = workload.compute_bytes, _scores(workload)
    inputs, hidden = workload.mlp_inputs, _elements(workload, workload.mlp_width)
    # The residual stream and its gradient in float32, as norms and sums compute them. Of both norms' results and of
    # the layer's gradient the thing and, for wgrad, its transpose.
    stream = _elements(workload, workload.width) * (2 * _FLOAT32 + 3 * 2 * size)
    # Queries, keys and values in the order that attention takes them, its result before and after it is put back.
    attention = (
        _elements(workload, workload.query_width) * 3 + _elements(workload, workload.kv_width) * 2
    ) * size
    # What the nonlinearity multiplies: the results of the input layers, their gradient, and of the activation
    # function its sigmoid or the like, its value and its derivative.
    mlp = (inputs + 1 + 3) * hidden * size
    # The MLP's backward pass comes first. Where its input is computed again, so are scores and probabilities by then.
    if not workload.remat.saves("out_proj"):
        mlp += 2 * scores * size
    # Scores and probabilities, and both in float32 on the way through softmax; gradients of the MLP's input layers
    # that wait for wgrad.
    softmax = 2 * scores * (size + _FLOAT32) + inputs * hidden * size
    emulated = 0.0 if backend.codes else _emulated(workload, backend)
    return stream + attention + max(mlp, softmax) + emulated


def _emulated(workload: Workload, backend: Backend) -> float:
    """Bytes of the operands that an emulated 4-bit wgrad multiplies.

    Where layers differ in their formats a scan branches for each GEMM, and one is computed at a time. Otherwise
    nothing keeps the compiler from quantizing every layer's activation before it needs it.
    """
    quantized = [
        linear for linear in workload.linears if any(formats[2] != "bf16" for formats in linear.formats)
    ]
    if workload.scanned and any(len(linear.formats) > 1 for linear in quantized):
        return max(backend.emulated_bytes * _elements(workload, linear.k + linear.n) for linear in quantized)
    return sum(backend.emulated_bytes * _elements(workload, linear.k) for linear in quantized)
