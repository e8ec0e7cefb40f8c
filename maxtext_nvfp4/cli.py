"""The command line: `maxtext-nvfp4 train | explain | doctor | mesh | predict | ab | compare | suggest | corpus`."""

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import logging
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from maxtext_nvfp4.errors import STOPPED_STATUS, ConfigError, TrainingError

_QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_ENABLE_ONEDNN_OPTS": "0",  # TensorFlow only feeds data here, and announces this option at every start
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Environment of MaxText's dependencies, unless the user has set it."""

# Named here too, as the tables themselves are not imported to show help.
_HARDWARE = ("gb200", "gb300", "b200", "b300")
_PRECISIONS = ("nvfp4", "fp8", "fp8_current", "mxfp8", "bf16")


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

    doctor = commands.add_parser(
        "doctor", help="check machine, config and cluster before a run", description=_doctor.__doc__
    )
    doctor.add_argument(
        "overrides",
        nargs="*",
        metavar="CONFIG.yml key=value",
        help="a MaxText YAML file and values that win over it",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    _add_cluster(doctor)
    doctor.add_argument(
        "--target", choices=_HARDWARE, help="check as if on this hardware instead of this machine's"
    )
    doctor.set_defaults(run=_doctor)

    mesh = commands.add_parser("mesh", help="derive the parallelism for a cluster", description=_mesh.__doc__)
    _add_config(mesh)
    mesh.add_argument("--json", action="store_true", help="print JSON")
    _add_cluster(mesh)
    mesh.set_defaults(run=_mesh)

    predict = commands.add_parser(
        "predict", help="predict step time and memory on hardware to come", description=_predict.__doc__
    )
    _add_config(predict)
    predict.add_argument("--hardware", required=True, choices=_HARDWARE, help="the GPU")
    predict.add_argument("--gpus", required=True, type=_count, metavar="N", help="how many of them")
    predict.add_argument(
        "--precision",
        type=_precisions,
        default=["nvfp4", "fp8", "mxfp8", "bf16"],
        metavar="A,B,...",
        help=f"of {', '.join(_PRECISIONS)}; nvfp4,fp8,mxfp8,bf16 unless given",
    )
    predict.add_argument("--json", action="store_true", help="print JSON")
    predict.set_defaults(run=_predict)

    ab = commands.add_parser(
        "ab", help="train twins that differ in precision alone, and compare", description=_ab.__doc__
    )
    _add_config(ab)
    ab.add_argument(
        "--recipes",
        required=True,
        metavar="A,B,...",
        help="the baseline, then others: bf16, fp8, recipes such as paper, paths of recipe files",
    )
    ab.add_argument(
        "--seeds", type=_count, default=1, metavar="N", help="runs of each; 3 or more give intervals"
    )
    _add_out(ab)
    ab.set_defaults(run=_ab)

    compare = commands.add_parser(
        "compare", help="compare runs that differ in precision alone", description=_compare.__doc__
    )
    compare.add_argument(
        "runs", nargs="+", metavar="RUN", help="folders of runs or their records, the baseline first"
    )
    compare.add_argument(
        "--allow",
        default="",
        metavar="KEY,...",
        help="keys besides precision that may differ, or globs of them",
    )
    _add_out(compare)
    compare.set_defaults(run=_compare)

    suggest = commands.add_parser(
        "suggest", help="name the layers to keep in BF16", description=_suggest.__doc__
    )
    suggest.add_argument("run_dir", metavar="RUN_DIR", help="folder of a run with nvfp4.telemetry")
    suggest.add_argument(
        "--share", type=_share, metavar="X", help="of the measured layers, 0.15 unless given"
    )
    suggest.add_argument("--json", action="store_true", help="print JSON")
    suggest.set_defaults(run=_suggest)

    corpus = commands.add_parser("corpus", help="turn folders of text into a data set and a tokenizer")
    # Light: the module imports TensorFlow only when it runs.
    module = importlib.import_module("maxtext_nvfp4.corpus")
    module.add_arguments(corpus)
    corpus.set_defaults(run=module.run)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.yml", help="a MaxText YAML file with quantization: nvfp4")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file")


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder for report.html, report.json and PNGs"
    )


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=_count, metavar="N", help="machines of the run")
    parser.add_argument("--gpus-per-node", type=_count, metavar="N", help="4 on GB200 and GB300")
    parser.add_argument(
        "--rack-gpus", type=_count, metavar="N", help="GPUs of an NVLink domain, 72 in an NVL72"
    )


def _shown(text: str) -> str:
    return text or "nothing"


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise argparse.ArgumentTypeError(
            f"got {_shown(text)}: not a count; write an integer from 1 to 999999"
        )
    return int(text)


def _precisions(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in _PRECISIONS or names.count(name) > 1:
            why = "given twice" if name in _PRECISIONS else "not a precision"
            raise argparse.ArgumentTypeError(
                f"got {_shown(name)}: {why}; write some of {', '.join(_PRECISIONS)} with commas between them"
            )
    return names


def _share(text: str) -> float:
    if not re.fullmatch(r"0?\.[0-9]+|1(\.0*)?", text) or float(text) == 0:
        raise argparse.ArgumentTypeError(
            f"got {_shown(text)}: not a share; write a number above 0 and up to 1, such as 0.15"
        )
    return float(text)


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


@contextlib.contextmanager
def _report_alone() -> Iterator[None]:
    """Keeps MaxText from printing which libraries it does without and how it fills in a config."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


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
        summary, stopped = train(argv)
    print(summary)
    return int(os.environ.get(STOPPED_STATUS, "0")) if stopped else 0


def _explain(arguments: argparse.Namespace) -> int:
    """Prints the precision of each site, layer range and GEMM, without allocating weights."""
    argv = _config_argv(arguments)
    with _report_alone():
        from maxtext_nvfp4.integration import register

        register()
        from maxtext_nvfp4.integration.report import explain

        report = explain(argv)
    print(json.dumps(report.to_json(), indent=2) if arguments.json else report.to_text())
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    """Checks what a run needs: versions, hardware, mesh, sizes, storage, environment, network.

    Exits with 0 if the run can start, else with 2.
    """
    # One list for both: argparse would take an optional CONFIG.yml only before the options.
    arguments.config, arguments.overrides = next(iter(arguments.overrides), None), arguments.overrides[1:]
    argv = _config_argv(arguments) if arguments.config else None
    with _report_alone():
        from maxtext_nvfp4.integration.diagnosis import Options, diagnose

        options = Options(
            nodes=arguments.nodes,
            gpus_per_node=arguments.gpus_per_node,
            rack_gpus=arguments.rack_gpus,
            target=arguments.target,
        )
        diagnosis = diagnose(argv, options)
    print(json.dumps(diagnosis.to_json(), indent=2) if arguments.json else diagnosis.to_text())
    return 0 if diagnosis.can_start else 2


def _mesh(arguments: argparse.Namespace) -> int:
    """Prints the ici_* and dcn_* parallelism of a config on a cluster, and why; --nodes 1 if it is not given."""
    argv = _config_argv(arguments)
    with _report_alone():
        from maxtext_nvfp4.integration import register

        register()
        from maxtext_nvfp4.doctor.cluster import Cluster
        from maxtext_nvfp4.integration.cluster_model import plan

        cluster = Cluster(
            nodes=arguments.nodes or 1,
            gpus_per_node=arguments.gpus_per_node or 4,
            rack_gpus=arguments.rack_gpus or 72,
        )
        mesh = plan(argv, cluster)
    print(json.dumps(mesh.to_json(), indent=2) if arguments.json else mesh.to_text())
    return 0


def _predict(arguments: argparse.Namespace) -> int:
    """Predicts step time, throughput, speed-up and memory of a config, and where they go; needs no GPU."""
    argv = _config_argv(arguments)
    with _report_alone():
        from maxtext_nvfp4.integration import register

        register()
        from maxtext_nvfp4.integration.prediction import report

        found = report(argv, arguments.hardware, arguments.gpus, arguments.precision)
    print(json.dumps(found.to_json(), indent=2) if arguments.json else found.to_text())
    return 0


def _ab(arguments: argparse.Namespace) -> int:
    """Trains each recipe with each seed on the same data in the same order, then compares them; resumable."""
    argv = _config_argv(arguments)
    _check_report_libraries()
    out = pathlib.Path(os.path.abspath(arguments.out))
    from maxtext_nvfp4.runs.ab import train_twins
    from maxtext_nvfp4.runs.compare import compare

    with _report_alone():
        from maxtext_nvfp4.integration import register

        register()
        from maxtext_nvfp4.integration.twins import twins

        runs = twins(argv, arguments.recipes.split(","), arguments.seeds, out)
    return _report(compare(train_twins(runs, out)), out)


def _compare(arguments: argparse.Namespace) -> int:
    """Compares runs over tokens, seed by seed; refuses runs that differ in more than precision."""
    _check_report_libraries()
    from maxtext_nvfp4.runs.compare import compare
    from maxtext_nvfp4.runs.records import read_run

    records = [read_run(pathlib.Path(run)) for run in arguments.runs]
    allowed = [key for key in arguments.allow.split(",") if key]
    return _report(compare(records, allowed), pathlib.Path(arguments.out))


def _check_report_libraries() -> None:
    """Before hours of training, not after them."""
    if absent := [
        name for name in ("jinja2", "matplotlib", "scipy") if importlib.util.find_spec(name) is None
    ]:
        raise ConfigError(f"reports need {' and '.join(absent)}; install maxtext-nvfp4[report]")


def _report(comparison: Any, out: pathlib.Path) -> int:
    from maxtext_nvfp4.runs.report import to_text, write_report

    page = write_report(comparison, out)[0]
    print(f"{to_text(comparison)}\nwrote {page}")
    return 0


def _suggest(arguments: argparse.Namespace) -> int:
    """Names the layers whose weight gradients 4 bits disturb most, from a run's telemetry, and the rules that keep them."""
    from maxtext_nvfp4.runs.suggest import SHARE, suggest

    found = suggest(pathlib.Path(arguments.run_dir), arguments.share or SHARE)
    print(json.dumps(found.to_json(), indent=2) if arguments.json else found.to_text())
    return 0
