"""The step of the late switch, from the steps and the learning-rate schedule of a MaxText config."""

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.plan import SitePlan
from maxtext_nvfp4.recipe import Switch, problem
from maxtext_nvfp4.switch import switched_gemms


def switch_step(switch: Switch, config: Any) -> int:
    """The first step after the switch: an integer from 1 to `steps - 1`.

    A fraction of the steps is rounded down, in decimal, so that 0.29 of 100 is 29.

    Raises:
      ConfigError: The switch would come before the first step or after the last, or it waits for a decay that
        the learning-rate schedule does not have.
    """
    match switch.at:
        case str():
            step = _decay_step(config)
        case float(fraction):
            step = math.floor(Decimal(str(fraction)) * config.steps)
        case int(step):
            pass
    if step < 1:
        why = f"of steps: {config.steps} this is step 0, and no step would come before the switch"
        write = "a larger fraction, or more steps"
        raise ConfigError(problem("nvfp4.switch.at", switch.at, why, write))
    if step >= config.steps:
        why = f"step {step} is not in a run of steps: {config.steps}, whose last step is {config.steps - 1}"
        write = f"a step below {config.steps}, a fraction such as 0.82, or no switch"
        raise ConfigError(problem("nvfp4.switch.at", switch.at, why, write))
    return step


def check_switch(switch: Switch, plans: Sequence[SitePlan], config: Any) -> None:
    """Verifies that the switch takes place in a run and changes something.

    Raises:
      ConfigError: As `switch_step`; or no GEMM that it names is in 4 bits, or the run's only program comes
        from a file.
    """
    switch_step(switch, config)
    gemms = switched_gemms(switch)
    choices = [plan for site_plan in plans for plan, _ in site_plan.choices]
    if not any(getattr(plan, gemm).quantized for plan in choices for gemm in gemms):
        why = f"the recipe leaves no {' or '.join(gemms)} GEMM in 4 bits, so there is nothing to switch"
        raise ConfigError(problem("nvfp4.switch", switch.model_dump(), why, "no switch, or another recipe"))
    if config.compiled_trainstep_file:
        why = "it holds one program, and a run with nvfp4.switch needs a second one"
        write = 'compiled_trainstep_file: "", or no switch'
        raise ConfigError(problem("compiled_trainstep_file", config.compiled_trainstep_file, why, write))


def _decay_step(config: Any) -> int:
    """First step of the decay in MaxText's schedule of type wsd; the learning rate falls after it."""
    from maxtext.configs.types import LearningRateScheduleType

    length = config.learning_rate_schedule_steps
    decay = int(length * config.wsd_decay_steps_fraction)
    if config.lr_schedule_type != LearningRateScheduleType.WSD:
        schedule = getattr(config.lr_schedule_type, "value", config.lr_schedule_type)
        why = f"lr_schedule_type is {schedule}, which has no constant phase that a decay ends"
    elif decay == 0 or int(length * config.warmup_steps_fraction) + decay >= length:
        lacking = "decay" if decay == 0 else "constant phase before its decay"
        why = f"the schedule of learning_rate_schedule_steps: {length} has no {lacking}"
    else:
        return int(length - decay)
    write = "a fraction such as 0.82, or a step"
    if config.lr_schedule_type != LearningRateScheduleType.WSD:
        write += ", or lr_schedule_type: wsd"
    raise ConfigError(problem("nvfp4.switch.at", "lr_decay", why, write))
