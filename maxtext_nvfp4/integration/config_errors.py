"""MaxText's complaints about a configuration in the form of this plugin's: one `ConfigError`, a line for each."""

import contextlib
import difflib
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import omegaconf
import pydantic
from maxtext.configs import pyconfig

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.recipe import problem, show

_PACKAGE = Path(__file__).parents[1]


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
        lines = {_key(detail) or detail["msg"]: describe(detail) for detail in error.errors()}
        raise ConfigError("\n".join(lines.values())) from error
    except omegaconf.errors.OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'config'}: {first_line(str(error))}") from error
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(first_line(str(error)) or type(error).__name__) from error
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
        # MaxText raises RuntimeError itself; what derives from it is the compiler's, or Python's own.
        unforeseen = isinstance(error, RuntimeError) and type(error) not in (
            RuntimeError,
            NotImplementedError,
        )
        if started or ours or unforeseen:
            raise
        if isinstance(error, OSError) and error.filename:
            write = "write a path that works where the config names it, such as base_output_directory"
            raise ConfigError(f"{error.filename}: {error.strerror}; {write}") from error
        where = traceback.extract_tb(error.__traceback__)[-1]
        file = where.filename.rpartition("site-packages/")[2]
        message = first_line(str(error)) or type(error).__name__
        raise ConfigError(f"{message} ({file}, line {where.lineno})") from error


_TYPES = {
    "int": ("an integer", "8"),
    "float": ("a number", "0.5"),
    "bool": ("a switch", "true"),
    "string": ("text", "run_1"),
    "list": ("a list", "[a, b]"),
    "dict": ("a mapping", "{a: 1}"),
}
"""What a value should have been, with an example, by the start of pydantic's name for the fault."""

_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}
"""Where a number should have been, and where the bound stands, by pydantic's name for the fault."""


def _key(detail: Any) -> str:
    """The key of a fault that a schema found, without pydantic's names for the members of a union."""
    key, *rest = detail["loc"] or ("",)
    return ".".join([str(key), *(str(part) for part in rest if isinstance(part, int))])


def describe(detail: Any) -> str:
    """One line for a fault that MaxText's schema found."""
    message = re.sub(r"^(Value|Assertion) error, ", "", detail["msg"])
    if not (key := _key(detail)):
        return message
    if detail["type"] in ("literal_error", "enum"):
        choices = re.findall(r"'([^']*)'", detail["ctx"]["expected"])
        write = nearest(detail["input"], choices) or " or ".join(choices)
        return problem(key, detail["input"], "no such choice", write)
    if wanted := _TYPES.get(detail["type"].partition("_")[0]):
        return problem(key, detail["input"], f"not {wanted[0]}", f"{wanted[0]} such as {wanted[1]}")
    if bound := _BOUNDS.get(detail["type"]):
        allowed = f"{bound[0]} {detail['ctx'][bound[1]]}"
        return problem(key, detail["input"], f"it must be {allowed}", f"a number {allowed}")
    return f"{key}: got {show(detail['input'])}: {message}"


def first_line(text: str) -> str:
    """What an exception says first, with the list that its first line announces."""
    first = text.strip().split("\n")[0]
    return text.strip() if first.endswith(":") else first


def nearest(word: object, names: Iterable[str]) -> str:
    """The one or two names most like a word; empty if none is."""
    return " or ".join(difflib.get_close_matches(str(word).lower(), list(names), n=2))
