"""Training from the command line: what MaxText's `train.main` does, with our config and a summary."""

import logging as std_logging
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import flags, logging

from maxtext_nvfp4.integration import register
from maxtext_nvfp4.runs.events import read_events

_LOSS, _SKIPPED = "learning/loss", "nvfp4/skipped_steps"


def train(argv: Sequence[str]) -> tuple[str, bool]:
    """Trains with MaxText's own loop.

    Args:
      argv: Program name, YAML file, then `key=value` arguments.

    Returns:
      A summary, and whether SIGTERM, to this process or another of the run, ended it before its last step.

    Raises:
      ConfigError: A configuration that cannot be honoured; nothing has been trained then.
    """
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)  # MaxText reports its progress at this level, and Orbax every move
    logging.get_absl_handler().addFilter(
        lambda record: record.levelno > std_logging.INFO or "orbax" not in pathlib.Path(record.pathname).parts
    )
    flags.FLAGS.mark_as_parsed()  # grain reads flags when it starts a worker; MaxText's own program parses them
    register()
    from maxtext.trainers.pre_train import train as maxtext_train

    from maxtext_nvfp4.integration.config_errors import raising_config_errors
    from maxtext_nvfp4.integration.config_files import merged_keys
    from maxtext_nvfp4.integration.distributed import join_job
    from maxtext_nvfp4.integration.termination import stopping_at_sigterm

    with raising_config_errors():
        join_job(merged_keys(argv, {}))
        config, recorder = maxtext_train.initialize(list(argv))
    maxtext_train.record_goodput(recorder, maxtext_train.RECORD_JOB_START_TIME)
    with maxtext_train.maybe_monitor_goodput(config), stopping_at_sigterm() as stop:
        maxtext_train.get_train_func(config, recorder, argv)()
    stopped = stop.step is not None
    return summarize(config, stop.step + 1 if stop.step is not None else config.steps), stopped


def summarize(config: Any, done: int) -> str:
    """What a run of `done` steps did and where its files are."""
    from maxtext_nvfp4.integration.config import enabled
    from maxtext_nvfp4.integration.report import of_config

    lines = [f"run {config.run_name}: {_progress(config, done)}"]
    by_step = read_events(config.tensorboard_dir).scalars if config.enable_tensorboard else {}
    if losses := by_step.get(_LOSS):
        first, last = min(losses), max(losses)
        lines.append(f"  loss         {losses[first]:.3f} at step {first}, {losses[last]:.3f} at step {last}")
    if (skips := by_step.get(_SKIPPED)) and (count := round(skips[max(skips)])):
        lines.append(f"  skipped      steps whose loss or gradients were not finite: {count}")
    if enabled(config):
        report = of_config(config)
        lines.append(f"  precision    {report.headline()} (recipe {report.recipe.recipe})")
    if config.enable_checkpointing:
        lines.append(f"  checkpoints  {config.checkpoint_dir}")
    if config.enable_tensorboard:
        lines.append(f"  tensorboard  {config.tensorboard_dir}")
    return "\n".join(lines)


def _progress(config: Any, done: int) -> str:
    if done == config.steps:
        return f"{done} steps"
    then = f"start it again to go on from step {done}"
    if not config.enable_checkpointing:
        then = "nothing was saved, as enable_checkpointing is false"
    return f"stopped by SIGTERM after {done} of {config.steps} steps; {then}"
