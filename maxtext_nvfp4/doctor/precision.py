"""Where gradients are summed in BF16. A published divergence of a large NVFP4 run came from that, not from FP4."""

from maxtext_nvfp4.doctor.facts import Situation
from maxtext_nvfp4.doctor.findings import Finding, note, ok

ALL_REDUCE = "NVTE_JAX_ALL_REDUCE_IN_FP32"
"""Transformer Engine's variable: with 1 it sums the results of a split contraction in FP32."""


def accumulation(situation: Situation) -> Finding | None:
    """Gradients accumulate, and weights and moments are kept, in FP32."""
    run = situation.run
    if run is None:
        return None
    found, write = [], []
    for key, why in (
        ("weight_dtype", "gradients have the type of the weights, and are accumulated in it"),
        ("grad_dtype", "gradients are rounded before the optimizer sees them"),
        ("mu_dtype", "the first moment is rounded at every step"),
    ):
        if run.keys[key] == "bfloat16":
            found.append(f"{key}: bfloat16: {why}")
            write.append(f"{key}: float32")
    if run.keys["shard_optimizer_over_data"]:
        found.append("shard_optimizer_over_data: true: weights and accumulated gradients become BF16")
        write.append("shard_optimizer_over_data: false, and FSDP for memory")
    if found:
        return note("; ".join(found), ", ".join(write))
    return ok("weights, gradients and moments in FP32")


def reduction(situation: Situation) -> Finding | None:
    """Weight gradients are summed over devices in FP32."""
    run = situation.run
    if run is None or not situation.in_engine or run.token_parts == 1:
        return None
    if situation.machine.environment.get(ALL_REDUCE) == "1":
        return ok(f"{ALL_REDUCE}=1: Transformer Engine sums over devices in FP32")
    return note(
        f"Transformer Engine sums the weight gradients of 4-bit layers over {run.token_parts} devices in BF16",
        f"{ALL_REDUCE}=1 sums them in FP32, for twice the traffic",
    )
