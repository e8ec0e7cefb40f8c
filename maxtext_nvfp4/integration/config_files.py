"""The keys of a run as its user wrote them, in files and arguments, before MaxText's defaults act."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import omegaconf
import yaml  # type: ignore[import-untyped]
from maxtext.configs import pyconfig, types

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration.config_errors import first_line, nearest
from maxtext_nvfp4.recipe import problem

_CONFIGS = Path(types.__file__).parent


def merged_keys(argv: Sequence[str], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of the YAML file, its base configs, MaxText's among them, and the command line."""
    config, arguments = omegaconf.OmegaConf.create(), list(argv[1:])
    if arguments and arguments[0].endswith(".yml"):
        _user_files(argv)  # refuses what MaxText would trip over
        config = pyconfig._load_config(pyconfig.resolve_config_path(arguments.pop(0)))
        config.pop(pyconfig._BASE_CONFIG_ATTR, None)
    for argument in arguments:
        _check_argument(argument)
    command_line = omegaconf.OmegaConf.from_cli(arguments)
    merged = omegaconf.OmegaConf.merge(config, command_line, omegaconf.OmegaConf.create(dict(overrides)))
    container = omegaconf.OmegaConf.to_container(merged, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def chosen_keys(argv: Sequence[str]) -> set[str]:
    """The keys that the user's own files and command line set, and not MaxText's base configs."""
    arguments = {argument.partition("=")[0] for argument in argv[1:]}
    return arguments.union(*(_keys_of(path) for path in _user_files(argv)))


def base_config(argv: Sequence[str]) -> str:
    """The MaxText config that the user's files are based on at last, such as `base.yml`."""
    files = _user_files(argv)
    return str(_keys_of(files[-1]).get(pyconfig._BASE_CONFIG_ATTR, "base.yml")) if files else "base.yml"


def _user_files(argv: Sequence[str]) -> list[str]:
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
            near = nearest(base, [file.name for file in _CONFIGS.glob("*.yml")]) or "base.yml"
            raise ConfigError(problem("base_config", base, why, f"base_config: {near}"))
        if os.path.realpath(name) in map(os.path.realpath, chain):
            why = f"{name} is based on itself, as a file beside a config comes before MaxText's own"
            raise ConfigError(problem("base_config", base, why, "another file, or rename that one"))
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
        return first_line(str(error))
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
