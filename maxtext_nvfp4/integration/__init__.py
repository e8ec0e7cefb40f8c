"""The only package that knows MaxText: configuration, attachment and the training step.

`register()` makes the nvfp4 mode known to the MaxText of this process; what it replaces is listed in
`seams`.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

from maxtext_nvfp4.integration.seams import check_maxtext

_registered = False


def register() -> None:
    """Makes `quantization: nvfp4` a mode of MaxText in this process. Calling it again changes nothing.

    A script of one's own gains the mode with two lines before it uses MaxText:

        import maxtext_nvfp4
        maxtext_nvfp4.register()

    Raises:
      ConfigError: The installed MaxText is not a supported version.
    """
    global _registered
    if _registered:
        return
    check_maxtext()
    from maxtext.common import checkpointing, data_loader, train_state_nnx
    from maxtext.configs import pyconfig, types
    from maxtext.layers import quantizations
    from maxtext.trainers.pre_train import train
    from maxtext.utils import max_utils, maxtext_utils, model_creation_utils, train_utils

    from maxtext_nvfp4.integration.config import Nvfp4MaxTextConfig, enabled, mode_defaults
    from maxtext_nvfp4.integration.config_checks import check_keys
    from maxtext_nvfp4.integration.config_files import chosen_keys, merged_keys
    from maxtext_nvfp4.integration.data_errors import loader_exception_guard
    from maxtext_nvfp4.integration.late_switch import keep_successor, start_switched, switch_on_time
    from maxtext_nvfp4.integration.loss_scaling import looking_at_gradients
    from maxtext_nvfp4.integration.probes import probed, probing_accumulation
    from maxtext_nvfp4.integration.restore import falling_back
    from maxtext_nvfp4.integration.resume import checking_recipe, checking_state
    from maxtext_nvfp4.integration.sampling import keep_sampled, sample_on_time
    from maxtext_nvfp4.integration.saves import finishing_saves, remembered
    from maxtext_nvfp4.integration.skips import wrap_training_loop_iteration
    from maxtext_nvfp4.integration.te_context import transformer_engine_context
    from maxtext_nvfp4.integration.train import wrap_loss_fn, wrap_train_step

    def with_mode(initialize: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(initialize)
        def wrapped(argv: Any = None, config_class: type = types.MaxTextConfig, **overrides: Any) -> Any:
            if config_class is types.MaxTextConfig:
                config_class = Nvfp4MaxTextConfig
                argv = argv or [""]
                raw = merged_keys(argv, overrides)
                check_keys(raw)
                overrides = mode_defaults(raw, chosen_keys(argv) | overrides.keys()) | overrides
            return initialize(argv, config_class=config_class, **overrides)

        return wrapped

    def without_quantizer(configure: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(configure)
        def wrapped(config: Any, *args: Any, **kwargs: Any) -> Any:
            return None if enabled(config) else configure(config, *args, **kwargs)

        return wrapped

    pyconfig.initialize = with_mode(pyconfig.initialize)
    pyconfig.initialize_pydantic = with_mode(pyconfig.initialize_pydantic)
    quantizations.configure_quantization = without_quantizer(quantizations.configure_quantization)
    model_creation_utils.create_model = _attaching(model_creation_utils.create_model)
    train.train_step = wrap_train_step(probed(train.train_step))
    accumulate = train.gradient_accumulation_loss_and_grad
    train.gradient_accumulation_loss_and_grad = probing_accumulation(accumulate)
    train.loss_fn = wrap_loss_fn(train.loss_fn)
    train.training_loop_iteration = wrap_training_loop_iteration(train.training_loop_iteration)
    maxtext_utils.apply_gradient_clipping = looking_at_gradients(maxtext_utils.apply_gradient_clipping, 0)
    state = train_state_nnx.TrainStateNNX
    state.apply_gradients = looking_at_gradients(state.apply_gradients, 1)
    train_utils.jit_train_step = keep_successor(keep_sampled(train_utils.jit_train_step))
    train_utils.jit_eval_step = keep_successor(train_utils.jit_eval_step)
    train_utils.setup_train_loop = start_switched(train_utils.setup_train_loop)
    train.training_loop_iteration = switch_on_time(sample_on_time(train.training_loop_iteration))
    create_manager = checking_recipe(train_utils.create_checkpoint_manager)
    train_utils.create_checkpoint_manager = remembered(create_manager)
    train.train_loop = finishing_saves(train.train_loop)
    checkpointing.load_state_if_possible = falling_back(checkpointing.load_state_if_possible)
    train_utils.setup_train_loop = checking_state(train_utils.setup_train_loop)
    max_utils.transformer_engine_context = transformer_engine_context
    data_loader.loader_exception_guard = loader_exception_guard
    # MaxText takes every mode that is not Transformer Engine's for its old AQT and advises to leave it.
    logging.getLogger(types.__name__).addFilter(
        lambda record: "AQT quantization is deprecated" not in record.msg
    )
    _registered = True


def _attaching(create_model: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `model_creation_utils.create_model`: the model it returns has its 4-bit multiplies."""
    from maxtext_nvfp4.integration.attach import attach
    from maxtext_nvfp4.integration.config import enabled, recipe_of
    from maxtext_nvfp4.integration.report import announce

    @functools.wraps(create_model)
    def wrapped(config: Any, *args: Any, **kwargs: Any) -> Any:
        model = create_model(config, *args, **kwargs)
        if enabled(config):
            announce(attach(model, config, recipe_of(config)), config)
        return model

    return wrapped
