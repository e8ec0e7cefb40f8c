"""Checks of a run's keys before MaxText touches a device, and of what they need from the machine."""

import difflib
import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from maxtext.configs import types
from maxtext.utils.globals import MAXTEXT_ASSETS_ROOT

from maxtext_nvfp4.backends import te_library
from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration.config_errors import nearest, raising_config_errors
from maxtext_nvfp4.integration.config_files import merged_keys
from maxtext_nvfp4.integration.distributed import check_job
from maxtext_nvfp4.recipe import Recipe, load_recipe, problem, show

MODE = "nvfp4"

_FIELDS = (*types.MaxTextConfig.model_fields, "nvfp4")

_EXCLUSIVE = {
    "use_qwix_quantization": False,
    "use_manual_quantization": False,
    "quant_cfg_path": "",
    "te_gmm_quantization": "",
    "te_comm_gemm_overlap": "disabled",
    "quantize_kvcache": False,
    "quantize_mtp": False,
    "quantize_logits_proj": False,
}
"""Options of MaxText's other quantization modes, with the value that leaves them off."""

_UNSUPPORTED = {
    "use_m3_model": (False, "its layers are not the ones this plugin quantizes"),
    "enable_diloco": (False, "its train step keeps another state"),
    "use_batch_split_schedule": (False, "its layers do not use MaxText's linear layers"),
    "shard_mode": ("auto", "it needs compiler sharding"),
}
"""MaxText features the mode cannot be combined with: the value that leaves them off, and the reason."""

_POSITIVE = (
    "base_emb_dim",
    "base_mlp_dim",
    "base_num_query_heads",
    "base_num_kv_heads",
    "base_num_decoder_layers",
    "head_dim",
    "vocab_size",
    "max_target_length",
    "per_device_batch_size",
)
"""Sizes that MaxText does not check before it divides by them."""

_CHOICES = {
    "attention": (
        "autoselected",
        "dot_product",
        "flash",
        "cudnn_flash_te",
        "cudnn_flash_jax",
        "paged",
        "vllm_rpa",
        "vllm_batched_rpa",
    ),
    "remat_policy": (
        *(policy.value for policy in types.RematPolicy),
        "minimal_flash",
        "minimal_with_context",
        "minimal_with_context_and_quantization",
        "minimal_with_quantization",
    ),
}
"""Choices that MaxText types as any text, and looks up when it builds the model."""

_ACTIVATIONS = ("linear", "sqrtsoftplus")
"""MaxText's own activation functions; the others are attributes of `jax.nn`."""

_CPU_ATTENTION = ("autoselected", "dot_product")


def check_keys(raw: Mapping[str, Any]) -> None:
    """Checks the merged YAML and command line before MaxText touches a device.

    Args:
      raw: All top-level keys and their values, without MaxText's model presets.

    Raises:
      ConfigError: An unknown key, an impossible value, a wrong recipe, a section without the mode, or a
        combination that cannot be.
    """
    for key, value in raw.items():
        if key not in _FIELDS and not _is_nested_key(key):
            raise ConfigError(problem(key, value, "no such MaxText option", _nearest_option(key)))
    _check_values(raw)
    mode, section = raw.get("quantization"), raw.get("nvfp4")
    if isinstance(mode, str) and mode.lower() == "none":  # as MaxText reads it
        mode = None
    if mode != MODE:
        known = [item.value for item in types.QuantizationType if item.value] + [MODE]
        if mode and mode not in known:
            why, write = "no such mode", nearest(mode, known) or MODE
            raise ConfigError(problem("quantization", mode, why, write))
        if section:
            why = f"quantization is {mode or 'not set'}, so the section would have no effect"
            raise ConfigError(problem("nvfp4", section, why, "quantization: nvfp4, or no nvfp4 section"))
        return
    recipe = load_recipe(section)
    if recipe.telemetry:
        _check_telemetry(raw)
    for key, off in _EXCLUSIVE.items():
        if raw.get(key, off) not in (off, None, ""):
            why = "it belongs to another quantization mode than quantization: nvfp4"
            write = f"{key}: {show(off)}, or choose the other mode"
            raise ConfigError(problem(key, raw[key], why, write))
    for key, (unused, reason) in _UNSUPPORTED.items():
        if raw.get(key, unused) not in (unused, None):
            why = f"quantization: nvfp4 cannot be combined with it: {reason}"
            raise ConfigError(problem(key, raw[key], why, f"{key}: {show(unused)}"))
    for key in ("ici_pipeline_parallelism", "dcn_pipeline_parallelism"):
        if raw.get(key, 1) not in (1, -1):
            why = "quantization: nvfp4 does not run under pipeline parallelism"
            raise ConfigError(problem(key, raw[key], why, f"{key}: 1, and use FSDP or tensor parallelism"))
    for key, write in (("dtype", "bfloat16"), ("weight_dtype", "float32, for the master weights")):
        if raw.get(key) and raw[key] not in ("bfloat16", "float32"):
            why = "4-bit values are made from bfloat16 or float32"
            raise ConfigError(problem(key, raw[key], why, f"{key}: {write}"))


def _check_telemetry(raw: Mapping[str, Any]) -> None:
    """Refuses what a sampled step cannot be combined with."""
    if raw.get("compiled_trainstep_file"):
        why = "it holds one program, and a run with nvfp4.telemetry needs a second one"
        write = 'compiled_trainstep_file: "", or no telemetry'
        raise ConfigError(problem("compiled_trainstep_file", raw["compiled_trainstep_file"], why, write))
    steps = raw.get("gradient_accumulation_steps", 1)
    if raw.get("shard_optimizer_over_data") and isinstance(steps, int) and steps > 1:
        why = "with accumulated gradients MaxText then sums in BF16 what nvfp4.telemetry measures"
        write = "shard_optimizer_over_data: false, or no telemetry"
        raise ConfigError(problem("shard_optimizer_over_data", True, why, write))


def _check_values(raw: Mapping[str, Any]) -> None:
    """Refuses values that MaxText takes and then trips over in the middle of a start."""
    for key in _POSITIVE:
        if isinstance(value := raw.get(key), int | float) and value <= 0:
            raise ConfigError(problem(key, value, "it must be positive", "a number above 0"))
    if raw.get("steps") == 0:
        write = "1 or more, or -1 to follow learning_rate_schedule_steps"
        raise ConfigError(problem("steps", 0, "there would be nothing to train", write))
    for key, choices in _CHOICES.items():
        value = raw.get(key)
        if isinstance(value, str) and value.lower() not in ("", "none", *choices):
            write = nearest(value, choices) or " or ".join(choices)
            raise ConfigError(problem(key, value, "no such choice", write))
    activations = raw.get("mlp_activations")
    for name in activations if isinstance(activations, list) else ():
        if name not in _ACTIVATIONS and not hasattr(jax.nn, str(name)):
            write = nearest(name, (*_ACTIVATIONS, *dir(jax.nn))) or "silu"
            raise ConfigError(problem("mlp_activations", name, "no such function in jax.nn", write))
    for network in ("ici", "dcn"):
        axes = [key for key in raw if re.fullmatch(rf"{network}_\w+_parallelism", key) and raw[key] == -1]
        if len(axes) > 1:
            why = "only one axis can take what the others leave"
            raise ConfigError(problem(" and ".join(axes), -1, why, "a number for all but one of them"))


def check_run(argv: Sequence[str]) -> None:
    """Checks a config and what a run of it needs from the machine that it starts on.

    Args:
      argv: As for `load_config`.

    Raises:
      ConfigError: As `check_keys`; or a path that does not exist, a library that is not installed, or a
        distributed job without an environment for one.
    """
    with raising_config_errors():
        raw = merged_keys(argv, {})
    check_start(raw)


def check_start(raw: Mapping[str, Any]) -> None:
    """What `check_run` does, for keys that are merged already."""
    check_keys(raw)
    for key, path in missing_paths(raw):
        raise ConfigError(problem(key, raw[key], f"{path} does not exist", f"{key}: a path that exists"))
    if raw.get("hardware") == "cpu" and raw.get("attention", "autoselected") not in _CPU_ATTENTION:
        why, write = "it has no kernel for CPUs", "attention: dot_product"
        raise ConfigError(problem("attention", raw["attention"], why, write))
    for key, write in (("attention", "dot_product"), ("quantization", "nvfp4")):
        value = str(raw.get(key))
        if value.startswith(("te_", "cudnn_flash_te")) and (absent := te_library.absent()):
            write = f"{key}: {write}, or install Transformer Engine"
            raise ConfigError(problem(key, value, absent, write))
    check_job(raw)


def missing_paths(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Paths and patterns that lead to nothing, with the key that names them."""
    for key, path in _needed_paths(raw):
        if "://" not in path and not glob.glob(os.path.expanduser(path)):
            yield key, path


def _needed_paths(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Paths and patterns that must lead to something, with the key that names them."""
    for key in ("load_parameters_path", "load_full_state_path"):
        if raw.get(key):
            yield key, str(raw[key])
    data = raw.get("dataset_type")
    prepared = (
        data == "grain" and raw.get("grain_file_type") == "tfrecord" and not raw.get("grain_train_files")
    )
    if (data == "tfds" or prepared) and raw.get("dataset_path"):
        yield "dataset_path", str(raw["dataset_path"])
        name = str(raw.get("dataset_name")).replace(":", "/")
        yield "dataset_name", os.path.join(str(raw["dataset_path"]), name)
    if data == "grain":
        for pattern in str(raw.get("grain_train_files") or "").split(";"):
            if pattern:
                yield "grain_train_files", pattern.split(",")[0]
    tokenizer = str(raw.get("tokenizer_path") or "")
    packaged = os.path.join(MAXTEXT_ASSETS_ROOT, "tokenizers", os.path.basename(tokenizer))
    if tokenizer and data != "synthetic" and raw.get("tokenizer_type") != "huggingface":
        yield "tokenizer_path", packaged if os.path.exists(packaged) else tokenizer


def _nearest_option(key: str) -> str:
    if key in Recipe.model_fields:
        return f"it in the section nvfp4, as nvfp4: {{{key}: ...}}"
    near = difflib.get_close_matches(key, _FIELDS, n=3, cutoff=0.7)
    return " or ".join(near) or "an option of MaxText's base.yml"


def _is_nested_key(key: str) -> bool:
    """MaxText accepts the keys of its nested sections at top level."""
    return any(
        key in getattr(field.annotation, "model_fields", {})
        for field in types.MaxTextConfig.model_fields.values()
    )
