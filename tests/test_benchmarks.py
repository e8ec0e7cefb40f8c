"""The benchmarks: each runs in its quick form, and the page of results is what the results say."""

import copy
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import peer_process  # noqa: E402
import results_page  # noqa: E402
import rounds  # noqa: E402

RESULTS = sorted(results_page.RESULTS.glob("*.json"))

# How trials take turns.


def test_trials_take_turns_and_each_begins_a_round():
    calls: list[str] = []

    def trial(name: str) -> rounds.Trial:
        return lambda: float(calls.append(name) or len(calls))

    times = rounds.interleave({name: trial(name) for name in "abc"}, rounds=3, warmup=1)
    assert "".join(calls) == "abcbcacababc"
    assert times == {"a": [6, 8, 10], "b": [4, 9, 11], "c": [5, 7, 12]}


def test_a_ratio_is_taken_within_a_round():
    # Both are twice as slow in the second round; a quotient of medians would be 1.5 or so.
    assert rounds.ratios([2.0, 4.0, 2.0], [1.0, 2.0, 1.0]) == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert rounds.cell(rounds.spread([3.0, 1.0, 2.0])) == "2.00 (1.00 to 3.00)"


# The page.


def test_the_page_is_what_the_results_say():
    assert results_page.PAGE.read_text() == results_page.page(results_page.RESULTS)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_say_how_they_came_about(path: Path):
    result = json.loads(path.read_text())
    assert path.stem.startswith(result["benchmark"] + "_")
    assert (BENCHMARKS / f"{result['benchmark']}.py").exists()
    assert result["command"][0] == f"benchmarks/{result['benchmark']}.py"
    assert not result["quick"]
    assert not re.search(r'"/|https?:|/home/|/root|/tmp', path.read_text())


def test_the_page_names_missed_goals(tmp_path: Path):
    result = json.loads((results_page.RESULTS / "emulation_overhead_cpu.json").read_text())
    emulated = result["programs"]["emulated"]
    for ratio, words in ((0.59, "Met"), (0.61, "**Missed**")):
        emulated["over_bf16"] = {"median": ratio, "min": 0.5, "max": 0.7}
        (tmp_path / "emulation_overhead_cpu.json").write_text(json.dumps(result))
        text = results_page.page(tmp_path)
        assert f"`emulated` over bf16 at most 0.6: {ratio:.2f} (0.50 to 0.70). {words}." in text


def test_the_page_names_faster_peers():
    row = {
        "seconds": {"median": 1.0, "min": 1.0, "max": 1.0},
        "elements_per_second": 1e9,
        "gigabytes_per_second": 2.0,
        "over_ours": {"median": 1.0, "min": 1.0, "max": 1.0},
        "over_copy": {"median": 5.0, "min": 5.0, "max": 5.0},
        "agreement": None,
    }
    fast = copy.deepcopy(row) | {"over_ours": {"median": 0.9, "min": 0.8, "max": 1.1}}
    figures = {"copy": fast, "maxtext-nvfp4": row, "maxtext-nvfp4, operand": fast, "qwix": row}
    result = {"shape": [16, 32], "peers": {"qwix": "1", "torch": ""}, "cases": {"nearest": figures}}
    text = results_page.quantize_throughput(result)
    assert "torch not installed" in text
    assert "Goal: no peer is faster in any case. Met." in text
    figures["fouroversix"] = fast
    assert "faster: fouroversix at nearest. **Missed**." in results_page.quantize_throughput(result)


# Each in its quick form.


def run(name: str, out: Path, *arguments: str) -> dict[str, Any]:
    importlib.import_module(name).main(["--quick", *arguments, "--json", str(out)])
    return json.loads(out.read_text())


def assert_ratios(ratio: dict[str, float]) -> None:
    assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]


@pytest.mark.parametrize(
    ("name", "arguments", "part", "over"),
    [
        ("emulation_overhead", ("--programs", "emulated"), "programs", "over_bf16"),
        ("telemetry_overhead", (), "steps", "over_off"),
        ("checkpoint_overhead", (), "programs", "over_stock"),
        ("startup_time", ("--programs", "stock"), "programs", "over_stock"),
    ],
)
def test_quick_forms_run(name: str, arguments: tuple[str, ...], part: str, over: str, tmp_path: Path):
    result = run(name, tmp_path / f"{name}_cpu.json", *arguments)
    assert result["benchmark"] == name
    assert result["quick"]
    assert {"devices", "cpu", "cores", "load_average", "load_average_after", "versions"} <= result[
        "machine"
    ].keys()
    for figures in result[part].values():
        assert_ratios(figures[over])
        assert len(figures["all_seconds"]) == result["rounds"] == 1
    assert results_page.SECTIONS[name][0] in results_page.page(tmp_path)


def test_the_quick_form_of_compile_scaling_runs(tmp_path: Path):
    result = run("compile_scaling", tmp_path / "compile_scaling_cpu.json", "--layers", "2", "3")
    assert {(row["program"], row["layers"]) for row in result["growth"]} == {
        (program, layers) for program in ("bf16", "all_layers", "paper") for layers in (2, 3)
    }
    assert len(result["goals"]) == 3
    assert "Growth with depth" in results_page.page(tmp_path)


def test_the_quick_form_of_quantize_throughput_runs(tmp_path: Path):
    """In a process of its own: it loads Transformer Engine where that is installed, and starts PyTorch."""
    out = tmp_path / "quantize_throughput_cpu.json"
    script = str(BENCHMARKS / "quantize_throughput.py")
    subprocess.run([sys.executable, script, "--quick", "--json", str(out)], check=True, timeout=600)
    result = json.loads(out.read_text())
    assert set(result["peers"]) == {"qwix", "transformer_engine", "torch", "torchao", "fouroversix"}
    assert len(result["cases"]) == 6
    for figures in result["cases"].values():
        assert {"copy", "maxtext-nvfp4", "maxtext-nvfp4, operand"} <= figures.keys()
        for row in figures.values():
            assert_ratios(row["over_ours"])
            # A peer whose codes are others does other work, and its time says nothing.
            if row["agreement"]:
                assert row["agreement"]["equal_codes"] > 0.99
    assert "Quantization" in results_page.page(tmp_path)


# Peers in another environment.

_FAKE = """
import json, sys
import numpy as np
print(json.dumps({"versions": {"torch": "1"}, "cases": {"peer": ["nearest"]}}), flush=True)
for line in sys.stdin:
    command, peer, case = line.split()
    if case == "broken":
        sys.exit(3)
    if command == "store":
        np.savez(f"{sys.argv[1]}/{peer}.{case}.0.npz", codes=np.arange(4), scales=np.ones(1))
    print(1 if command == "store" else 0.25, flush=True)
"""


def test_peers_answer_from_a_process_of_their_own(tmp_path: Path):
    (tmp_path / "peers.log").write_text("what it complained about")
    with subprocess.Popen(
        [sys.executable, "-c", _FAKE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        peer = peer_process.PeerProcess(process, tmp_path)
        assert peer.cases == {"peer": ["nearest"]}
        assert peer.seconds("peer", "nearest") == 0.25
        (stored,) = peer.stored("peer", "nearest")
        np.testing.assert_array_equal(stored.codes, np.arange(4))
        with pytest.raises(RuntimeError, match="ended with 3:\nwhat it complained about"):
            peer.seconds("peer", "broken")


def test_peers_may_be_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peer_process, "python", lambda: tmp_path / "none")
    with peer_process.peer_process(tmp_path, compiled=False) as process:
        assert process is None


def test_agreement_counts_scales_and_codes():
    throughput = importlib.import_module("quantize_throughput")
    codes, scales = np.zeros((2, 16), np.uint8), np.ones((2, 1), np.float32)
    other = codes.copy()
    other[0, :8] = 8  # -0 is 0
    other[1, :8] = 9
    found = throughput.agreement(
        (throughput.Stored(codes, scales),), (throughput.Stored(other, np.array([[1], [2]], np.float32)),)
    )
    assert found == {"equal_scales": 0.5, "equal_codes": 0.75}
