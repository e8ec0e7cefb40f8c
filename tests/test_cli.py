"""The command line: what it prints where, what it leaves alone, and a run from start to end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import yaml
from absl import logging

from maxtext_nvfp4 import cli
from maxtext_nvfp4.errors import ConfigError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The path of a tiny config whose runs go to `tmp_path / "out"`, in a process that is left as it was."""
    environment, verbosity, prng = dict(os.environ), logging.get_verbosity(), jax.config.jax_default_prng_impl
    keys = {
        "base_config": "base.yml",
        "run_name": "tiny",
        "quantization": "nvfp4",
        "nvfp4": {"recipe": "paper"},
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "decoder_block": "llama2",
        "base_emb_dim": 32,
        "base_num_query_heads": 2,
        "base_num_kv_heads": 2,
        "base_mlp_dim": 32,
        "head_dim": 16,
        "vocab_size": 64,
        "base_num_decoder_layers": 2,
        "max_target_length": 16,
        "per_device_batch_size": 2,
        "dataset_type": "synthetic",
        "steps": 2,
        "log_config": False,
        "jax_cache_dir": "",
        "base_output_directory": str(tmp_path / "out"),
    }
    path = tmp_path / "tiny.yml"
    path.write_text(yaml.safe_dump(keys))
    yield str(path)
    os.environ.clear()
    os.environ.update(environment)
    logging.set_verbosity(verbosity)
    jax.config.update("jax_default_prng_impl", prng)


def in_a_new_process(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert all(f"\n    {command}" in out for command in ("train", "explain", "doctor", "mesh", "corpus"))


@pytest.mark.parametrize(
    ("arguments", "says"), [([], "COMMAND"), (["trian", "x.yml"], "trian"), (["train"], "CONFIG.yml")]
)
def test_a_command_and_a_config_are_needed(arguments, says, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert says in capsys.readouterr().err


def test_help_needs_neither_maxtext_nor_jax():
    code = """
import contextlib, io, sys
from maxtext_nvfp4 import cli
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    cli.main(["--help"])
print([name for name in ("maxtext", "jax", "tensorflow") if name in sys.modules])
"""
    loaded = in_a_new_process(code).strip()
    assert "maxtext" not in loaded
    assert "tensorflow" not in loaded


def test_a_mistake_goes_to_stderr_with_status_2(monkeypatch, capsys):
    def refuse(arguments):
        raise ConfigError("steps: got 0: nothing to do; write 1")

    monkeypatch.setattr(cli, "_config_argv", refuse)
    assert cli.main(["explain", "x.yml"]) == 2
    assert capsys.readouterr() == ("", "maxtext-nvfp4: steps: got 0: nothing to do; write 1\n")


def test_settings_of_the_user_win_over_quiet_ones(config, monkeypatch):
    for name in cli._QUIET:
        monkeypatch.setenv(name, "set by the user")
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert cli.main(["explain", "missing.yml"]) == 2
    assert all(os.environ[name] == "set by the user" for name in cli._QUIET)


def test_explain_says_the_same_as_text_and_as_json(config, capsys):
    assert cli.main(["explain", config]) == 0
    text, err = capsys.readouterr()
    assert err == ""
    assert cli.main(["explain", config, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["totals"]["gemms"] == 3 * (2 * 7 + 1)
    assert f"{report['totals']['nvfp4_gemms']} of {report['totals']['gemms']} linear-layer GEMMs" in text
    assert f"{report['totals']['nvfp4_flops_fraction']:.1%}" in text
    assert f"recipe {report['recipe']} ({report['fingerprint']})" in text
    rows = [line.split(maxsplit=5) for line in text.splitlines() if line.startswith("decoder/")]
    assert [row[:5] for row in rows] == [
        [site["path"], site["layers"], site["fprop"], site["dgrad"], site["wgrad"]]
        for site in report["sites"]
    ]
    assert [row[5] if len(row) > 5 else "" for row in rows] == [site["reason"] for site in report["sites"]]


def test_arguments_win_over_the_file(config, capsys):
    assert (
        cli.main(["explain", config, "--json", "nvfp4.recipe=all_layers", "base_num_decoder_layers=3"]) == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["recipe"] == "all_layers"
    assert report["totals"]["nvfp4_gemms"] == 3 * 3 * 7


def test_explain_shows_the_late_switch(config, capsys):
    assert cli.main(["explain", config, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["switch"] is None
    arguments = [config, "nvfp4.switch={at: 0.82, gemms: all}", "steps=100"]
    assert cli.main(["explain", *arguments, "--json"]) == 0
    switch = json.loads(capsys.readouterr().out)["switch"]
    assert (switch["step"], switch["gemms"], switch["to"]) == (82, "all", "bf16")
    assert switch["bf16_share_after"] == 1
    assert switch["switched_share_of_run"] == pytest.approx(0.18 * (1 - switch["bf16_share_before"]))
    assert cli.main(["explain", *arguments]) == 0
    line, headline = capsys.readouterr().out.splitlines()[-2:]
    share = f"{switch['switched_share_of_run']:.1%} of the run's linear-layer FLOPs"
    assert line.startswith(f"late switch: all GEMMs in bf16 from step 82 of 100 on: {share}")
    assert headline.endswith("; all GEMMs in bf16 from step 82 of 100 on")


def test_explain_writes_nothing_and_keeps_no_log_level(config, tmp_path, capsys):
    import logging as standard

    before = files(tmp_path)
    assert cli.main(["explain", config]) == 0
    assert files(tmp_path) == before
    assert standard.root.manager.disable == standard.NOTSET


def test_a_run_reports_what_it_did_and_is_not_repeated(config, tmp_path, capsys):
    assert cli.main(["train", config]) == 0
    out = capsys.readouterr().out
    summary = out[out.index("run tiny: 2 steps") :]
    assert "loss" in summary
    assert "21 of 45 linear-layer GEMMs in 4 bits" in summary
    assert str(tmp_path / "out" / "tiny" / "checkpoints") in summary
    assert any((tmp_path / "out" / "tiny" / "checkpoints").iterdir())
    assert any((tmp_path / "out" / "tiny" / "tensorboard").rglob("*tfevents*"))

    # The same command again finds the finished run. MaxText refuses; that is a message and not a traceback.
    before = files(tmp_path)
    assert cli.main(["train", config]) == 2
    out, err = capsys.readouterr()
    (message,) = (line for line in err.splitlines() if line.startswith("maxtext-nvfp4: "))
    assert "up to step 2" in message
    assert "set steps > 2" in message
    assert "Traceback" not in out + err
    assert files(tmp_path) == before
