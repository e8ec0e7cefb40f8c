"""The command line: `maxtext-nvfp4 train | explain | corpus`."""

import argparse
import contextlib
import importlib
import io
import json
import logging
import os
import sys
from collections.abc import Sequence

from maxtext_nvfp4.errors import ConfigError, TrainingError

_QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_ENABLE_ONEDNN_OPTS": "0",  # TensorFlow only feeds data here, and announces this option at every start
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Environment of MaxText's dependencies, unless the user has set it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 2 for a mistake in the input, 3 for a run that stopped itself."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse leaves over the key=value pairs that follow an option such as --json.
    if unknown := [word for word in rest if word.startswith("-") or "overrides" not in arguments]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.overrides.extend(rest)
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()  # a closed pipe shows here, not when Python ends
        return status
    except ConfigError as error:
        print(f"maxtext-nvfp4: {error}", file=sys.stderr)
        return 2
    except TrainingError as error:
        print(f"maxtext-nvfp4: {error}", file=sys.stderr)
        return 3
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="maxtext-nvfp4", description="NVFP4 4-bit pretraining for MaxText.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a model with MaxText", description=_train.__doc__)
    _add_config(train)
    train.set_defaults(run=_train)

    explain = commands.add_parser(
        "explain", help="show the precision of every GEMM before a run", description=_explain.__doc__
    )
    _add_config(explain)
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.set_defaults(run=_explain)

    corpus = commands.add_parser("corpus", help="turn folders of text into a data set and a tokenizer")
    # Light: the module imports TensorFlow only when it runs.
    module = importlib.import_module("maxtext_nvfp4.corpus")
    module.add_arguments(corpus)
    corpus.set_defaults(run=module.run)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.yml", help="a MaxText YAML file with quantization: nvfp4")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file")


def _config_argv(arguments: argparse.Namespace) -> list[str]:
    """Arguments as MaxText takes them, after checking what it would only trip over."""
    path = arguments.config
    example = "the path of a MaxText YAML such as configs/demo-cpu.yml"
    if not path.endswith(".yml"):
        why = "the name of a config ends in .yml, and it comes before the key=value pairs"
        raise ConfigError(f"{path}: {why}; write {example}")
    if not os.path.isfile(path):
        why = "a directory" if os.path.isdir(path) else "no such file"
        raise ConfigError(f"{path}: {why}; write {example}")
    for pair in arguments.overrides:
        key, equals, _ = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"{pair}: got an argument without a value; write key=value, such as steps=100")
    return ["maxtext-nvfp4", path, *arguments.overrides]


def _train(arguments: argparse.Namespace) -> int:
    """Trains with MaxText's own loop; CONFIG.yml and key=value pairs are MaxText's."""
    argv = _config_argv(arguments)
    from maxtext_nvfp4.integration import register

    register()
    from maxtext_nvfp4.integration.config_checks import check_run
    from maxtext_nvfp4.integration.config_errors import raising_setup_errors
    from maxtext_nvfp4.integration.run import train

    check_run(argv)
    with raising_setup_errors():
        print(train(argv))
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    """Prints the precision of each site, layer range and GEMM, without allocating weights."""
    argv = _config_argv(arguments)
    # MaxText prints which optional libraries it does without; stdout is for the report alone.
    with contextlib.redirect_stdout(io.StringIO()):
        from maxtext_nvfp4.integration import register

        register()
        from maxtext_nvfp4.integration.report import explain

        logging.disable(logging.WARNING)  # MaxText's notes on how it fills in a config
        try:
            report = explain(argv)
        finally:
            logging.disable(logging.NOTSET)
    print(json.dumps(report.to_json(), indent=2) if arguments.json else report.to_text())
    return 0
