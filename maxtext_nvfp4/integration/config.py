"""MaxText's configuration with the nvfp4 mode in it."""

import contextlib
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import omegaconf
import pydantic
from maxtext.configs import pyconfig, types

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.recipe import Recipe, load_recipe

MODE = "nvfp4"

_EXCLUSIVE = {
    "use_qwix_quantization": False,
    "use_manual_quantization": False,
    "quant_cfg_path": "",
    "te_gmm_quantization": None,
    "quantize_kvcache": False,
    "quantize_mtp": False,
    "quantize_logits_proj": False,
}
"""Options of MaxText's other quantization modes, with the value that leaves them off."""

_UNSUPPORTED = {
    "use_m3_model": (False, "its layers are not the ones this plugin quantizes"),
    "enable_diloco": (False, "its train step keeps another state"),
    "use_batch_split_schedule": (False, "its layers do not use MaxText's linear layers"),
}
"""MaxText features the mode cannot be combined with: the value that leaves them off, and the reason."""


class Nvfp4MaxTextConfig(types.MaxTextConfig):
    """MaxText's config schema, widened by `quantization: nvfp4` and the section `nvfp4:`."""

    quantization: Literal["nvfp4"] | types.QuantizationType | None = pydantic.Field(
        types.QuantizationType.NONE,
        description="Activates quantization for transformer layers; nvfp4 is this plugin's mode.",
    )
    nvfp4: dict[str, Any] = pydantic.Field(
        default_factory=dict, description="The NVFP4 recipe; see maxtext_nvfp4.recipe.Recipe."
    )


def enabled(config: Any) -> bool:
    """Whether a MaxText config asks for the nvfp4 mode."""
    return config.quantization == MODE


def recipe_of(config: Any) -> Recipe:
    """The resolved recipe of a MaxText config in the nvfp4 mode."""
    return load_recipe(config.nvfp4)


def check_keys(raw: Mapping[str, Any]) -> None:
    """Checks the merged YAML and command line before MaxText touches a device.

    Args:
      raw: All top-level keys and their values, without MaxText's model presets.

    Raises:
      ConfigError: An unknown key, a wrong recipe, a section without the mode, or a combination that cannot be.
    """
    for key in raw:
        if key not in Nvfp4MaxTextConfig.model_fields and not _is_nested_key(key):
            near = difflib.get_close_matches(key, Nvfp4MaxTextConfig.model_fields, n=3)
            hint = f"; write {' or '.join(near)}" if near else "; see MaxText's base.yml for the keys"
            raise ConfigError(f"{key}: no such MaxText option{hint}")
    mode = raw.get("quantization")
    section = raw.get("nvfp4")
    if mode != MODE:
        known = [item.value for item in types.QuantizationType] + [MODE]
        if mode and mode not in known:
            near = difflib.get_close_matches(str(mode), known, n=2)
            raise ConfigError(
                f"quantization: got {mode!r}: no such mode; write {' or '.join(near) or MODE} (this plugin's is {MODE})"
            )
        if section:
            raise ConfigError(
                f"nvfp4: the section is given but quantization is {mode or 'empty'!r}, so it would have no effect; "
                "write quantization: nvfp4, or remove the section"
            )
        return
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(
            f"nvfp4: got {section!r}: it is a section of keys; write for example nvfp4: {{recipe: paper}}"
        )
    load_recipe(section)
    for key, off in _EXCLUSIVE.items():
        if raw.get(key, off) not in (off, None, ""):
            raise ConfigError(
                f"{key}: got {raw[key]!r}: it belongs to another quantization mode than quantization: nvfp4; "
                f"write {key}: {off!r}, or choose the other mode"
            )
    for key, (off, why) in _UNSUPPORTED.items():
        if raw.get(key, off) != off:
            raise ConfigError(
                f"{key}: got {raw[key]!r}: quantization: nvfp4 cannot be combined with it: {why}"
            )
    for axis in ("ici_pipeline_parallelism", "dcn_pipeline_parallelism"):
        if raw.get(axis, 1) not in (1, -1):
            raise ConfigError(
                f"{axis}: got {raw[axis]!r}: quantization: nvfp4 does not run under pipeline parallelism; write {axis}: 1 "
                "and use FSDP or tensor parallelism"
            )
    if raw.get("shard_mode") == "explicit":
        raise ConfigError(
            "shard_mode: got 'explicit': quantization: nvfp4 needs compiler sharding; write shard_mode: auto"
        )
    for key in ("dtype", "weight_dtype"):
        if raw.get(key) and raw[key] not in ("bfloat16", "float32"):
            raise ConfigError(
                f"{key}: got {raw[key]!r}: 4-bit values are made from bfloat16 or float32; write {key}: bfloat16 "
                "for activations and weight_dtype: float32 for the master weights"
            )


def load_config(argv: Sequence[str], **overrides: Any) -> pyconfig.HyperParameters:
    """Reads a MaxText config in which the nvfp4 mode is known.

    Args:
      argv: As MaxText's own programs take it: program name, YAML file, then `key=value` arguments.
      **overrides: Values that win over the file.

    Raises:
      ConfigError: Anything wrong in the file or the arguments, MaxText's own complaints included.
    """
    with raising_config_errors():
        check_keys(merged_keys(argv, overrides))
        return pyconfig.initialize(list(argv), config_class=Nvfp4MaxTextConfig, **overrides)


def merged_keys(argv: Sequence[str], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of the YAML file, its base configs and the command line, before MaxText's defaults act."""
    config, arguments = omegaconf.OmegaConf.create(), list(argv[1:])
    if arguments and arguments[0].endswith((".yml", ".yaml")):
        config = pyconfig._load_config(pyconfig.resolve_config_path(arguments.pop(0)))
        config.pop(pyconfig._BASE_CONFIG_ATTR, None)
    command_line = omegaconf.OmegaConf.from_cli(arguments)
    merged = omegaconf.OmegaConf.merge(config, command_line, omegaconf.OmegaConf.create(dict(overrides)))
    container = omegaconf.OmegaConf.to_container(merged, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


@contextlib.contextmanager
def raising_config_errors() -> Iterator[None]:
    """Turns every configuration mistake met inside it into a `ConfigError` of one message.

    MaxText logs such an error between rules, in pydantic's long form, and exits.
    """

    def raise_again(error: Exception) -> None:
        raise error

    handler = pyconfig._handle_config_exception
    pyconfig._handle_config_exception = raise_again
    try:
        yield
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_describe(problem) for problem in error.errors())) from error
    except (ValueError, TypeError, AssertionError, omegaconf.errors.OmegaConfBaseException) as error:
        raise ConfigError(_first_line(str(error)) or type(error).__name__) from error
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}") from error
    finally:
        pyconfig._handle_config_exception = handler


def _describe(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    message = re.sub(r"^(Value|Assertion) error, ", "", problem["msg"])
    if not where:
        return str(message)
    return f"{where}: got {problem['input']!r}: {message}"


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0]


def _is_nested_key(key: str) -> bool:
    """MaxText accepts the keys of its nested sections at top level."""
    return any(
        key in getattr(field.annotation, "model_fields", {})
        for field in types.MaxTextConfig.model_fields.values()
    )
