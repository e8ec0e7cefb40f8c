"""A restore that finds damage and falls back to the newest checkpoint that is whole.

Damage needs evidence: an array that is not what was saved, a file that is missing or cut short, a failed
checksum. A checkpoint that merely does not fit the model is MaxText's to refuse.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
from etils import epath
from maxtext.common import checkpointing, train_state_nnx
from maxtext.utils import max_logging
from orbax.checkpoint import v1 as ocp

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration.checksums import mismatches, recorded
from maxtext_nvfp4.integration.config import enabled
from maxtext_nvfp4.integration.config_errors import first_line
from maxtext_nvfp4.integration.damage import data_lost, find_damage
from maxtext_nvfp4.integration.fit import of_another_model
from maxtext_nvfp4.integration.processes import from_first, on_first

_SHOWN = 10

_MISFIT = re.compile("mismatch at key path|not match the model")


def falling_back(load_state_if_possible: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `checkpointing.load_state_if_possible`.

    Raises:
      ConfigError: No checkpoint of the run is whole, or a damaged one could not be moved out of the way.
    """

    @functools.wraps(load_state_if_possible)
    def wrapped(manager: Any, *args: Any, maxtext_config: Any = None, **options: Any) -> Any:
        load = functools.partial(
            load_state_if_possible, manager, *args, maxtext_config=maxtext_config, **options
        )
        # The managers of emergency checkpoints have layouts of their own.
        if not (
            maxtext_config and enabled(maxtext_config) and isinstance(manager, ocp.training.Checkpointer)
        ):
            return load()
        damaged: dict[epath.Path, list[str]] = {}
        for step in reversed(checkpointing.all_steps(manager)):
            checkpoint = manager.directory / str(step)
            result, faults = _attempt(functools.partial(load, step=step), checkpoint)
            if not faults:
                _set_aside(manager, damaged)
                if damaged and maxtext_config.enable_rampup_batch_size:
                    # MaxText has already planned the ramp from the step of the damaged checkpoint.
                    raise ConfigError(
                        f"{_account(damaged)}\nit was moved aside; start the run again, which goes on from step {step + 1}"
                    )
                return result
            damaged[checkpoint] = faults
        if damaged:
            raise ConfigError(
                f"{_account(damaged)}\nno checkpoint of this run is whole, and nothing was changed; put one back from a "
                "copy, or choose another run_name"
            )
        return load()

    return wrapped


def _attempt(load: Callable[[], Any], checkpoint: epath.Path) -> tuple[Any, list[str]]:
    """What a checkpoint holds, and what is wrong with it, the same on every process."""
    alone = jax.process_count() == 1
    # Several processes look first: one that fails in a restore leaves the others waiting inside it.
    if not alone and (faults := _agreed_damage(checkpoint)):
        return None, faults
    try:
        result = load()
    except ConfigError:
        raise
    except Exception as error:  # Orbax wraps whatever it meets in errors of many types
        lost = data_lost(error)
        if alone and (faults := find_damage(checkpoint) or [lost] * bool(lost)):
            return None, faults
        if lost:
            account = _account({checkpoint: [lost]})
            raise ConfigError(
                f"{account}\nmove it away, and start again: the run goes on before it"
            ) from error
        if misfit := _misfit(error):
            raise ConfigError(of_another_model(checkpoint, misfit)) from error
        raise
    restored = train_state_nnx.to_checkpoint_dict(result[0]["items"])
    wrong = mismatches(restored, recorded(checkpoint))
    return result, [f"{name}: not the values that were saved" for name in wrong]


def _misfit(error: BaseException | None) -> str:
    """What MaxText or Orbax says of a tree that is not that of the model and its optimizer."""
    while error is not None:
        if _MISFIT.search(str(error)):
            return first_line(str(error))
        error = error.__cause__ or error.__context__
    return ""


def _agreed_damage(checkpoint: epath.Path) -> list[str]:
    found = find_damage(checkpoint) if jax.process_index() == 0 else []
    return from_first("\n".join(found)).splitlines()


def _set_aside(manager: Any, damaged: dict[epath.Path, list[str]]) -> None:
    """Renames damaged checkpoints, which would else be the newest, and never be written again."""
    if not damaged:
        return

    def rename() -> None:
        for checkpoint, faults in damaged.items():
            if "://" in str(checkpoint):
                raise ConfigError(
                    f"{_account({checkpoint: faults})}\nan object store cannot rename a folder in one step; move "
                    f"{checkpoint} away yourself, and start again: the run goes on from the checkpoint before it"
                )
            aside = _unused(checkpoint)
            checkpoint.rename(aside)
            max_logging.log(f"{_account({checkpoint: faults})}\nit was renamed to {aside}")

    on_first(rename)
    manager.reload()


def _unused(checkpoint: epath.Path) -> epath.Path:
    """A name that Orbax does not take for a checkpoint, and that is free."""
    name, count = f"{checkpoint.name}.damaged", 1
    while (checkpoint.parent / name).exists():
        count += 1
        name = f"{checkpoint.name}.damaged-{count}"
    return checkpoint.parent / name


def _account(damaged: dict[epath.Path, list[str]]) -> str:
    lines = []
    for checkpoint, faults in damaged.items():
        lines.append(f"checkpoint {checkpoint} is damaged:")
        lines += [f"  {fault}" for fault in faults[:_SHOWN]]
        lines += [f"  and {len(faults) - _SHOWN} more"] * (len(faults) > _SHOWN)
    return "\n".join(lines)
