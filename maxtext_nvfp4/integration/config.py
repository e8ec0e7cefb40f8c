"""MaxText's configuration with the nvfp4 mode in it."""

import contextlib
import difflib
import glob
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import omegaconf
import pydantic
import yaml  # type: ignore[import-untyped]
from maxtext.configs import pyconfig, types
from maxtext.utils.globals import MAXTEXT_ASSETS_ROOT

from maxtext_nvfp4.backends import te_library
from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.recipe import Recipe, load_recipe, problem, show

MODE = "nvfp4"

REMAT_POLICY = "minimal_with_context_and_quantization"
"""The default of the mode on GPUs: it saves quantized tensors, so that none is quantized twice."""

_EXCLUSIVE = {
    "use_qwix_quantization": False,
    "use_manual_quantization": False,
    "quant_cfg_path": "",
    "te_gmm_quantization": "",
    "te_comm_gemm_overlap": "disabled",
    "quantize_kvcache": False,
    "quantize_mtp": False,
    "quantize_logits_proj": False,
}
"""Options of MaxText's other quantization modes, with the value that leaves them off."""

_UNSUPPORTED = {
    "use_m3_model": (False, "its layers are not the ones this plugin quantizes"),
    "enable_diloco": (False, "its train step keeps another state"),
    "use_batch_split_schedule": (False, "its layers do not use MaxText's linear layers"),
    "shard_mode": ("auto", "it needs compiler sharding"),
}
"""MaxText features the mode cannot be combined with: the value that leaves them off, and the reason."""

_POSITIVE = (
    "base_emb_dim",
    "base_mlp_dim",
    "base_num_query_heads",
    "base_num_kv_heads",
    "base_num_decoder_layers",
    "head_dim",
    "vocab_size",
    "max_target_length",
    "per_device_batch_size",
)
"""Sizes that MaxText does not check before it divides by them."""

_CHOICES = {
    "attention": (
        "autoselected",
        "dot_product",
        "flash",
        "cudnn_flash_te",
        "cudnn_flash_jax",
        "paged",
        "vllm_rpa",
        "vllm_batched_rpa",
    ),
    "remat_policy": (
        *(policy.value for policy in types.RematPolicy),
        "minimal_flash",
        "minimal_with_context",
        "minimal_with_context_and_quantization",
        "minimal_with_quantization",
    ),
}
"""Choices that MaxText types as any text, and looks up when it builds the model."""

_ACTIVATIONS = ("linear", "sqrtsoftplus")
"""MaxText's own activation functions; the others are attributes of `jax.nn`."""

_CPU_ATTENTION = ("autoselected", "dot_product")

_CPU_JOB = ("JOB_INDEX", "JOB_COMPLETION_INDEX", "PROCESSES_IN_JOB", "JAX_PROCESS_COUNT")
"""Environment variables without which MaxText cannot start a distributed job on CPUs."""

_CONFIGS = Path(types.__file__).parent
_PACKAGE = Path(__file__).parents[1]


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


def check_keys(raw: Mapping[str, Any]) -> None:
    """Checks the merged YAML and command line before MaxText touches a device.

    Args:
      raw: All top-level keys and their values, without MaxText's model presets.

    Raises:
      ConfigError: An unknown key, an impossible value, a wrong recipe, a section without the mode, or a
        combination that cannot be.
    """
    for key, value in raw.items():
        if key not in Nvfp4MaxTextConfig.model_fields and not _is_nested_key(key):
            raise ConfigError(problem(key, value, "no such MaxText option", _nearest_option(key)))
    _check_values(raw)
    mode, section = raw.get("quantization"), raw.get("nvfp4")
    if isinstance(mode, str) and mode.lower() == "none":  # as MaxText reads it
        mode = None
    if mode != MODE:
        known = [item.value for item in types.QuantizationType if item.value] + [MODE]
        if mode and mode not in known:
            why, write = "no such mode", _nearest(mode, known) or MODE
            raise ConfigError(problem("quantization", mode, why, write))
        if section:
            why = f"quantization is {mode or 'not set'}, so the section would have no effect"
            raise ConfigError(problem("nvfp4", section, why, "quantization: nvfp4, or no nvfp4 section"))
        return
    load_recipe(section)
    for key, off in _EXCLUSIVE.items():
        if raw.get(key, off) not in (off, None, ""):
            why = "it belongs to another quantization mode than quantization: nvfp4"
            write = f"{key}: {show(off)}, or choose the other mode"
            raise ConfigError(problem(key, raw[key], why, write))
    for key, (unused, reason) in _UNSUPPORTED.items():
        if raw.get(key, unused) not in (unused, None):
            why = f"quantization: nvfp4 cannot be combined with it: {reason}"
            raise ConfigError(problem(key, raw[key], why, f"{key}: {show(unused)}"))
    for key in ("ici_pipeline_parallelism", "dcn_pipeline_parallelism"):
        if raw.get(key, 1) not in (1, -1):
            why = "quantization: nvfp4 does not run under pipeline parallelism"
            raise ConfigError(problem(key, raw[key], why, f"{key}: 1, and use FSDP or tensor parallelism"))
    for key, write in (("dtype", "bfloat16"), ("weight_dtype", "float32, for the master weights")):
        if raw.get(key) and raw[key] not in ("bfloat16", "float32"):
            why = "4-bit values are made from bfloat16 or float32"
            raise ConfigError(problem(key, raw[key], why, f"{key}: {write}"))


def _check_values(raw: Mapping[str, Any]) -> None:
    """Refuses values that MaxText takes and then trips over in the middle of a start."""
    for key in _POSITIVE:
        if isinstance(value := raw.get(key), int | float) and value <= 0:
            raise ConfigError(problem(key, value, "it must be positive", "a number above 0"))
    if raw.get("steps") == 0:
        write = "1 or more, or -1 to follow learning_rate_schedule_steps"
        raise ConfigError(problem("steps", 0, "there would be nothing to train", write))
    for key, choices in _CHOICES.items():
        value = raw.get(key)
        if isinstance(value, str) and value.lower() not in ("", "none", *choices):
            write = _nearest(value, choices) or " or ".join(choices)
            raise ConfigError(problem(key, value, "no such choice", write))
    activations = raw.get("mlp_activations")
    for name in activations if isinstance(activations, list) else ():
        if name not in _ACTIVATIONS and not hasattr(jax.nn, str(name)):
            write = _nearest(name, (*_ACTIVATIONS, *dir(jax.nn))) or "silu"
            raise ConfigError(problem("mlp_activations", name, "no such function in jax.nn", write))
    for network in ("ici", "dcn"):
        axes = [key for key in raw if re.fullmatch(rf"{network}_\w+_parallelism", key) and raw[key] == -1]
        if len(axes) > 1:
            why = "only one axis can take what the others leave"
            raise ConfigError(problem(" and ".join(axes), -1, why, "a number for all but one of them"))


def check_run(argv: Sequence[str]) -> None:
    """Checks a config and what a run of it needs from the machine that it starts on.

    Args:
      argv: As for `load_config`.

    Raises:
      ConfigError: As `check_keys`; or a path that does not exist, a library that is not installed, or a
        distributed job without an environment for one.
    """
    with raising_config_errors():
        raw = merged_keys(argv, {})
    check_keys(raw)
    for key, path in _needed_paths(raw):
        if "://" not in path and not glob.glob(os.path.expanduser(path)):
            raise ConfigError(problem(key, raw[key], f"{path} does not exist", f"{key}: a path that exists"))
    if raw.get("hardware") == "cpu" and raw.get("attention", "autoselected") not in _CPU_ATTENTION:
        why, write = "it has no kernel for CPUs", "attention: dot_product"
        raise ConfigError(problem("attention", raw["attention"], why, write))
    for key, write in (("attention", "dot_product"), ("quantization", "nvfp4")):
        value = str(raw.get(key))
        if value.startswith(("te_", "cudnn_flash_te")) and (absent := te_library.missing()):
            write = f"{key}: {write}, or install Transformer Engine"
            raise ConfigError(problem(key, value, absent, write))
    alone = raw.get("skip_jax_distributed_system") or raw.get("enable_single_controller")
    missing = [name for name in _CPU_JOB if name not in os.environ]
    if raw.get("hardware") == "cpu" and not alone and missing and not jax.distributed.is_initialized():
        why = f"hardware: cpu joins a distributed job, but the environment has no {', '.join(missing)}"
        write = "skip_jax_distributed_system: true, to run in one process"
        raise ConfigError(problem("skip_jax_distributed_system", False, why, write))


def _needed_paths(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Paths and patterns that must lead to something, with the key that names them."""
    for key in ("load_parameters_path", "load_full_state_path"):
        if raw.get(key):
            yield key, str(raw[key])
    data = raw.get("dataset_type")
    if data == "tfds" and raw.get("dataset_path"):
        yield "dataset_path", str(raw["dataset_path"])
        name = str(raw.get("dataset_name")).replace(":", "/")
        yield "dataset_name", os.path.join(str(raw["dataset_path"]), name)
    if data == "grain":
        for pattern in str(raw.get("grain_train_files") or "").split(";"):
            if pattern:
                yield "grain_train_files", pattern.split(",")[0]
    tokenizer = str(raw.get("tokenizer_path") or "")
    packaged = os.path.join(MAXTEXT_ASSETS_ROOT, "tokenizers", os.path.basename(tokenizer))
    if tokenizer and data != "synthetic" and raw.get("tokenizer_type") != "huggingface":
        yield "tokenizer_path", packaged if os.path.exists(packaged) else tokenizer


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
        check_keys({**given, **overrides})
        for key in overrides.keys() & given.keys():  # an override must not hide a mistake
            _check_type(key, given[key])
        overrides = remat_default(argv, overrides) | overrides
        return pyconfig.initialize(list(argv), config_class=Nvfp4MaxTextConfig, **overrides)


def _check_type(key: str, value: object) -> None:
    schema: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(Nvfp4MaxTextConfig.model_fields[key].annotation)
    try:
        schema.validate_python(value)
    except pydantic.ValidationError as error:
        raise ConfigError(_describe({**error.errors()[0], "loc": (key,)})) from None


def merged_keys(argv: Sequence[str], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of the YAML file, its base configs and the command line, before MaxText's defaults act."""
    config, arguments = omegaconf.OmegaConf.create(), list(argv[1:])
    if arguments and arguments[0].endswith(".yml"):
        _chain(argv)  # refuses what MaxText would trip over
        config = pyconfig._load_config(pyconfig.resolve_config_path(arguments.pop(0)))
        config.pop(pyconfig._BASE_CONFIG_ATTR, None)
    for argument in arguments:
        _check_argument(argument)
    command_line = omegaconf.OmegaConf.from_cli(arguments)
    merged = omegaconf.OmegaConf.merge(config, command_line, omegaconf.OmegaConf.create(dict(overrides)))
    container = omegaconf.OmegaConf.to_container(merged, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def remat_default(argv: Sequence[str], overrides: Mapping[str, Any]) -> dict[str, str]:
    """The remat policy of the mode on GPUs, unless the user's file or command line has one.

    Args:
      argv: As for `load_config`.
      overrides: Values that win over the file.

    Returns:
      The key and its value; nothing where MaxText's default holds.
    """
    raw = merged_keys(argv, overrides)
    section = raw.get("nvfp4") or {}
    backend = section.get("backend", "auto")
    on_gpu = backend == "auto" and str(raw.get("hardware")).startswith("gpu")
    if raw.get("quantization") != MODE or not (on_gpu or backend == "transformer_engine"):
        return {}
    given = {key for path in _chain(argv) for key in _keys_of(path)}
    given |= {argument.partition("=")[0] for argument in argv[1:]} | overrides.keys()
    return {} if "remat_policy" in given else {"remat_policy": REMAT_POLICY}


def _chain(argv: Sequence[str]) -> list[str]:
    """The user's file of an argv and the files it is based on, without MaxText's own base configs.

    Raises:
      ConfigError: A file that cannot be read, is no config, or is based on itself.
    """
    if len(argv) < 2 or not argv[1].endswith(".yml"):  # MaxText knows no other ending
        return []
    path = name = pyconfig.resolve_config_path(argv[1])
    chain: list[str] = []
    while Path(name).parent != _CONFIGS:
        chain.append(name)
        base = _keys_of(name).get(pyconfig._BASE_CONFIG_ATTR)
        if base is None:
            break
        if not isinstance(base, str):
            raise ConfigError(problem("base_config", base, "not a file name", "base_config: base.yml"))
        beside = os.path.join(os.path.dirname(name), base)
        name = beside if os.path.isfile(beside) else os.path.join(_CONFIGS, base)
        if not os.path.isfile(name):
            why = f"no such file beside {path}, nor among MaxText's configs"
            near = _nearest(base, [file.name for file in _CONFIGS.glob("*.yml")]) or "base.yml"
            raise ConfigError(problem("base_config", base, why, f"base_config: {near}"))
        if os.path.realpath(name) in map(os.path.realpath, chain):
            raise ConfigError(
                problem("base_config", base, "the file is based on itself", "base_config: base.yml")
            )
    return chain


def _keys_of(path: str) -> dict[Any, Any]:
    write = "keys such as base_config: base.yml, one on each line"
    try:
        keys = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({_yaml_fault(error)}); write {write}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); write {write}") from None
    except OSError as error:
        why = f"cannot be read ({error.strerror})" if error.strerror else "not a mapping of keys"
        raise ConfigError(f"{path}: {why}; write {write}") from None
    if not isinstance(keys, dict):
        raise ConfigError(f"{path}: a list, not a mapping of keys; write {write}")
    if not keys:
        raise ConfigError(f"{path}: the file is empty; write {write}")
    return keys


def _check_argument(argument: str) -> None:
    key, _, value = argument.partition("=")
    try:
        omegaconf.OmegaConf.from_cli([argument])
    except yaml.YAMLError as error:
        write = f"YAML in one line and in quotes, such as '{key}=[1, 2]'"
        raise ConfigError(problem(key, value, f"not valid YAML ({_yaml_fault(error)})", write)) from None


def _yaml_fault(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return _first_line(str(error))
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"


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
        # A union has a fault for each of its members; the last is the widest.
        lines = {_key(detail) or detail["msg"]: _describe(detail) for detail in error.errors()}
        raise ConfigError("\n".join(lines.values())) from error
    except omegaconf.errors.OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'config'}: {_first_line(str(error))}") from error
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(_first_line(str(error)) or type(error).__name__) from error
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}") from error
    finally:
        pyconfig._handle_config_exception = handler


@contextlib.contextmanager
def raising_setup_errors() -> Iterator[None]:
    """Turns what MaxText refuses inside it, before the first training step, into a `ConfigError`.

    A mesh of the wrong size or a batch that does not divide are known only to the run itself. A
    programming error is not hidden: anything raised by this package or by a training step passes.
    """
    try:
        yield
    except (ValueError, AssertionError, ImportError, OSError, RuntimeError) as error:
        frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        started = any(code.co_name == "training_loop_iteration" for code in frames)
        ours = Path(frames[-1].co_filename).is_relative_to(_PACKAGE)
        deliberate = type(error) in (RuntimeError, NotImplementedError) or not isinstance(error, RuntimeError)
        if started or ours or not deliberate:
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        file = where.filename.rpartition("site-packages/")[2]
        message = _first_line(str(error)) or type(error).__name__
        raise ConfigError(f"{message} ({file}, line {where.lineno})") from error


_TYPES = {
    "int": ("an integer", "8"),
    "float": ("a number", "0.5"),
    "bool": ("a switch", "true"),
    "string": ("text", "a name in quotes"),
    "list": ("a list", "[a, b]"),
    "dict": ("a mapping", "{a: 1}"),
}
"""What a value should have been, with an example, by the start of pydantic's name for the fault."""


def _key(detail: Any) -> str:
    """The key of a fault that a schema found, without pydantic's names for the members of a union."""
    key, *rest = detail["loc"] or ("",)
    return ".".join([str(key), *(str(part) for part in rest if isinstance(part, int))])


def _describe(detail: Any) -> str:
    """One line for a fault that MaxText's schema found."""
    message = re.sub(r"^(Value|Assertion) error, ", "", detail["msg"])
    if not (key := _key(detail)):
        return message
    if detail["type"] in ("literal_error", "enum"):
        choices = re.findall(r"'([^']*)'", detail["ctx"]["expected"])
        write = _nearest(detail["input"], choices) or " or ".join(choices)
        return problem(key, detail["input"], "no such choice", write)
    if wanted := _TYPES.get(detail["type"].partition("_")[0]):
        return problem(key, detail["input"], f"not {wanted[0]}", f"{wanted[0]} such as {wanted[1]}")
    return f"{key}: got {show(detail['input'])}: {message}"


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0]


def _nearest(word: object, names: Iterable[str]) -> str:
    return " or ".join(difflib.get_close_matches(str(word).lower(), list(names), n=2))


def _nearest_option(key: str) -> str:
    if key in Recipe.model_fields:
        return f"it in the section nvfp4, as nvfp4: {{{key}: ...}}"
    near = difflib.get_close_matches(key, Nvfp4MaxTextConfig.model_fields, n=3, cutoff=0.7)
    return " or ".join(near) or "an option of MaxText's base.yml"


def _is_nested_key(key: str) -> bool:
    """MaxText accepts the keys of its nested sections at top level."""
    return any(
        key in getattr(field.annotation, "model_fields", {})
        for field in types.MaxTextConfig.model_fields.values()
    )
