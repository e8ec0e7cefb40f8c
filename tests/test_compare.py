"""Comparisons of runs whose losses are made up, so that every number of the report is known beforehand."""

import json
import math
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from scipy import stats

from maxtext_nvfp4.cli import main
from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.runs.compare import compare, to_json
from maxtext_nvfp4.runs.intervals import Interval
from maxtext_nvfp4.runs.records import Curve, Record, read_run, write_record
from maxtext_nvfp4.runs.report import to_text, write_report

SETTINGS = {
    "quantization": "QuantizationType.NONE",
    "nvfp4": "{}",
    "dtype": "bfloat16",
    "data_shuffle_seed": "0",
    "init_weights_seed": "0",
    "global_batch_size_to_train_on": "4",
    "max_target_length": "256",
    "learning_rate": "0.003",
    "adam_eps": "1e-08",
}
PAPER = {"quantization": "nvfp4"}
STEPS = 200
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


def run(name, *, gap=0.0, seed=0, steps=STEPS, losses=None, layers=None, skipped=0, rate=100.0, **settings):
    """A run whose loss falls as 3 + 2 / (1 + token millions), with the seed's own noise, plus a gap."""
    step = np.arange(steps)
    settings = {**SETTINGS, "data_shuffle_seed": str(seed), "init_weights_seed": str(seed), **settings}
    tokens = (step + 1) * int(settings["global_batch_size_to_train_on"]) * 256
    loss = 3 + 2 / (1 + tokens / 1e6) + 0.1 * seed + gap if losses is None else np.asarray(losses)
    evals = step[9::10]
    return Record(
        name=name,
        source=name,
        settings=settings,
        curves={
            "learning/loss": Curve(step, loss),
            "eval/avg_loss": Curve(evals, loss[evals]),
            "learning/raw_grad_norm": Curve(step, np.full(steps, 0.5)),
            "perf/per_device_tokens_per_sec": Curve(step, np.full(steps, rate)),
            "nvfp4/skipped_steps": Curve(step, np.full(steps, float(skipped))),
        },
        layer_errors=layers or {},
    )


def test_gaps_are_paired_by_seed_and_have_students_interval():
    gaps = (0.02, 0.03, 0.07)
    runs = [run(f"bf16-seed{seed}", seed=seed) for seed in (2, 0, 1)]
    runs += [run(f"paper-seed{seed}", seed=seed, gap=gaps[seed], **PAPER) for seed in (0, 1, 2)]
    found = compare(runs)
    base, other = found.groups
    assert (base.label, other.label) == ("bf16", "paper")
    assert (base.precision, other.precision) == ("bfloat16", "nvfp4 paper")
    expected = stats.t.interval(0.95, 2, np.mean(gaps), stats.sem(gaps))
    for gap in (other.gap_eval, other.gap_loss):
        np.testing.assert_allclose((gap.low, gap.high), expected, rtol=1e-9)
        np.testing.assert_allclose(sorted(gap.values), gaps, rtol=1e-9)
    # The seeds differ by 0.1 each, three times the gap, which pairing takes out.
    assert other.final_eval_loss.high - other.final_eval_loss.low > 3 * (expected[1] - expected[0])
    finals = [3 + 2 / (1 + STEPS * 1024 / 1e6) + 0.1 * seed for seed in range(3)]
    percent = [100 * gap / final for gap, final in zip(gaps, finals, strict=True)]
    assert other.gap_eval_percent.mean == pytest.approx(np.mean(percent))
    assert base.gap_eval is None
    line = other.gaps["learning/loss"]
    np.testing.assert_allclose(line.mean, np.mean(gaps), rtol=1e-9)
    np.testing.assert_allclose(line.half, (expected[1] - expected[0]) / 2, rtol=1e-9)


def test_one_seed_has_no_interval():
    found = compare([run("a"), run("b", gap=0.1, **PAPER)])
    gap = found.groups[1].gap_eval
    assert gap.mean == pytest.approx(0.1)
    assert math.isnan(gap.low)
    assert gap.to_text(2) == "+0.10"
    assert "One seed" in to_text(found)
    assert Interval.of([1.0]).to_json() == {"mean": 1.0, "low": None, "high": None, "values": [1.0]}


def test_runs_of_other_lengths_and_batches_meet_at_the_same_tokens():
    twice = run("b", steps=80, gap=0.25, global_batch_size_to_train_on="8", **PAPER)
    found = compare([run("a"), twice], allowed=["global_batch_size_to_train_on"])
    assert found.tokens == 80 * 2048
    assert found.steps == 160
    assert found.groups[1].gap_eval.mean == pytest.approx(0.25, abs=2e-3)
    gap = found.groups[1].gaps["learning/loss"]
    assert (gap.tokens[0], gap.tokens[-1]) == (2048, 80 * 2048)
    np.testing.assert_allclose(gap.mean, 0.25, atol=2e-3)
    assert found.allowed == {"global_batch_size_to_train_on": ("4", "8")}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", "0.001"),
        ("adam_eps", "1e-15"),
        ("dataset_name", "c4"),
        ("global_batch_size_to_train_on", "8"),
        ("dtype", "float32"),
        ("optimizer", "muon"),
    ],
)
def test_runs_that_differ_in_more_than_precision_are_refused(key, value):
    runs = [run("a"), run("b", **PAPER, **{key: value})]
    with pytest.raises(
        ConfigError, match=rf"differ in more than precision:\n  {key}: .* and {value}\n.*--allow {key}"
    ):
        compare(runs)
    assert list(compare(runs, allowed=["*"]).allowed) == [key]


def test_seeds_must_pair():
    with pytest.raises(ConfigError, match=r"seeds 0/0 .* those like c have 1/1"):
        compare([run("a"), run("c", seed=1, **PAPER)])
    with pytest.raises(ConfigError, match="a and b have the same precision and the same seeds"):
        compare([run("a"), run("b"), run("c", **PAPER)])
    with pytest.raises(ConfigError, match="a and b: all of one precision, bfloat16"):
        compare([run("a"), run("b", seed=1)])


def test_what_is_one_recipe():
    """The seed of the noise and telemetry make no other recipe; any key that changes bits does."""
    same = [
        run("a", nvfp4="{'recipe': 'paper'}", **PAPER),
        run("b", seed=1, nvfp4="{'seed': 7, 'telemetry': {'every': 5}}", **PAPER),
    ]
    with pytest.raises(ConfigError, match="all of one precision, nvfp4 paper"):
        compare(same)
    other = run("c", nvfp4="{'hadamard': 'none'}", **PAPER)
    assert [group.precision for group in compare([same[0], other]).groups] == [
        "nvfp4 paper",
        "nvfp4 paper, hadamard: none",
    ]


def test_throughput_skips_and_layers():
    layers = {f"decoder/layers_{layer}": 0.01 * layer for layer in range(8)}
    found = compare([run("a", rate=50.0), run("b", rate=80.0, skipped=3, layers=layers, **PAPER)])
    other = to_json(found)["groups"][1]
    assert other["throughput_ratio"]["mean"] == pytest.approx(1.6)
    assert other["skipped_steps"] == [3]
    assert [entry["layer"] for entry in other["worst_layers"]] == [
        f"decoder/layers_{layer}" for layer in (7, 6, 5, 4, 3)
    ]


def test_losses_that_are_not_finite_are_shown_as_such(tmp_path):
    losses = np.full(STEPS, 4.0)
    losses[150:] = np.nan
    found = compare([run("a"), run("b", losses=losses, **PAPER)])
    written = write_report(found, tmp_path)
    assert json.loads(written[1].read_text())["groups"][1]["loss_gap_nats"]["mean"] is None
    assert "not finite" in to_text(found)
    # What came before is still drawn.
    assert np.isfinite(found.groups[1].lines["learning/loss"].mean[:100]).all()


def test_smoothing_is_a_mean_over_two_percent_of_the_tokens():
    losses = np.random.default_rng(0).normal(4, 1, 1000)
    found = compare([run("a", losses=losses, steps=1000), run("b", steps=1000, **PAPER)])
    line = found.groups[0].lines["learning/loss"]
    span = (line.tokens[-1] - line.tokens[0]) * 0.02
    tokens = (np.arange(1000) + 1) * 1024
    for index in (0, 7, 200, len(line.tokens) - 1):
        near = np.abs(tokens - line.tokens[index]) <= span / 2
        assert line.mean[index] == pytest.approx(losses[near].mean(), rel=1e-12)
        assert 10 <= near.sum() <= 21


@pytest.fixture
def comparison():
    layers = {"decoder/layers_0": 0.1, "decoder/layers_1": 0.3}
    runs = [run(f"bf16-seed{seed}", seed=seed) for seed in range(3)]
    runs += [
        run(f"<b>&-seed{seed}", seed=seed, gap=0.01 * (seed + 1), skipped=2, layers=layers, **PAPER)
        for seed in range(3)
    ]
    return compare(runs)


def test_the_report_is_one_file_that_needs_nothing_else(comparison, tmp_path):
    written = {path.name for path in write_report(comparison, tmp_path / "new" / "folder")}
    figures = {
        "eval_loss",
        "eval_gap",
        "final_gap",
        "loss",
        "loss_gap",
        "gradient_norm",
        "throughput",
        "skipped_steps",
        "worst_layers",
    }
    assert written == {"report.html", "report.json", *(f"{name}.png" for name in figures)}
    page = (tmp_path / "new" / "folder" / "report.html").read_text()
    assert page.count("<svg") == len(figures)
    loaded = [
        url for url in re.findall(r"""(?:src|href)=["']([^"'#][^"']*)""", page) if not url.startswith("data:")
    ]
    assert loaded == []
    assert "&lt;b&gt;&amp;" in page
    assert "<b>&" not in page
    for path in (tmp_path / "new" / "folder").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_browser_shows_the_report_without_errors(comparison, tmp_path):
    if CHROMIUM is None:
        why = "no Chromium is installed: apt-get install chromium"
        (pytest.fail if "MAXTEXT_NVFP4_NEEDS_CHROMIUM" in os.environ else pytest.skip)(why)
    page = write_report(comparison, tmp_path)[0]
    said = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--enable-logging=stderr", "--window-size=1100,3200", f"--screenshot={tmp_path / 'page.png'}", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    ).stderr  # fmt: skip
    assert not [line for line in said.splitlines() if "CONSOLE" in line]
    assert (tmp_path / "page.png").stat().st_size > 50_000


def test_records_come_back_as_they_were(tmp_path):
    record = run(
        "a", layers={"decoder/layers_0": math.nan, "decoder/layers_1": 0.5}, losses=[4.0, math.inf], steps=2
    )
    write_record(record, tmp_path / "a.json")
    back = read_run(tmp_path / "a.json")
    assert back.settings == record.settings
    assert back.curves["learning/loss"].values[0] == 4.0
    assert math.isnan(back.curves["learning/loss"].values[1])
    assert math.isnan(back.layer_errors["decoder/layers_0"])
    assert back.layer_errors["decoder/layers_1"] == 0.5
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "no such folder; write the folder of a run"),
        (lambda path: path.mkdir(), "no TensorBoard log of MaxText below it"),
        (lambda path: path.with_suffix(".json").write_text("{"), "not the record of a run"),
        (lambda path: path.with_suffix(".json").write_text("[1]"), "not the record of a run"),
        (
            lambda path: path.with_suffix(".json").write_text('{"format": 9}'),
            "a record of format 9; this version reads 1",
        ),
        (lambda path: write_record(run("a", steps=0), path.with_suffix(".json")), "has no learning/loss yet"),
    ],
    ids=["absent", "empty", "torn", "other", "newer", "unstarted"],
)
def test_what_is_no_run_is_said_so(make, says, tmp_path, capsys):
    make(tmp_path / "x")
    name = "x.json" if (tmp_path / "x.json").exists() else "x"
    assert main(["compare", str(tmp_path / name), str(tmp_path / name), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"maxtext-nvfp4: {tmp_path / name}: ")
    assert says in error
    assert not (tmp_path / "out").exists()


def test_the_command_line_compares_and_allows(tmp_path, capsys):
    write_record(run("a"), tmp_path / "a.json")
    write_record(run("b", adam_eps="1e-15", **PAPER), tmp_path / "b.json")
    command = ["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "adam_eps: 1e-08 and 1e-15" in capsys.readouterr().err
    assert main([*command, "--allow", "adam_*"]) == 0
    said = capsys.readouterr().out
    assert "The runs also differ in adam_eps: 1e-08 and 1e-15." in said
    assert said.endswith(f"wrote {tmp_path / 'out' / 'report.html'}\n")


def test_a_folder_that_cannot_be_written_is_said_so(tmp_path, capsys):
    write_record(run("a"), tmp_path / "a.json")
    write_record(run("b", **PAPER), tmp_path / "b.json")
    out = tmp_path / "a.json" / "out"
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--out", str(out)]) == 2
    assert "cannot be written (Not a directory); write another folder for --out" in capsys.readouterr().err
