"""Seconds of a step's collectives on one GPU. A ring moves (n - 1) / n of the whole through each of n GPUs."""

from maxtext_nvfp4.predict.hardware import Hardware
from maxtext_nvfp4.predict.workload import Workload

_SEQUENCE_PARALLEL = 8
"""All-gathers and reduce-scatters of activations in a layer: one each around attention and MLP, forward and backward."""

_CONTEXT_PARALLEL = 3
"""Keys and values are gathered in the forward pass and again in the backward pass, which also scatters their gradients."""


def _ring(parts: int) -> float:
    return (parts - 1) / parts


def tensor_parallel(workload: Workload, hardware: Hardware) -> float:
    """Activations that a layer's tensor parallelism moves for a microbatch, over NVLink."""
    size = workload.tokens * workload.width * workload.compute_bytes
    return _SEQUENCE_PARALLEL * size * _ring(workload.layout.tensor) / hardware.nvlink


def context_parallel(workload: Workload, hardware: Hardware) -> float:
    """Keys and values that a layer's context parallelism moves for a microbatch, over NVLink."""
    layout = workload.layout
    size = workload.tokens * layout.context * 2 * workload.kv_width / layout.tensor * workload.compute_bytes
    return _CONTEXT_PARALLEL * size * _ring(layout.context) / hardware.nvlink


def weights(workload: Workload, hardware: Hardware) -> float:
    """Gathers of a GPU's weights and reductions of their gradients in a step, over both networks.

    FSDP gathers each weight in the compute dtype for the forward and for the backward pass of a microbatch, and scatters
    its gradient; replicas reduce gradients to all. Over several domains each GPU fetches from the others only its share
    of what they lack, and then exchanges within its own.
    """
    layout, size = workload.layout, workload.gradient_bytes
    held = workload.parameters / (layout.tensor * layout.pipeline)
    gathered = held * (2 * workload.compute_bytes + size)
    fsdp = gathered * _ring(layout.shards) / hardware.nvlink
    fsdp += gathered / layout.shards * (layout.fsdp_across - 1) / hardware.network
    reduced = held / layout.shards * 2 * size
    data = reduced * _ring(layout.data) / hardware.nvlink
    data += reduced / layout.data * _ring(layout.data_across) / hardware.network
    times = workload.microbatches
    return fsdp * times + data * (1 if workload.once_per_step else times)
