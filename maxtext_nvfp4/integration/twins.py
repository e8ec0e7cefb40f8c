"""The configs of an A/B comparison: one for each recipe and seed, alike in everything but these."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration.config_checks import check_start
from maxtext_nvfp4.integration.config_errors import raising_config_errors
from maxtext_nvfp4.integration.config_files import base_config, chosen_keys, merged_keys
from maxtext_nvfp4.recipe import PRESETS, problem, read_recipe_file

_STOCK: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"quantization": "", "use_qwix_quantization": False},
    "fp8": {"quantization": "fp8_full", "use_qwix_quantization": True},
}
"""MaxText's own precisions: without quantization, and FP8 in forward and backward GEMMs by Qwix."""

_OF_THE_RUN = ("backend", "on_unsupported", "loss_scale", "seed", "telemetry")
"""Keys of the nvfp4 section that all recipes of a comparison share; the others are the recipe's."""


def twins(argv: Sequence[str], recipes: Sequence[str], seeds: int, out: Path) -> list[dict[str, Any]]:
    """The keys of the runs to train, seed by seed, so that a first answer comes early.

    Args:
      argv: Program name, CONFIG.yml, key=value pairs.
      recipes: `bf16`, `fp8`, presets, and paths of recipe files; the first is the baseline.
      seeds: How many; run k adds k to the seeds of data and weights.
      out: Folder of the comparison.

    Raises:
      ConfigError: A recipe is unknown, named twice, or the only one; or one of the runs could not start.
    """
    with raising_config_errors():
        merged = merged_keys(argv, {})
    own = {key: merged[key] for key in sorted(chosen_keys(argv)) if key in merged}
    labels = [_label(recipe) for recipe in recipes]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ConfigError(f"--recipes {','.join(recipes)}: {twice} is named twice; write each recipe once")
    if len(recipes) < 2:
        raise ConfigError(
            f"--recipes {','.join(recipes)}: one recipe; write the baseline and others, such as bf16,paper"
        )
    found = []
    for seed in range(seeds):
        for recipe, label in zip(recipes, labels, strict=True):
            keys = {
                "base_config": base_config(argv),
                **own,
                "steps": merged["steps"],
                **_precision(recipe, merged.get("nvfp4") or {}),
                "base_output_directory": str(out / "runs"),
                "run_name": f"{label}-seed{seed}",
                "data_shuffle_seed": merged["data_shuffle_seed"] + seed,
                "init_weights_seed": merged["init_weights_seed"] + seed,
                "enable_tensorboard": True,
            }
            found.append(keys)
    for keys in found:
        check_start({**merged, **keys})
    return found


def _label(recipe: str) -> str:
    if recipe in _STOCK or recipe in PRESETS:
        return recipe
    path = Path(recipe)
    if path.suffix in (".yml", ".yaml"):
        return path.stem
    choices = ", ".join(dict.fromkeys((*_STOCK, *PRESETS)))
    raise ConfigError(
        problem("--recipes", recipe, f"not one of {choices}, and no path of a recipe file (.yml)", "paper")
    )


def _precision(recipe: str, section: Mapping[str, Any]) -> dict[str, Any]:
    if recipe in _STOCK:
        return {**_STOCK[recipe], "nvfp4": {}}
    shared = {key: section[key] for key in _OF_THE_RUN if key in section}
    if recipe in PRESETS:
        return {"quantization": "nvfp4", "nvfp4": {**shared, "recipe": recipe}}
    # The keys of the file, not its path: a run and its record stay complete if the file is changed or gone.
    return {
        "quantization": "nvfp4",
        "nvfp4": {"recipe": "paper", **read_recipe_file(Path(recipe)), **shared},
    }
