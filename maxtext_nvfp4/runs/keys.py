"""Which keys of a config are about precision, and which say only where and how a run is done."""

import fnmatch
from collections.abc import Iterable

PRECISION = (
    "nvfp4",
    "quantization",
    "use_qwix_quantization",
    "quant_cfg_path",
    "*_quantization_calibration_method",
)
"""What a comparison is about. Other types, such as dtype or mu_dtype, are no part of a recipe."""

ELSEWHERE = (
    # Names, places and records of a run
    "*run_name", "base_output_directory", "base_config", "*_cache_dir", "metrics_*", "gcs_*", "log_*",
    "dump_*", "*profil*", "xprof_*", "*wandb*", "*goodput*", "*mldiagnostics*", "*tensorboard*", "*mllog*",
    "vertex_*", "monitor_*", "*monitoring*", "heartbeat_*", "report_*", "prometheus_port", "jax_*",
    # Checkpoints
    "*checkpoint*", "*_backup_interval_*",
    # When it ends and is evaluated: runs are aligned by tokens, and the schedule has its own key
    "steps", "eval_interval", "eval_start_step", "abort_on_*",
    # Hardware, and how the same global batch is spread over it
    "hardware", "ici_*", "dcn_*", "num_slices", "num_target_devices", "compile_*", "compiled_*", "libtpu_init_args",
    "internal_compile*", "skip_jax_distributed_system", "per_device_batch_size", "global_batch_size_to_load*",
    "micro_batch_size_*", "mesh_axes", "custom_mesh*", "*logical_axis_rules*", "*_memory_host_offload",
    "shard_optimizer_over_data", "remat_policy",
)  # fmt: skip
"""Glob patterns of keys that say where and how a run is done, and not what it computes."""


def matches(key: str, patterns: Iterable[str]) -> bool:
    """Whether one of the glob patterns fits."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
