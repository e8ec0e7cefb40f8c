"""Which recipes trained a run, and from which step on: a JSON file in the run's folder.

A checkpoint of 4-bit training does not say how it was made, and another recipe goes on from it without
complaint. So the file keeps every recipe in full, and a start under another one has to be asked for.
"""

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Self

import pydantic
from etils import epath

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.recipe import Recipe, fingerprint, show

NAME = "nvfp4_history.json"
FORMAT: Final = 1

_PACKAGES = ("maxtext-nvfp4", "maxtext", "jax")


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


class Entry(_Strict):
    """What trained a run from one step on.

    Attributes:
      first_step: The first optimizer step of it, counted from 0.
      fingerprint: Of the recipe; None for stock MaxText.
      recipe: `Recipe.numerics`; None for stock MaxText.
      switch_step: The step of the recipe's late switch, which may be written as a fraction of the run's steps;
        None without one.
      versions: Of this package, MaxText and JAX when the entry was made.
    """

    first_step: int = pydantic.Field(ge=0)
    fingerprint: str | None
    recipe: dict[str, Any] | None
    switch_step: int | None
    versions: dict[str, str]

    @pydantic.model_validator(mode="after")
    def _belong_together(self) -> Self:
        if self.fingerprint != (None if self.recipe is None else fingerprint(self.recipe)):
            raise ValueError(f"fingerprint {self.fingerprint} is not that of the recipe beside it")
        return self

    @property
    def name(self) -> str:
        """The entry in words."""
        return "stock MaxText" if self.recipe is None else f"recipe {self.fingerprint}"


class _File(_Strict):
    format: Literal[1]
    # JSON has no tuples, which strictness would insist on.
    entries: tuple[Entry, ...] = pydantic.Field(strict=False)

    @pydantic.model_validator(mode="after")
    def _in_order(self) -> Self:
        steps = [entry.first_step for entry in self.entries]
        if steps != sorted(set(steps)):
            raise ValueError("the entries are not in the order of their steps")
        return self


class _Format(pydantic.BaseModel):
    format: int


def read(folder: epath.Path) -> tuple[Entry, ...]:
    """The history in a run's folder; empty if there is none.

    Raises:
      ConfigError: The file is damaged, or was written by a newer version of this package.
    """
    path = folder / NAME
    if not path.exists():
        return ()
    try:
        text = path.read_bytes()
        found = _Format.model_validate_json(text).format
        if found > FORMAT:
            raise ConfigError(
                f"{path}: format {found} was written by a newer maxtext-nvfp4 than this one, which knows "
                f"format {FORMAT}; install the newer version"
            )
        return _File.model_validate_json(text).entries
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{path}: the record of this run's recipes is damaged ({where}{': ' * bool(where)}{first['msg']}); "
            f"put it back from a copy, or move it away to go on as from stock MaxText"
        ) from None


def write(folder: epath.Path, entries: Sequence[Entry]) -> None:
    """Replaces the history in a run's folder; a reader sees the old or the new one, never a part."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{NAME}.new"
    temporary.write_text(_File(format=FORMAT, entries=tuple(entries)).model_dump_json(indent=2) + "\n")
    temporary.replace(folder / NAME)


def lasting(entries: Sequence[Entry], step: int) -> tuple[Entry, ...]:
    """What trained a state whose next step is `step`; later entries trained nothing that is left."""
    return tuple(entry for entry in entries if entry.first_step < step)


def check(
    entries: Sequence[Entry], recipe: Recipe, switch_step: int | None, step: int, path: epath.Path
) -> None:
    """Refuses another recipe than the one that trained the state, unless it is allowed.

    An entry from `step` on was allowed at an earlier start, and need not be again. Nothing is asked where stock
    MaxText came before: to quantize a BF16 run is a decision that the mode itself states.

    Args:
      entries: The run's history.
      recipe: The recipe of this start.
      switch_step: The step of its late switch, if it has one.
      step: The first step of this start.
      path: Where the history came from, for the message.

    Raises:
      ConfigError: With the difference, field by field.
    """
    before = lasting(entries, step)
    if not before or recipe.allow_recipe_change:
        return
    was, allowed = before[-1], entries[len(before) :]
    if was.recipe is None or any(_same(entry, recipe, switch_step, step) for entry in (was, *allowed)):
        return
    differences = _differences(was.recipe, recipe.numerics)
    if was.switch_step != switch_step:
        keep = "" if was.switch_step is None else f"; nvfp4.switch.at: {was.switch_step} keeps it"
        differences.append(f"late switch: was at {_at(was.switch_step)}, is at {_at(switch_step)}{keep}")
    prints = (
        f" ({was.fingerprint}, not {recipe.fingerprint})" if was.fingerprint != recipe.fingerprint else ""
    )
    raise ConfigError(
        f"{path}: the checkpoint before step {step} was trained with another recipe{prints}:\n"
        + "\n".join(differences)
        + f"\nwrite the recipe of the run, or another run_name, or nvfp4.allow_recipe_change: true to change "
        f"the recipe at step {step}"
    )


def continued(
    entries: Sequence[Entry], recipe: Recipe, switch_step: int | None, step: int
) -> tuple[Entry, ...]:
    """The history once this recipe, with its late switch at `switch_step`, trains from `step` on."""
    before = lasting(entries, step)
    if step > 0 and not before:
        before = (Entry(first_step=0, fingerprint=None, recipe=None, switch_step=None, versions={}),)
    if before and _same(before[-1], recipe, switch_step, step):
        return (*before[:-1], before[-1].model_copy(update={"switch_step": switch_step}))
    new = Entry(
        first_step=step,
        fingerprint=recipe.fingerprint,
        recipe=recipe.numerics,
        switch_step=switch_step,
        versions={name: importlib.metadata.version(name) for name in _PACKAGES},
    )
    return (*before, new)


def _same(entry: Entry, recipe: Recipe, switch_step: int | None, step: int) -> bool:
    """Whether a recipe goes on before `step` and after it as the entry's did and would.

    A late switch that is a fraction of the steps moves with them. It may, as long as it lies ahead; the same step
    may be written in another way.
    """
    if entry.recipe is None:
        return False
    (was, was_at), (now, now_at) = map(_without_place, (entry.recipe, recipe.numerics))
    if was != now or entry.switch_step == switch_step:
        return was == now
    ahead = all(place is not None and place >= step for place in (entry.switch_step, switch_step))
    return was_at == now_at and ahead


def _without_place(numerics: Mapping[str, Any]) -> tuple[dict[str, Any], object]:
    """The fields without the place of the late switch, and that place as it is written."""
    if "switch" not in numerics:
        return dict(numerics), None
    switch = dict(numerics["switch"])
    place = switch.pop("at")
    return {**numerics, "switch": switch}, place


def _at(step: int | None) -> str:
    return "no step" if step is None else f"step {step}"


def _differences(was: Mapping[str, Any], now: Mapping[str, Any], where: str = "nvfp4.") -> list[str]:
    lines = []
    for key in dict.fromkeys([*was, *now]):
        old, new = was.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += _differences(old, new, f"{where}{key}.")
        elif old != new:
            lines.append(f"{where}{key}: was {_show(old)}, is {_show(new)}")
    return lines


def _show(value: object) -> str:
    return "absent" if value is None else show(value)
