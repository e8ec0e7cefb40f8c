"""MaxText's configuration with the nvfp4 mode in it."""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import pydantic
from maxtext.configs import pyconfig, types

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration.config_checks import MODE, check_keys
from maxtext_nvfp4.integration.config_errors import describe, raising_config_errors
from maxtext_nvfp4.integration.config_files import chosen_keys, merged_keys
from maxtext_nvfp4.recipe import Recipe, load_recipe

REMAT_POLICY = "minimal_with_context_and_quantization"
"""The default of the mode on GPUs: it saves quantized tensors, so that none is quantized twice."""


class Nvfp4MaxTextConfig(types.MaxTextConfig):
    """MaxText's config schema, widened by `quantization: nvfp4` and the section `nvfp4:`."""

    quantization: Literal["nvfp4"] | types.QuantizationType | None = pydantic.Field(
        types.QuantizationType.NONE,
        description="Activates quantization for transformer layers; nvfp4 is this plugin's mode.",
    )
    nvfp4: dict[str, Any] | None = pydantic.Field(
        default_factory=dict, description="The NVFP4 recipe; see maxtext_nvfp4.recipe.Recipe."
    )

    @pydantic.field_validator("base_output_directory")
    @classmethod
    def _absolute(cls, path: str) -> str:
        """Orbax writes below a relative path and then refuses to read from it."""
        return os.path.abspath(path) if path and "://" not in path else path


def enabled(config: Any) -> bool:
    """Whether a MaxText config asks for the nvfp4 mode."""
    return config.quantization == MODE


def recipe_of(config: Any) -> Recipe:
    """The resolved recipe of a MaxText config in the nvfp4 mode."""
    return load_recipe(config.nvfp4)


def load_config(argv: Sequence[str], **overrides: Any) -> pyconfig.HyperParameters:
    """Reads a MaxText config in which the nvfp4 mode is known.

    Args:
      argv: As MaxText's own programs take it: program name, YAML file, then `key=value` arguments.
      **overrides: Values that win over the file.

    Raises:
      ConfigError: Anything wrong in the file or the arguments, MaxText's own complaints included.
    """
    with raising_config_errors():
        given = merged_keys(argv, {})
        raw = {**given, **overrides}
        check_keys(raw)
        for key in overrides.keys() & given.keys():  # an override must not hide a mistake
            _check_type(key, given[key])
        overrides = mode_defaults(raw, chosen_keys(argv) | overrides.keys()) | overrides
        return pyconfig.initialize(list(argv), config_class=Nvfp4MaxTextConfig, **overrides)


def _check_type(key: str, value: object) -> None:
    schema: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(Nvfp4MaxTextConfig.model_fields[key].annotation)
    try:
        schema.validate_python(value)
    except pydantic.ValidationError as error:
        raise ConfigError(describe({**error.errors()[0], "loc": (key,)})) from None


def mode_defaults(raw: Mapping[str, Any], chosen: Collection[str]) -> dict[str, Any]:
    """MaxText's keys whose defaults are others in the nvfp4 mode.

    On GPUs the remat policy saves quantized tensors. Where steps that are not finite are skipped, MaxText does
    not end the run at the first of them.

    Args:
      raw: All keys and their values.
      chosen: The keys that do not come from MaxText's own base configs, whose values hold.

    Returns:
      The keys and their values; nothing where MaxText's defaults hold.
    """
    if raw.get("quantization") != MODE:
        return {}
    recipe = load_recipe(raw.get("nvfp4"))
    defaults: dict[str, Any] = {}
    on_gpu = recipe.backend == "auto" and str(raw.get("hardware")).startswith("gpu")
    if on_gpu or recipe.backend == "transformer_engine":
        defaults["remat_policy"] = REMAT_POLICY
    if recipe.loss_scale.mode != "off":
        defaults |= {"abort_on_nan_loss": False, "abort_on_inf_loss": False}
    return {key: value for key, value in defaults.items() if key not in chosen}
