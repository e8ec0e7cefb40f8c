"""Choices that cost speed, or fail for it."""

from maxtext_nvfp4.doctor.facts import Situation
from maxtext_nvfp4.doctor.findings import Finding, note, ok, problem

_FAST_REMAT = "minimal_with_context_and_quantization"

_ATTENTION = {
    "dot_product": "it writes the whole score matrix to memory",
    "autoselected": "on a GPU MaxText then takes a Triton kernel",
    "flash": "on a GPU MaxText then takes a Triton kernel",
}
"""Why these are slower on Blackwell than cuDNN's fused attention."""

_MANY_LAYERS = 16


def attention(situation: Situation) -> Finding | None:
    """Attention is cuDNN's fused kernel, and knows how many documents a sequence holds."""
    run = situation.run
    if run is None or not situation.on_gpus:
        return None
    kernel = str(run.keys["attention"])
    packed = run.keys["packing"] and run.keys["dataset_type"] != "synthetic"
    segments = run.keys["max_segments_per_seq"]
    if kernel == "cudnn_flash_te" and packed and isinstance(segments, int) and segments < 1:
        return problem(
            f"attention: cudnn_flash_te with packing, and max_segments_per_seq: {segments}: Transformer Engine "
            "needs to know how many documents a sequence holds at most",
            "max_segments_per_seq: 32, or packing: false",
        )
    if why := _ATTENTION.get(kernel):
        return note(f"attention: {kernel}: {why}", "attention: cudnn_flash_te")
    return ok(f"attention: {kernel}")


def remat(situation: Situation) -> Finding | None:
    """The backward pass finds quantized tensors, and does not quantize again."""
    run = situation.run
    if run is None or not situation.in_engine:
        return None
    policy = str(run.keys["remat_policy"])
    if policy.endswith("quantization"):
        return ok(f"remat_policy: {policy} keeps quantized tensors")
    why = "the backward pass quantizes activations and weights a second time"
    if policy in ("full", "none"):
        why = "the backward pass repeats the forward pass, quantization and 4-bit GEMMs too"
    return note(f"remat_policy: {policy}: {why}", f"remat_policy: {_FAST_REMAT}, where memory allows")


def scan(situation: Situation) -> Finding | None:
    """Layers are compiled once, by a scan."""
    run = situation.run
    if run is None:
        return None
    layers = run.keys["num_decoder_layers"]
    assert isinstance(layers, int)
    if not run.keys["scan_layers"] and layers > _MANY_LAYERS:
        return note(
            f"scan_layers: false with {layers} layers: each is compiled by itself; 48 have been reported to ask "
            "for 905 GB of temporary memory",
            "scan_layers: true; the recipe chooses by layer all the same",
        )
    return ok(f"scan_layers: {str(bool(run.keys['scan_layers'])).lower()}, {layers} layers")


def backend(situation: Situation) -> Finding | None:
    """On GPUs 4-bit GEMMs are kernels, not block quantization by XLA."""
    run = situation.run
    if run is None or run.shapes is None or not situation.on_gpus:
        return None
    name = run.shapes.backend
    if name != "transformer_engine":
        return note(
            f"backend {name}: quantizing in XLA operations costs more than 4-bit products gain",
            "nvfp4.backend: auto, on a GPU with NVFP4 and with Transformer Engine",
        )
    return ok("backend transformer_engine")
