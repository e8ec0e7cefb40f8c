"""Which keys of a config make two runs comparable: their precision may differ, what they learn from may not."""

import ast
import re
from collections.abc import Mapping, Sequence

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.recipe import fingerprint, load_recipe, show
from maxtext_nvfp4.runs.keys import ELSEWHERE, PRECISION, matches
from maxtext_nvfp4.runs.records import Record

SEEDS = ("data_shuffle_seed", "init_weights_seed")

_SHOWN = 12


def differences(base: Record, other: Record) -> dict[str, tuple[str, str]]:
    """The keys besides precision that two runs do not share, with the value of each."""
    keys = sorted({*base.settings, *other.settings})
    return {
        key: values
        for key in keys
        if len(set(values := (base.settings.get(key, "absent"), other.settings.get(key, "absent")))) > 1
        and not matches(key, (*PRECISION, *ELSEWHERE))
    }


def check_alike(base: Record, other: Record, allowed: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Refuses two runs whose losses differ for another reason than precision.

    Args:
      base: A run.
      other: Another one, of the same seeds.
      allowed: Glob patterns of keys that may differ nevertheless.

    Returns:
      The keys that differ and were allowed to.

    Raises:
      ConfigError: Others do; names them with their values.
    """
    found = differences(base, other)
    refused = {key: values for key, values in found.items() if not matches(key, allowed)}
    if refused:
        lines = [f"  {key}: {mine} and {theirs}" for key, (mine, theirs) in list(refused.items())[:_SHOWN]]
        lines += [f"  and {len(refused) - _SHOWN} more"] * (len(refused) > _SHOWN)
        keys = ",".join(list(refused)[:_SHOWN])
        raise ConfigError(
            f"{base.source} and {other.source} differ in more than precision:\n" + "\n".join(lines) + "\n"
            "their losses would not say what the precision does; train one of them again with the keys of the other, or "
            f"write --allow {keys}"
        )
    return found


def seed(record: Record) -> str:
    """The seeds of a run; runs of one recipe that share them are copies of each other."""
    return "/".join(record.settings.get(key, "absent") for key in SEEDS)


def precision_key(record: Record) -> str:
    """Equal for runs of the same precision, whatever their seeds."""
    keys = {
        key: value for key, value in record.settings.items() if matches(key, PRECISION) and key != "nvfp4"
    }
    if _quantization(record) == "nvfp4":
        section = _section(record)
        try:
            numerics = load_recipe(section).numerics
        except ConfigError:  # of another version, or from a file that is no longer there
            numerics = dict(section)
        keys["nvfp4"] = fingerprint({key: value for key, value in numerics.items() if key != "seed"})
    return repr(sorted(keys.items()))


def describe_precision(record: Record) -> str:
    """A few words: `bfloat16`, `fp8_full (qwix)`, `nvfp4 paper`, `nvfp4 paper, hadamard: none`."""
    quantization = _quantization(record)
    if quantization == "nvfp4":
        section = _section(record)
        name = str(section.get("recipe", "paper"))
        return ", ".join((f"nvfp4 {name}", *_changes(section)))
    if not quantization:
        return record.settings.get("dtype", "unknown")
    return (
        f"{quantization} (qwix)" if record.settings.get("use_qwix_quantization") == "True" else quantization
    )


def label(record: Record) -> str:
    """What a run is called in a comparison: its run_name without the number of its seed."""
    return re.sub(r"-seed[0-9]+$", "", record.name)


def _changes(section: Mapping[str, object]) -> list[str]:
    """The keys of a section that determine bits and are not what its preset has."""
    try:
        given, preset = load_recipe(section), load_recipe({"recipe": section.get("recipe", "paper")})
    except ConfigError:
        return []
    return [
        f"{key}: {show(value)}"
        for key, value in given.numerics.items()
        if key != "seed" and preset.numerics.get(key) != value
    ]


def _quantization(record: Record) -> str:
    """As it is written in a YAML file; MaxText logs the name of its enumeration's member."""
    name = record.settings.get("quantization", "").removeprefix("QuantizationType.").lower()
    return "" if name == "none" else name


def _section(record: Record) -> Mapping[str, object]:
    section = ast.literal_eval(record.settings.get("nvfp4") or "{}")
    assert isinstance(section, dict)
    return section
