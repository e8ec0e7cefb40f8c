"""What a start checks before it goes on from what a run has left: recipe, files, values."""

import functools
import os
from collections.abc import Callable
from typing import Any

from etils import epath
from maxtext.common import checkpointing
from maxtext.utils import max_logging
from orbax.checkpoint import v1 as ocp

from maxtext_nvfp4.integration import history
from maxtext_nvfp4.integration.checksums import recording
from maxtext_nvfp4.integration.config import enabled, recipe_of
from maxtext_nvfp4.integration.fit import checking_shapes
from maxtext_nvfp4.integration.non_finite import check_finite
from maxtext_nvfp4.integration.processes import on_first
from maxtext_nvfp4.integration.switch_step import switch_step
from maxtext_nvfp4.recipe import Recipe


def checking_recipe(create_checkpoint_manager: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `train_utils.create_checkpoint_manager`, which is the first to know a run's checkpoints."""

    @functools.wraps(create_checkpoint_manager)
    def wrapped(config: Any, *args: Any, **options: Any) -> Any:
        manager = create_checkpoint_manager(config, *args, **options)
        if manager is None or not enabled(config):
            return manager
        latest = checkpointing.latest_step(manager)
        on_first(lambda: check_recipe(config, latest))
        if isinstance(manager, ocp.training.Checkpointer):
            manager.save_checkpointables_async = recording(manager.save_checkpointables_async)
            manager.load_checkpointables = checking_shapes(manager)
        return manager

    return wrapped


def check_recipe(config: Any, latest: int | None) -> None:
    """Compares the recipe of a config with that of the checkpoint it would go on from.

    Args:
      config: A MaxText config in the nvfp4 mode.
      latest: The last step that the run's own checkpoints hold; None without any.

    Raises:
      ConfigError: They differ, and the config does not allow it.
    """
    folder, first = _origin(config, 0 if latest is None else latest + 1)
    recipe, switch = _recipe(config)
    history.check(history.read(folder), recipe, switch, first, folder / history.NAME)


def checking_state(setup_train_loop: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `train_utils.setup_train_loop`: what it restored is finite, and the recipe is on record."""

    @functools.wraps(setup_train_loop)
    def wrapped(config: Any, *args: Any, **options: Any) -> Any:
        result = setup_train_loop(config, *args, **options)
        if not enabled(config):
            return result
        manager, state = result[1], result[-1]
        step = int(state.optimizer.step.get_value())
        if step > 0 or config.load_parameters_path:
            check_finite(state, config.param_scan_axis, _restored(config, manager))
        if manager is not None:
            on_first(lambda: _record(config, manager, step))
        return result

    return wrapped


def _record(config: Any, manager: Any, step: int) -> None:
    own = _run_folder(config)
    resumed = checkpointing.latest_step(manager) is not None
    origin, _ = _origin(config, step if resumed else 0)
    (recipe, switch), before, known = _recipe(config), history.read(origin), history.read(own)
    after = history.continued(before, recipe, switch, step)
    if after == known:
        return
    history.write(own, after)
    if len(after) > 1 and after[-1].first_step == step:
        max_logging.log(
            f"NVFP4: recipe {recipe.recipe} ({recipe.fingerprint}) from step {step} on, after {after[-2].name}"
        )


def _recipe(config: Any) -> tuple[Recipe, int | None]:
    """The run's recipe, and the step of its late switch."""
    recipe = recipe_of(config)
    return recipe, switch_step(recipe.switch, config) if recipe.switch else None


def _origin(config: Any, step: int) -> tuple[epath.Path, int]:
    """The folder of the run whose state this one goes on from, and the first step to come.

    Without a checkpoint of its own, a run may take the full state of another from MaxText's usual place,
    `<run>/checkpoints/<step>`, with or without the `items` below it.
    """
    if step == 0 and config.load_full_state_path:
        checkpoint = epath.Path(config.load_full_state_path.rstrip("/").removesuffix("/items"))
        if checkpoint.name.isdigit() and checkpoint.parent.name == "checkpoints":
            return checkpoint.parent.parent, int(checkpoint.name) + 1
    return _run_folder(config), step


def _run_folder(config: Any) -> epath.Path:
    return epath.Path(config.checkpoint_dir.rstrip("/")).parent


def _restored(config: Any, manager: Any) -> str:
    latest = None if manager is None else checkpointing.latest_step(manager)
    if latest is not None:
        return os.path.join(config.checkpoint_dir, str(latest))
    return config.load_full_state_path or config.load_parameters_path
