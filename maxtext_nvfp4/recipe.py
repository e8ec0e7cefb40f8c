"""The `nvfp4:` section of a MaxText YAML: its keys, defaults and checks, YAML in and out.

A named preset is a complete YAML file in `recipes/`, and so holds the default of every key that changes
numbers. The section's keys replace the preset's, except that its rules go before the preset's rules, since
the first match wins. What cannot be honoured is a `ConfigError` that names each key, what was given, why
it cannot be, and what to write instead.
"""

import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import yaml  # type: ignore[import-untyped]
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.plan import GEMMS, STATS

RECIPES = Path(__file__).parent / "recipes"
PRESETS: tuple[str, ...] = tuple(sorted(path.stem for path in RECIPES.glob("*.yml")))
"""Names that the key `recipe` accepts besides paths."""


def show(value: object) -> str:
    """A value as it would be written on one line of YAML; text that looks like a number is quoted."""
    try:
        text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"))
    except yaml.representer.RepresenterError:
        return repr(value)
    return text.removesuffix("...\n").strip()


def problem(key: str, value: object, why: str, write: str) -> str:
    """One line of a `ConfigError`: the key, what was given, why it cannot be, what to write instead."""
    return f"{key}: got {show(value)}: {why}; write {write}"


def _refused(why: str, write: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{why}; write {write}", {"why": why, "write": write})


def _number(value: object, example: str) -> int | float:
    """`value` itself if it is a number; text is refused even if it spells one, as are booleans."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", value):
        raise _refused("text, not a number", f"{float(value):.15g} without quotes")
    raise _refused("not a number", example)


def _layer_count(value: object) -> int | float:
    count = _number(value, "a number of layers such as 4, or a fraction of them such as 0.15")
    if isinstance(count, int):
        if count < 0:
            raise _refused("a number of layers cannot be negative", "0 or more")
    elif not 0 < count < 1:
        raise _refused(
            "a fraction of the layers lies between 0 and 1, and a number of layers has no decimal point",
            f"{count:.0f}" if count >= 0 and count.is_integer() else "a fraction such as 0.15, or an integer",
        )
    return count


def _seed(value: object) -> int:
    seed = _number(value, "an integer such as 0")
    if not (isinstance(seed, int) and 0 <= seed < 2**32):
        raise _refused("not an unsigned 32-bit integer", f"an integer from 0 to {2**32 - 1}")
    return seed


def _power_of_two(value: object, info: ValidationInfo) -> float:
    example = LossScale.model_fields[str(info.field_name)].default
    number = _number(value, f"a power of two such as {example}")
    if not (0 < number < math.inf and _is_power_of_two(number)):
        near = example
        if 0 < number < math.inf:
            largest = round(math.log2(LARGEST_SCALE))
            exponent = max(-largest, min(largest, round(math.log2(number))))
            near = 2**exponent if exponent >= 0 else 2.0**exponent
        why = "not a power of two, and only those leave every 4-bit code unchanged"
        raise _refused(why, f"a power of two such as {near}")
    return number


def _is_power_of_two(number: int | float) -> bool:
    return number.bit_count() == 1 if isinstance(number, int) else math.frexp(number)[0] == 0.5


def _positive_count(value: object) -> int:
    count = _number(value, "a number of steps such as 20")
    if not isinstance(count, int) or count < 1:
        raise _refused("not a number of steps", "an integer of 1 or more")
    if count > _MOST_STEPS:
        raise _refused("more steps than are counted", f"an integer from 1 to {_MOST_STEPS}")
    return count


def _switch_point(value: object) -> int | float | str:
    if value == "lr_decay":
        return "lr_decay"
    point = _number(value, "a fraction of the steps such as 0.82, a step such as 820, or lr_decay")
    if isinstance(point, int):
        if point < 1:
            raise _refused("no step would come before the switch", "1 or more, or a fraction such as 0.82")
    elif not 0 < point < 1:
        raise _refused(
            "a fraction of the steps lies between 0 and 1, and a step has no decimal point",
            f"{point:.0f}" if point >= 1 and point.is_integer() else "a fraction such as 0.82, or an integer",
        )
    return point


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise _refused("not a switch", "true or false")
    return value


def _off(value: object) -> object:
    """YAML reads a bare `off` as a boolean."""
    return "off" if value is False else value


def _stats(value: object) -> tuple[str, ...]:
    if value == "all":
        return STATS
    if not isinstance(value, list | tuple) or not value:
        raise _refused("not a list of statistics", f"all, or a list such as [{', '.join(STATS[:2])}]")
    for name in value:
        if name not in STATS:
            raise _refused(f"{show(name)} is no statistic", _nearest(name, STATS) or ", ".join(STATS))
    return tuple(dict.fromkeys(map(str, value)))


def _pattern(value: object) -> str:
    if not (isinstance(value, str) and value):
        raise _refused("not a pattern", "a glob pattern such as mlp/* or self_attention/query")
    return value


def _layer_range(value: object) -> tuple[int, int]:
    if isinstance(value, int) and not isinstance(value, bool):
        first = last = value
    elif isinstance(value, str) and (match := re.fullmatch(r"(-?\d+)\.\.(-?\d+)", value)):
        first, last = int(match[1]), int(match[2])
    else:
        ends = re.findall(r"\d+", str(value).removesuffix(".0"))[:2] or ["0", "3"]
        raise _refused("not a layer or a range of layers", "..".join(sorted(ends, key=int)))
    if min(first, last) < 0:
        raise _refused("layers are counted from 0 at the input", "a layer such as 0, or a range such as 0..3")
    if first > last:
        raise _refused("the range runs backwards", f"{last}..{first}")
    return first, last


def _layer_text(layers: tuple[int, int]) -> int | str:
    first, last = layers
    return first if first == last else f"{first}..{last}"


LARGEST_SCALE = 2.0**100

_MOST_STEPS = 2**31 - 1
"""Steps are counted in int32."""

PowerOfTwo = Annotated[float, PlainValidator(_power_of_two)]
Steps = Annotated[int, PlainValidator(_positive_count)]
SwitchPoint = Annotated[int | float | str, PlainValidator(_switch_point)]
LayerCount = Annotated[int | float, PlainValidator(_layer_count)]
LayerRange = Annotated[tuple[int, int], PlainValidator(_layer_range), PlainSerializer(_layer_text)]
RulePrecision = Literal["nvfp4", "bf16"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Rule(_Section):
    """A choice of precision for some modules in some layers, by GEMM.

    A GEMM that the rule does not name is left to later rules and to the recipe's choice of layers.
    """

    module: Annotated[str, PlainValidator(_pattern)] = Field(
        description="Shell-style glob for the module's path, or for a tail of it that starts at a slash.",
        json_schema_extra={"values": "a glob pattern such as mlp/*"},
    )
    layers: LayerRange | None = Field(
        default=None,
        description="Decoder layers the rule covers, both ends included, counted from 0; all if absent.",
        json_schema_extra={"values": "a layer such as 5, or a range such as 0..3"},
    )
    fprop: RulePrecision | None = Field(
        default=None, description="Precision of y = x w; nvfp4 means the 4-bit `format`."
    )
    dgrad: RulePrecision | None = Field(default=None, description="Precision of dx = dy w^T.")
    wgrad: RulePrecision | None = Field(default=None, description="Precision of dw = x^T dy.")

    @model_validator(mode="after")
    def _names_a_gemm(self) -> Self:
        if not any(getattr(self, gemm) for gemm in GEMMS):
            raise _refused("names no GEMM", "one or more of fprop, dgrad and wgrad, such as fprop: bf16")
        return self


class Switch(_Section):
    """A step of the run from which GEMMs of the 4-bit layers are in high precision, to the end.

    Source: arXiv 2509.25149, which switches shortly before the learning rate decays.
    """

    at: SwitchPoint = Field(
        description="First step in high precision: a fraction of `steps`, a step counted from 0, or the first "
        "step of the learning rate's decay.",
        json_schema_extra={"values": "a fraction such as 0.82, an integer >= 1, or lr_decay"},
    )
    gemms: Literal["fprop", "all"] = Field(
        default="fprop", description="Which GEMMs of the 4-bit layers: the forward ones, or all three."
    )
    to: Literal["bf16"] = Field(default="bf16", description="Their precision: MaxText's compute dtype.")


class LossScale(_Section):
    """Loss scaling, against overflow and underflow of BF16 gradients.

    Steps whose loss or gradients are not finite are skipped in the modes dynamic and static.
    """

    mode: Annotated[Literal["dynamic", "static", "off"], BeforeValidator(_off)] = Field(
        default="dynamic",
        description="dynamic adapts the scale, static keeps it at `init`; off neither scales nor skips steps.",
    )
    init: PowerOfTwo = Field(
        default=32768, description="Scale of the first step.", json_schema_extra={"values": "a power of two"}
    )
    growth_interval: Steps = Field(
        default=2000,
        description="Finite steps in a row after which the scale grows.",
        json_schema_extra={"values": "an integer >= 1"},
    )
    growth: PowerOfTwo = Field(
        default=2, description="Factor by which it grows.", json_schema_extra={"values": "a power of two > 1"}
    )
    backoff: PowerOfTwo = Field(
        default=0.5,
        description="Factor by which it shrinks after a step that is not finite.",
        json_schema_extra={"values": "a power of two < 1"},
    )
    max: PowerOfTwo = Field(
        default=16777216, description="Largest scale.", json_schema_extra={"values": "a power of two"}
    )
    max_consecutive_skips: Steps = Field(
        default=20,
        description="Skipped steps in a row after which the run stops, with a checkpoint.",
        json_schema_extra={"values": "an integer >= 1"},
    )

    @field_validator("growth", "backoff")
    @classmethod
    def _direction(cls, value: float, info: ValidationInfo) -> float:
        grows = info.field_name == "growth"
        if (value <= 1) if grows else (value >= 1):
            why = "the scale would not grow" if grows else "the scale would not shrink"
            raise _refused(why, "2, or a larger power of two" if grows else "0.5, or a smaller power of two")
        return value

    @field_validator("init", "max")
    @classmethod
    def _in_range(cls, value: float) -> float:
        if not 1 <= value <= LARGEST_SCALE:
            why = "below 1 gradients would only underflow, and near float32's limit of 2**128 they overflow"
            raise _refused(why, "a power of two from 1 to 2**100, such as 32768")
        return value

    @model_validator(mode="after")
    def _starts_below_its_maximum(self) -> Self:
        if self.mode == "dynamic" and self.init > self.max:
            raise _refused("init is above max", f"a max of {show(self.init)} or more")
        return self


class Telemetry(_Section):
    """Statistics of what quantization does to each 4-bit GEMM, on sampled steps."""

    every: Steps = Field(
        default=100,
        description="Steps from one sample to the next; the last of them is sampled.",
        json_schema_extra={"values": "an integer >= 1"},
    )
    stats: Annotated[tuple[str, ...], PlainValidator(_stats)] = Field(
        default=STATS,
        description="Statistics that are written; all if absent.",
        json_schema_extra={"values": f"a list of {', '.join(STATS)}"},
    )
    layers: LayerRange | None = Field(
        default=None,
        description="Decoder layers whose statistics are written; all if absent.",
        json_schema_extra={"values": "a layer such as 5, a range such as 0..3, or all"},
    )

    @field_validator("layers", mode="before")
    @classmethod
    def _all_layers(cls, value: object) -> object:
        return None if value == "all" else value

    def covers(self, layer: int) -> bool:
        """Whether the statistics of a decoder layer are written."""
        return self.layers is None or self.layers[0] <= layer <= self.layers[1]


class Recipe(_Section):
    """A complete recipe: what is quantized, how, and by which backend.

    Built by `load_recipe`. Keys without a default here must stand in every preset, so that each default
    has one home.
    """

    recipe: str = Field(
        default="paper",
        description="Preset to start from, or a recipe file of one's own; the other keys override it.",
        json_schema_extra={"values": f"{', '.join(PRESETS)}, or the path of a YAML file"},
    )
    backend: Literal["auto", "transformer_engine", "emulated", "xla"] = Field(
        default="auto",
        description="What computes the GEMMs; auto takes Transformer Engine on a GPU that has NVFP4, else emulated.",
    )
    on_unsupported: Literal["error", "bf16", "no_hadamard"] = Field(
        default="error",
        description="What becomes of a 4-bit GEMM that the backend cannot run at its shape: an error, BF16, or "
        "wgrad without the Hadamard transform where that helps.",
    )
    bf16_first_layers: LayerCount = Field(
        description="Decoder layers kept in BF16 at the input; a fraction is rounded up to whole layers.",
        json_schema_extra={"values": "an integer >= 0, or a fraction such as 0.15"},
    )
    bf16_last_layers: LayerCount = Field(
        description="Decoder layers kept in BF16 at the output; a fraction is rounded up to whole layers.",
        json_schema_extra={"values": "an integer >= 0, or a fraction such as 0.15"},
    )
    rules: tuple[Rule, ...] = Field(
        description="Exceptions by module, layer and GEMM; the first match wins, before the layer counts. "
        "They go before the preset's own rules.",
        json_schema_extra={"values": "a list of rules such as [{module: mlp/*, layers: 0..3, fprop: bf16}]"},
    )
    weight_scaling: Literal["2d", "1d"] = Field(
        description="Weight blocks that share a scale: 16x16, the same codes forward and backward, or 1x16."
    )
    hadamard: Literal["wgrad", "all", "none"] = Field(
        description="Random Hadamard transform of both operands: of wgrad, or of all three GEMMs, an ablation that "
        "converges worse (not with Transformer Engine)."
    )
    stochastic_rounding: Literal["gradients", "gradients_and_activations", "none"] = Field(
        description="Round output gradients stochastically, in dgrad and wgrad; activations too is an ablation that "
        "converges worse (not with Transformer Engine)."
    )
    format: Literal["nvfp4", "mxfp4"] = Field(
        description="4-bit format: E2M1 with E4M3 scales of 16 and a tensor scale, or with E8M0 scales of 32 "
        "(emulated backend only)."
    )
    switch: Switch | None = Field(
        default=None,
        description="Late in the run, forward or all GEMMs of the 4-bit layers go on in high precision.",
        json_schema_extra={"values": "a mapping such as {at: 0.82, gemms: fprop}"},
    )
    seed: Annotated[int, PlainValidator(_seed)] = Field(
        default=0,
        description="Seed of stochastic rounding.",
        json_schema_extra={"values": "an integer from 0 to 2**32 - 1"},
    )

    loss_scale: LossScale = Field(
        default=LossScale(),
        description="Loss scaling by powers of two, and what happens at a step that is not finite.",
        json_schema_extra={"values": "a mapping such as {mode: static, init: 1024}"},
    )

    telemetry: Telemetry | None = Field(
        default=None,
        description="Statistics of each 4-bit GEMM's operands and product, on sampled steps.",
        json_schema_extra={"values": "a mapping such as {every: 100}"},
    )

    allow_recipe_change: Annotated[bool, PlainValidator(_boolean)] = Field(
        default=False,
        description="Go on from a checkpoint that was trained with another recipe; the change is recorded.",
        json_schema_extra={"values": "true or false"},
    )

    @field_validator("format")
    @classmethod
    def _backend_has_format(cls, value: str, info: ValidationInfo) -> str:
        backend = info.data.get("backend")
        if value == "mxfp4" and backend in ("xla", "transformer_engine"):
            raise _refused(f"backend {backend} has no MXFP4", "backend: emulated, or format: nvfp4")
        return value

    @property
    def numerics(self) -> dict[str, Any]:
        """Every field that determines bits, as JSON-ready values.

        The recipe's name, the backend, the loss scale and telemetry do not.
        """
        other = {"recipe", "backend", "loss_scale", "telemetry", "allow_recipe_change"}
        return self.model_dump(mode="json", exclude=other, exclude_none=True)

    @property
    def fingerprint(self) -> str:
        """`fingerprint` of `numerics`: equal fingerprints mean the same numbers were asked for."""
        return fingerprint(self.numerics)

    def to_yaml(self) -> str:
        """The recipe as the text of a recipe file, which `load_recipe` reads back as the same recipe."""
        fields = self.model_dump(exclude={"recipe", "allow_recipe_change"}, exclude_none=True)
        body: str = yaml.safe_dump(fields, sort_keys=False)
        return f"# Resolved from recipe {self.recipe}, fingerprint {self.fingerprint}\n{body}"

    @property
    def preset(self) -> "Recipe | None":
        """The named preset that this recipe starts from; None if it starts from a file of the user's own.

        Where the two differ, and for the rules that go before the preset's, the user asked for it.
        """
        return load_recipe({"recipe": self.recipe}) if self.recipe in PRESETS else None


def fingerprint(numerics: Mapping[str, object]) -> str:
    """First 12 hexadecimal digits of a SHA-256 over the fields of a recipe that determine bits."""
    return hashlib.sha256(json.dumps(numerics, sort_keys=True).encode()).hexdigest()[:12]


def load_recipe(section: Mapping[str, object] | None) -> Recipe:
    """Reads the preset that `section` names and puts the section's keys over it, rules before its rules.

    Args:
      section: The mapping under `nvfp4:`, None if it is absent or empty. A path in its key `recipe` is
        relative to the working directory.

    Returns:
      The complete, checked recipe.

    Raises:
      ConfigError: With one line for each key that cannot be honoured.
    """
    section = {} if section is None else section
    if not isinstance(section, Mapping):
        raise ConfigError(problem("nvfp4", section, "not a mapping of keys", "nvfp4: {recipe: paper}"))
    name = section.get("recipe", Recipe.model_fields["recipe"].default)
    base = read_recipe_file(_recipe_path(name))
    keys = {**base, **section, "recipe": name}
    for key, value in section.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            keys[key] = {**base[key], **value}
    if isinstance(keys["rules"], list | tuple) and "rules" in section:
        keys["rules"] = [*keys["rules"], *base["rules"]]
    return _validated(keys, "nvfp4.")


def _recipe_path(name: object) -> Path:
    if isinstance(name, str):
        if name in PRESETS:
            return RECIPES / f"{name}.yml"
        if "/" in name or name.endswith((".yml", ".yaml")):
            return Path(name)
    why = f"not a preset ({', '.join(PRESETS)}) and not a path with / or .yml"
    raise ConfigError(problem("nvfp4.recipe", name, why, _nearest(name, PRESETS) or "paper"))


def read_recipe_file(path: Path) -> dict[str, Any]:
    """The keys of a recipe file, which must be a complete and valid recipe by itself.

    Raises:
      ConfigError: The file cannot be read, or is none.
    """
    try:
        keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why, write = f"the file cannot be read ({error})", f"another path, or one of {', '.join(PRESETS)}"
        raise ConfigError(problem("nvfp4.recipe", str(path), why, write)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}" if mark else str(error)
        why, write = f"not valid YAML ({where})", "keys such as hadamard: wgrad, one on each line"
        raise ConfigError(problem("nvfp4.recipe", str(path), why, write)) from None
    if not isinstance(keys, dict):
        raise ConfigError(problem(str(path), keys, "not a mapping of keys", "keys such as hadamard: wgrad"))
    if "recipe" in keys:
        why = "a recipe file is complete and starts from no other"
        raise ConfigError(problem(f"{path}: recipe", keys["recipe"], why, "the other keys without this one"))
    _validated(keys, f"{path}: ")
    return keys


def _validated(keys: Mapping[str, object], where: str) -> Recipe:
    try:
        return Recipe.model_validate(keys)
    except ValidationError as error:
        raise config_error(error, where) from None


def config_error(error: ValidationError, where: str = "nvfp4.") -> ConfigError:
    """The short form of pydantic's complaint about a recipe: one `problem` line for each fault.

    Args:
      error: Raised while validating a `Recipe`.
      where: Goes before each key. Rules count from 1 in keys, as in every message: `nvfp4.rules.2.fprop`.
    """
    return ConfigError("\n".join(_line(detail, where) for detail in error.errors(include_url=False)))


def _line(detail: ErrorDetails, where: str) -> str:
    kind, value = detail["type"], detail["input"]
    *parents, last = detail["loc"]
    if kind in ("extra_forbidden", "invalid_key"):
        last, names = str(last), list(_place(parents)[0].model_fields)
        why, write = "no such key", _nearest(last, names) or f"one of {', '.join(names)}"
    else:
        why, write = _why_and_write(detail)
    key = ".".join(str(part + 1) if isinstance(part, int) else part for part in (*parents, last))
    return problem(where + key, "nothing" if kind == "missing" else value, why, write)


def _why_and_write(detail: ErrorDetails) -> tuple[str, str]:
    field = _place(detail["loc"])[1]
    assert field is not None
    values, choices = _values(field), _choices(field.annotation)
    match detail["type"]:
        case "refused":
            return detail["ctx"]["why"], detail["ctx"]["write"]
        case "literal_error" if isinstance(detail["input"], bool) and "none" in choices:
            return "not a switch", choices[0] if detail["input"] else "none"
        case "literal_error":
            return "no such choice", _nearest(detail["input"], choices) or values
        case "missing":
            return "the key is required", values
        case "tuple_type":
            return "not a list", values
        case "model_type":
            return "not a mapping of keys", values
        case _:
            return detail["msg"], values


def _place(loc: Iterable[int | str]) -> tuple[type[BaseModel], FieldInfo | None]:
    """The model that `loc` points into and the last field on the way, None at the top."""
    model: type[BaseModel] = Recipe
    field = None
    for part in loc:
        if isinstance(part, str):
            field = model.model_fields[part]
            model = _nested(field.annotation) or model
    return model, field


def _nested(annotation: object) -> type[BaseModel] | None:
    """The model inside an annotation such as `tuple[Rule, ...]`, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _nested(part))), None)


def _choices(annotation: object) -> tuple[str, ...]:
    """The values inside an annotation such as `Literal["2d", "1d"] | None`."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for part in get_args(annotation) for choice in _choices(part))


def _values(field: FieldInfo) -> str:
    """What a field accepts, in words."""
    if isinstance(field.json_schema_extra, dict):
        return str(field.json_schema_extra["values"])
    return " or ".join(_choices(field.annotation))


def _nearest(word: object, names: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(str(word).lower(), list(names), n=1)), None)


def flag_rows() -> list[tuple[str, str, str, str]]:
    """The keys of the section as (key, values, default, description), in the schema's order."""
    paper = load_recipe(None)
    rows = []
    for key, field in Recipe.model_fields.items():
        value = getattr(paper, key)
        default = "see below" if isinstance(value, BaseModel) else "absent" if value is None else show(value)
        rows.append((key, _values(field), default, str(field.description)))
        if item := _nested(field.annotation):
            several = get_origin(field.annotation) is tuple
            for name, part in item.model_fields.items():
                default = "required" if part.is_required() else "absent" if several else show(part.default)
                dot = "[]." if several else "."
                rows.append((f"{key}{dot}{name}", _values(part), default, str(part.description)))
    return rows
