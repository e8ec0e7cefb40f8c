"""Every attribute of MaxText that this plugin replaces or calls, and the versions where it was verified."""

import importlib
import importlib.metadata

from maxtext_nvfp4.errors import ConfigError

SUPPORTED_MAXTEXT = ("0.2.5",)

SEAMS = {
    "maxtext.common.checkpointing": (
        "load_state_if_possible",
        "maybe_save_checkpoint",
        "wait_until_finished",
        "latest_step",
        "all_steps",
        "reached_preemption",
    ),
    "maxtext.common.data_loader": ("loader_exception_guard",),
    "maxtext.common.train_state_nnx": ("TrainStateNNX", "to_checkpoint_dict"),
    "maxtext.configs.pyconfig": (
        "initialize",
        "initialize_pydantic",
        "resolve_config_path",
        "yaml_key_to_env_key",
        "_BASE_CONFIG_ATTR",
        "_handle_config_exception",
        "_load_config",
    ),
    "maxtext.configs.types": ("LearningRateScheduleType", "MaxTextConfig", "QuantizationType"),
    "maxtext.layers.linears": ("DenseGeneral",),
    "maxtext.layers.moe": ("GateLogit", "RoutedMoE"),
    "maxtext.layers.quantizations": ("configure_quantization",),
    "maxtext.trainers.pre_train.train": (
        "initialize",
        "get_train_func",
        "train_loop",
        "train_step",
        "loss_fn",
        "gradient_accumulation_loss_and_grad",
        "training_loop_iteration",
        "record_goodput",
        "maybe_monitor_goodput",
    ),
    "maxtext.utils.exceptions": ("StopTraining",),
    "maxtext.utils.max_logging": ("log",),
    "maxtext.optimizers.optimizers": ("get_optimizer",),
    "maxtext.utils.max_utils": ("fill_unspecified_mesh_axes", "l2norm_pytree", "transformer_engine_context"),
    "maxtext.utils.maxtext_utils": (
        "apply_gradient_clipping",
        "calculate_tflops_training_per_device",
        "create_learning_rate_schedule",
    ),
    "maxtext.utils.model_creation_utils": ("create_model", "create_nnx_abstract_model"),
    "maxtext.utils.train_utils": (
        "create_checkpoint_manager",
        "jit_train_step",
        "jit_eval_step",
        "setup_train_loop",
    ),
}


def check_maxtext() -> None:
    """Verifies that the installed MaxText is one this plugin was built against.

    Raises:
      ConfigError: Another version, no MaxText at all, or a seam that is not where it should be.
    """
    wanted = " or ".join(SUPPORTED_MAXTEXT)
    try:
        found = importlib.metadata.version("maxtext")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"MaxText is not installed; install maxtext=={wanted}") from None
    if found not in SUPPORTED_MAXTEXT:
        raise ConfigError(
            f"MaxText {found} is installed, but maxtext-nvfp4 works with {wanted}; install that version"
        )
    missing = [
        f"{module}.{name}"
        for module, names in SEAMS.items()
        for name in names
        if not hasattr(importlib.import_module(module), name)
    ]
    if missing:
        raise ConfigError(
            f"MaxText {found} lacks {', '.join(missing)}, which maxtext-nvfp4 needs: the installation was "
            f"modified; reinstall maxtext=={wanted}"
        )
