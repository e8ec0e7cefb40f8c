"""Twins of the tiny model, trained by the command line: stopped, taken up again, compared."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import RUN

from maxtext_nvfp4.cli import main
from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration.twins import twins
from maxtext_nvfp4.runs.ab import train_twins
from maxtext_nvfp4.runs.events import read_events
from maxtext_nvfp4.runs.records import read_run

ROOT = Path(__file__).parents[1]
STEPS = 60
KEYS = {
    **RUN,
    "steps": STEPS,
    "checkpoint_period": 20,
    "enable_tensorboard": True,
    "log_period": 1,
    "eval_start_step": 19,
    "eval_interval": 20,
    "eval_steps": 1,
    "nvfp4": {"telemetry": {"every": 20}, "bf16_last_layers": 1},
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.yml"
    path.write_text(json.dumps(KEYS))
    return path


def ab(config, out, *arguments):
    return [sys.executable, "-m", "maxtext_nvfp4", "ab", str(config), *arguments, "--out", str(out)]


def test_stopped_twins_are_taken_up_and_compared(config, tmp_path):
    out = tmp_path / "ab"
    command = ab(config, out, "--recipes", "bf16,all_layers")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = out / "logs" / "all_layers-seed0.log"
    deadline = time.monotonic() + 300
    while not (log.exists() and "completed step: 1," in log.read_text()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(ConfigError, match="another process is training there"):
        train_twins([], out)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 3, said
    assert "run the same command again to go on" in said
    assert not (out / "records" / "all_layers-seed0.json").exists()
    assert (out / "records" / "bf16-seed0.json").exists()

    again = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "[1/2] bf16-seed0: complete" in again.stdout
    report = json.loads((out / "report.json").read_text())
    assert [group["label"] for group in report["groups"]] == ["bf16", "all_layers"]
    assert report["steps"] == STEPS
    record = read_run(out / "records" / "all_layers-seed0.json")
    assert list(record.curves["learning/loss"].steps) == list(range(STEPS))
    assert len(record.layer_errors) == 2
    # A step with a sample and an evaluation is in TensorBoard with both.
    scalars = read_events(out / "runs" / "all_layers-seed0" / "tensorboard").scalars
    assert {19, 39, 59} <= set(scalars["nvfp4/decoder/layers_1/mlp/wo/wgrad/gradient/sqnr_db"])
    assert {19, 39, 59} <= set(scalars["eval/avg_loss"])

    other = subprocess.run(
        [*command, "learning_rate=0.5"], capture_output=True, text=True, timeout=300, check=False
    )
    assert other.returncode == 2
    assert "learning_rate was None, is 0.5" in other.stderr


def test_twins_differ_in_precision_and_seed_alone(config, tmp_path):
    ablation = ROOT / "configs" / "ablations" / "no_sr.yml"
    runs = twins(["x", str(config)], ["bf16", "paper", str(ablation), "fp8"], 2, tmp_path)
    names = [run["run_name"] for run in runs]
    assert names[:4] == ["bf16-seed0", "paper-seed0", "no_sr-seed0", "fp8-seed0"]
    assert names[4:] == ["bf16-seed1", "paper-seed1", "no_sr-seed1", "fp8-seed1"]
    varying = {
        "run_name",
        "quantization",
        "nvfp4",
        "use_qwix_quantization",
        "data_shuffle_seed",
        "init_weights_seed",
    }
    shared = [{key: value for key, value in run.items() if key not in varying} for run in runs]
    assert all(run == shared[0] for run in shared)
    for key in ("data_shuffle_seed", "init_weights_seed"):
        assert [run[key] for run in runs] == [0] * 4 + [1] * 4
    by_name = {run["run_name"]: run for run in runs}
    # The recipe's own layers count, not the config's.
    assert by_name["paper-seed0"]["nvfp4"] == {"telemetry": {"every": 20}, "recipe": "paper"}
    assert by_name["no_sr-seed0"]["nvfp4"]["stochastic_rounding"] == "none"
    assert by_name["bf16-seed0"]["nvfp4"] == {}
    assert by_name["fp8-seed0"]["quantization"] == "fp8_full"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--recipes", "bf16"], "one recipe; write the baseline and others, such as bf16,paper"),
        (["--recipes", "bf16,bf16"], "bf16 is named twice"),
        (["--recipes", "bf16,papier"], "--recipes: got papier: not one of bf16, fp8, "),
        (["--recipes", "bf16,nowhere.yml"], "nowhere.yml: the file cannot be read"),
    ],
    ids=["one", "twice", "unknown", "no-file"],
)
def test_recipes_that_cannot_be_are_said_so(arguments, says, config, tmp_path, capsys):
    out = tmp_path / "ab"
    assert main(["ab", str(config), *arguments, "--out", str(out)]) == 2
    assert says in capsys.readouterr().err
    assert not out.exists()


def test_a_config_that_one_of_the_runs_refuses_is_refused_before_the_first(config, tmp_path, capsys):
    config.write_text(json.dumps({**KEYS, "nvfp4": {"seed": "x"}}))
    assert main(["ab", str(config), "--recipes", "bf16,paper", "--out", str(tmp_path / "ab")]) == 2
    assert "nvfp4.seed: got x" in capsys.readouterr().err
    assert not (tmp_path / "ab").exists()
