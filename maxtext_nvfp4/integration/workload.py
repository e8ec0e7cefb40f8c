"""A MaxText config as numbers: the work of one device in a training step."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx
from maxtext.utils import maxtext_utils

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration import sites
from maxtext_nvfp4.integration.config import recipe_of
from maxtext_nvfp4.integration.extents import network_sizes
from maxtext_nvfp4.integration.remat import remat_of
from maxtext_nvfp4.plan import Site, SitePlan
from maxtext_nvfp4.predict.workload import Format, GemmFormats, Layout, Linear, Workload, linear
from maxtext_nvfp4.recipe import problem

_BF16: GemmFormats = ("bf16", "bf16", "bf16")

_AXES = {
    "fsdp": ("fsdp", "fsdp_transpose"),
    "data": ("data",),
    "tensor": ("tensor", "tensor_transpose", "tensor_sequence"),
    "context": ("context", "sequence"),
    "pipeline": ("stage",),
}
"""Mesh axes of each kind of parallelism that a `Layout` has."""

_ACROSS = ("fsdp", "data")
"""Kinds that may also lie over NVLink domains."""

_KEYS = {"stage": "pipeline"}

_MOMENTS = {"adamw": 2, "adam_pax": 2, "sgd": 0}
"""Moments that an optimizer keeps of a parameter."""


def workload_of(config: Any, model: nnx.Module, plans: Sequence[SitePlan] | None) -> Workload:
    """The training step of a config.

    Args:
      config: The loaded MaxText config.
      model: Its model, which may be abstract.
      plans: What the recipe makes of each linear layer, as `attach.resolve` returns it; None for stock MaxText in
        BF16.

    Raises:
      ConfigError: The step is none that a `Workload` describes.
    """
    _check(config)
    layout = _layout(config)
    linears = tuple(_linears(sites.to_sites(sites.find_linears(model)), plans))
    pipelined = layout.pipeline > 1
    microbatches = config.num_pipeline_microbatches if pipelined else config.gradient_accumulation_steps
    sharing = layout.tensor * layout.context * layout.pipeline
    sequences = config.per_device_batch_size * sharing / (microbatches if pipelined else 1)
    if sequences % 1:
        given, least = config.per_device_batch_size, (microbatches if pipelined else 1) / sharing
        why = f"the devices that share sequences would have {sequences:g} of them"
        around = (least * count for count in (math.floor(sequences), math.ceil(sequences)))
        write = " or ".join(f"{size:g}" for size in around if size)
        raise ConfigError(problem("per_device_batch_size", given, why, write))
    workload = Workload(
        linears=linears,
        layers=config.num_decoder_layers,
        width=config.emb_dim,
        mlp_width=config.mlp_dim,
        mlp_inputs=len(config.mlp_activations),
        query_width=config.num_query_heads * config.head_dim,
        kv_width=config.num_kv_heads * config.head_dim,
        head_size=config.head_dim,
        vocabulary=config.vocab_size,
        tied=config.logits_via_embedding,
        one_hot=config.use_iota_embed,
        sequence=config.max_target_length,
        sequences=sequences,
        microbatches=microbatches,
        layout=layout,
        remat=remat_of(config),
        fused_attention=_fused(config),
        scanned=config.scan_layers,
        chosen_update=plans is not None and recipe_of(config).loss_scale.mode != "off",
        weight_bytes=_bytes(config.weight_dtype),
        gradient_bytes=_bytes(config.grad_dtype),
        moment_bytes=_moment_bytes(config),
        compute_bytes=_bytes(config.dtype),
    )
    batch = sequences * layout.shards * layout.replicas * (microbatches if pipelined else 1)
    assert math.isclose(batch, config.micro_batch_size_to_train_on, abs_tol=1), "the microbatch is another"
    _check_flops(config, workload)
    return workload


def _linears(found: Sequence[Site], plans: Sequence[SitePlan] | None) -> Iterator[Linear]:
    chosen = {plan.site.path: plan for plan in plans or ()}
    for site in found:
        if not site.layers:
            continue
        formats = _formats(site, chosen[site.path]) if plans is not None else {_BF16: len(site.layers)}
        yield linear(site.path, site.k, site.n, formats)


def _formats(site: Site, plan: SitePlan) -> Mapping[GemmFormats, int]:
    by_choice: list[GemmFormats] = [
        (_format(layer.fprop.precision), _format(layer.dgrad.precision), _format(layer.wgrad.precision))
        for layer, _ in plan.choices
    ]
    assert plan.site.layers == site.layers, "the plans are of another model"
    return dict(Counter(by_choice[entry] for entry in plan.table))


def _format(precision: str) -> Format:
    if precision == "mxfp4":
        raise ConfigError(problem("nvfp4.format", precision, "no time is predicted for MXFP4", "nvfp4"))
    return "nvfp4" if precision == "nvfp4" else "bf16"


def _layout(config: Any) -> Layout:
    inside, across = network_sizes(config)
    known = {axis: kind for kind, axes in _AXES.items() for axis in axes}
    for network, sizes in (("ici", inside), ("dcn", across)):
        for axis, size in sizes.items():
            kind = known.get(axis)
            if size > 1 and (kind is None or (network == "dcn" and kind not in _ACROSS)):
                key = f"{network}_{_KEYS.get(axis, axis)}_parallelism"
                why = "no time is predicted for " + (
                    f"{kind} parallelism over slower networks than NVLink" if kind else "this parallelism"
                )
                raise ConfigError(problem(key, size, why, "1"))

    def product(kind: str, sizes: Mapping[str, int]) -> int:
        return math.prod(sizes.get(axis, 1) for axis in _AXES[kind])

    return Layout(
        **{kind: product(kind, inside) for kind in _AXES},
        **{f"{kind}_across": product(kind, across) for kind in _ACROSS},
        interleaved=max(1, config.num_pipeline_repeats) if product("pipeline", inside) > 1 else 1,
    )


def _check(config: Any) -> None:
    """Refuses what moves arrays or computes in a way that no formula knows.

    Raises:
      ConfigError: At the first of these keys.
    """
    accumulating = config.gradient_accumulation_steps > 1 and config.using_pipeline_parallelism
    faults = (
        (
            "num_experts",
            config.num_experts > 1,
            "nothing is predicted for a mixture of experts",
            "1, or the model_name of a dense model",
        ),
        (
            "opt_type",
            str(getattr(config.opt_type, "value", config.opt_type)) not in _MOMENTS,
            "the memory of this optimizer is not known here",
            " or ".join(_MOMENTS),
        ),
        (
            "num_vocab_tiling",
            config.num_vocab_tiling > 1,
            "the memory of tiled logits is not known here",
            "1",
        ),
        *(
            (
                key,
                getattr(config, key),
                "nothing is predicted where it is kept or split in another way",
                "false",
            )
            for key in (
                "shard_optimizer_over_data",
                "optimizer_memory_host_offload",
                "parameter_memory_host_offload",
            )
        ),
        (
            "gradient_accumulation_steps",
            accumulating,
            "nothing is predicted for a pipeline that also accumulates",
            "1, and more num_pipeline_microbatches",
        ),
    )
    for key, refused, why, write in faults:
        if refused:
            value = getattr(config, key)
            raise ConfigError(problem(key, getattr(value, "value", value), why, write))


def _check_flops(config: Any, workload: Workload) -> None:
    expected = maxtext_utils.calculate_tflops_training_per_device(config, log=False)[0] * 1e12
    if not math.isclose(workload.model_flops, expected, rel_tol=1e-4):
        family = getattr(config.decoder_block, "value", config.decoder_block)
        why = (
            f"MaxText counts {expected:.5g} FLOPs a device and step for this model, and the dense decoder with global "
            f"attention that is predicted here has {workload.model_flops:.5g}"
        )
        write = "llama2, mistral, qwen3 or another such decoder, or the model_name of a model that has one"
        raise ConfigError(problem("decoder_block", family, why, write))


def _fused(config: Any) -> bool:
    """Whether MaxText's kernel keeps attention scores to itself."""
    if config.attention == "autoselected":
        return config.hardware != "cpu" and config.max_target_length >= 128
    return bool(config.attention != "dot_product")


def _moment_bytes(config: Any) -> int:
    """Adam's first moment has a dtype of its own; its second has the weight's."""
    kept = _MOMENTS[str(getattr(config.opt_type, "value", config.opt_type))]
    sizes = (_bytes(config.mu_dtype or config.weight_dtype), _bytes(config.weight_dtype))
    return sum(sizes[:kept])


def _bytes(dtype: Any) -> int:
    return int(np.dtype(getattr(dtype, "value", dtype)).itemsize)
