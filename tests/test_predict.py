"""Predictions against public measurements, against counts by hand, and as the command prints them."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import get_args

import pytest

from maxtext_nvfp4 import cli
from maxtext_nvfp4.doctor.targets import TARGETS
from maxtext_nvfp4.predict import collectives
from maxtext_nvfp4.predict.accuracy import judge
from maxtext_nvfp4.predict.advice import advise
from maxtext_nvfp4.predict.calibration import CALIBRATION, Calibration, accuracy, calibration
from maxtext_nvfp4.predict.hardware import Hardware, hardware, names
from maxtext_nvfp4.predict.kernels import Device
from maxtext_nvfp4.predict.measurements import Run, measurements, speed_ups
from maxtext_nvfp4.predict.prediction import predict
from maxtext_nvfp4.predict.remat import POLICIES, named
from maxtext_nvfp4.predict.step import step
from maxtext_nvfp4.predict.workload import Format, Layout

ROOT = Path(__file__).parents[1]
FOUR, BF16 = ("nvfp4",) * 3, ("bf16",) * 3


def fit_predictor():
    spec = importlib.util.spec_from_file_location("fit_predictor", ROOT / "benchmarks/fit_predictor.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(model, gpu, precision, source="maxtext"):
    found = [m for m in measurements() if isinstance(m, Run) and m.what.startswith(f"{model},")]
    (only,) = [m for m in found if (m.hardware, m.precision, m.source) == (gpu, precision, source)]
    return only


# ---- against public measurements


def test_what_was_not_fitted_is_predicted():
    found = judge(calibration())
    assert found.step_mean <= 0.10
    assert found.ratio_mean <= 0.08
    assert dataclasses.asdict(found) == pytest.approx(dataclasses.asdict(accuracy()), abs=1e-4)


def test_constants_are_fitted_to_at_most_half_of_the_measurements():
    # A GEMM's time with and without quantization is one row of its table.
    rows = {
        (m.source, m.what if isinstance(m, Run) else "", m.hardware, m.precision): m.fitted
        for m in measurements()
    }
    assert len(rows) == 29
    assert sum(rows.values()) <= len(rows) / 2


def test_constants_and_the_table_of_errors_are_what_the_fit_gives():
    module = fit_predictor()
    constants = module.fit()
    assert dataclasses.asdict(constants) == dataclasses.asdict(calibration())
    assert CALIBRATION.read_text() == module.written(constants, judge(constants))
    page = (ROOT / "docs/predict.md").read_text()
    assert page == module.with_table(page, constants), "run benchmarks/fit_predictor.py --write"


def test_the_fit_needs_its_measurements(monkeypatch):
    """Constants that nothing is fitted to stay where they were guessed."""
    module = fit_predictor()
    monkeypatch.setattr(module, "measurements", lambda: [])
    constants = module.fit()
    assert (constants.gemm, constants.quantize["nvfp4"], constants.clock["gb300"]) == (0.7, 2.2, 1.18)


def test_published_rates_are_of_maxtexts_flops():
    """FLOPs a token of published models, attention causal, to four digits."""
    per_token = {"llama3-8b": 51.470e9, "llama3-70b": 449.22e9, "llama3-405b": 2523.96e9}
    for found in measurements():
        if isinstance(found, Run):
            model = found.what.partition(",")[0]
            flops = found.workload.model_flops / found.workload.tokens_per_device
            assert flops == pytest.approx(per_token[model], rel=5e-5)


def test_speed_ups_are_pairs_of_precisions():
    pairs = {
        (s.fast.source, s.fast.what, s.fast.hardware, s.slow.precision, s.fast.precision) for s in speed_ups()
    }
    assert ("maxtext", "llama3-8b, 4 GPUs", "gb300", "fp8", "nvfp4") in pairs
    assert len(pairs) == len(speed_ups()) == 4 + 6 + 3 * 4
    only = next(s for s in speed_ups() if s.fast.source == "maxtext" and s.fast.hardware == "gb300")
    assert only.measured == pytest.approx(2301 / 1759)
    assert only.predicted(calibration()) == pytest.approx(
        only.slow.predicted(calibration()) / only.fast.predicted(calibration())
    )


# ---- counts by hand

PLAIN = Calibration(
    gemm=0.5,
    output=2.0,
    quantize={"nvfp4": 3.0, "fp8": 1.0, "fp8_current": 1.0, "mxfp8": 2.0},
    attention=0.5,
    memory=0.5,
    tensor_parallel=1.0,
    overlap=0.5,
    clock={"toy": 1.0},
)
TOY = Hardware(
    name="toy",
    dense_tflops={"bf16": 1.0, "fp8": 2.0, "nvfp4": 4.0},
    hbm=1e12,
    nvlink=1e11,
    network=1e10,
    exponentials=1e10,
)
DEVICE = Device(hardware=TOY, calibration=PLAIN)


def test_a_gemm_is_its_flops_and_its_output():
    assert DEVICE.gemm("bf16", 10, 20, 30) == pytest.approx(2 * 6000 / 0.5e12 + 200 * 2e-12)
    assert DEVICE.gemm("nvfp4", 10, 20, 30) == pytest.approx(2 * 6000 / 2e12 + 200 * 2e-12)
    faster = Device(hardware=TOY, calibration=dataclasses.replace(PLAIN, clock={"toy": 2.0}))
    assert faster.gemm("fp8", 10, 20, 30) == DEVICE.gemm("fp8", 10, 20, 30) / 2


def test_each_gemm_that_is_quantized_pays_for_its_copy():
    assert DEVICE.quantize(("nvfp4", "nvfp4"), 100) == pytest.approx(300e-12)
    assert DEVICE.quantize(("nvfp4", "bf16"), 100) == pytest.approx(150e-12)
    assert DEVICE.quantize(("bf16", "bf16"), 100) == 0


def test_collectives():
    workload = run("llama3-8b", "gb200", "nvfp4").workload
    weights = workload.parameters
    divided = dataclasses.replace(workload, layout=Layout(fsdp=4), gradient_bytes=4)
    assert collectives.weights(divided, TOY) == pytest.approx(weights * 8 * 3 / 4 / 1e11)
    # Two domains: half of the weights comes from the other, an eighth of that for each GPU of this one.
    across = dataclasses.replace(divided, layout=Layout(fsdp=4, fsdp_across=2))
    assert collectives.weights(across, TOY) == pytest.approx(weights * 8 * (7 / 8 / 1e11 + 1 / 8 / 1e10))
    copied = dataclasses.replace(divided, layout=Layout(data=2, data_across=4), microbatches=3)
    reduced = weights * 2 * 4 * (1 / 2 / 1e11 + 1 / 2 * 3 / 4 / 1e10)
    assert collectives.weights(copied, TOY) == pytest.approx(3 * reduced)
    assert collectives.weights(dataclasses.replace(copied, once_per_step=True), TOY) == pytest.approx(reduced)
    assert collectives.weights(dataclasses.replace(workload, layout=Layout()), TOY) == 0
    tensor = dataclasses.replace(workload, layout=Layout(tensor=2))
    assert collectives.tensor_parallel(tensor, TOY) == pytest.approx(8 * 32768 * 4096 * 2 / 2 / 1e11)
    context = dataclasses.replace(workload, layout=Layout(context=2))
    assert collectives.context_parallel(context, TOY) == pytest.approx(3 * 32768 * 2 * 1024 * 2 / 2 / 1e11)


def timed(workload, **constants):
    return step(workload, TOY, dataclasses.replace(PLAIN, **constants))


def test_what_a_policy_computes_again():
    workload = dataclasses.replace(run("llama3-8b", "gb200", "nvfp4").workload, layout=Layout())
    times = {policy: timed(dataclasses.replace(workload, remat=named(policy))) for policy in POLICIES}
    kept, full = times["minimal_with_context_and_quantization"], times["full"]
    tokens = workload.tokens
    for site, (k, n) in {"wi_0": (4096, 14336), "wo": (14336, 4096), "key": (4096, 1024)}.items():
        again = full.gemms[site] - kept.gemms[site]
        # Nothing needs the result of the MLP's last layer.
        assert again == pytest.approx(0 if site == "wo" else 32 * DEVICE.gemm("nvfp4", tokens, n, k))
    assert times["minimal"].gemms == kept.gemms
    # Activations and weights are quantized twice where their codes are not kept; gradients once.
    inputs = 3 * 4096 + 14336  # of q, k and v; out; both of the MLP's first layers; its last
    weights = sum(linear.k * linear.n for linear in workload.linears)
    gradients = sum(linear.n for linear in workload.linears)
    assert kept.quantization == pytest.approx(32 * 3e-12 * (tokens * (inputs + gradients) + weights))
    assert full.quantization - kept.quantization == pytest.approx(32 * 3e-12 * (tokens * inputs + weights))
    assert times["minimal_with_context"].quantization == full.quantization
    product = 8192 * 4096 * tokens
    assert kept.attention == pytest.approx(32 * (7 * product / 0.5e12 + 2 * product / 256 / 1e10))
    assert full.attention == pytest.approx(32 * (9 * product / 0.5e12 + 3 * product / 256 / 1e10))
    assert times["minimal"].attention == full.attention


def test_delayed_scaling_quantizes_for_each_layer():
    workload = run("llama3-8b", "gb200", "nvfp4").workload
    one, shared = (timed(workload.in_format(wanted)).quantization for wanted in ("fp8", "fp8_current"))
    assert one - shared == pytest.approx(32 * 1e-12 * workload.tokens * 3 * 4096)


def test_layers_in_bf16_are_not_quantized():
    workload = run("llama3-8b", "gb200", "nvfp4").workload
    half = dataclasses.replace(
        workload,
        linears=tuple(dataclasses.replace(found, formats={FOUR: 16, BF16: 16}) for found in workload.linears),
    )
    all_, none = timed(workload), timed(workload.in_format("bf16"))
    mixed = timed(half)
    assert mixed.quantization == pytest.approx(all_.quantization / 2)
    for site, seconds in mixed.gemms.items():
        assert seconds == pytest.approx((all_.gemms[site] + none.gemms[site]) / 2)


def test_collectives_hide_behind_computation_and_no_more():
    workload = dataclasses.replace(run("llama3-8b", "gb200", "nvfp4").workload, layout=Layout(fsdp=4))
    found = timed(workload)
    moved = collectives.weights(workload, TOY)
    assert (found.collectives_exposed, found.collectives_hidden) == (0, pytest.approx(moved))
    nothing = timed(workload, overlap=0.0)
    assert (nothing.collectives_exposed, nothing.collectives_hidden) == (pytest.approx(moved), 0)
    assert nothing.seconds - found.seconds == pytest.approx(moved)


def test_a_pipeline_waits():
    workload = dataclasses.replace(
        run("llama3-8b", "gb200", "bf16", "megatron").workload,
        layout=Layout(pipeline=4, interleaved=2),
        microbatches=8,
    )
    found = timed(workload)
    rest = found.seconds - found.pipeline_bubble - found.optimizer - found.collectives_exposed
    assert found.pipeline_bubble == pytest.approx(3 / (2 * 8) * rest)


def test_unfused_attention_moves_its_scores():
    workload = run("llama3-8b", "gb200", "nvfp4").workload
    fused, not_ = timed(workload), timed(dataclasses.replace(workload, fused_attention=False))
    scores = 32 * 32768 * 8192 * 32  # of all layers and heads, the whole square
    assert not_.attention - fused.attention > 12 * scores * 2 / 0.5e12 > 0
    flops, traffic = 6 * 2 * 128 * scores, 12 * scores * 2
    assert not_.attention == pytest.approx(flops / 0.5e12 + scores / 1e10 + traffic / 0.5e12)
    assert not_.gemms == fused.gemms


def test_the_parts_are_the_step():
    for found in measurements():
        if isinstance(found, Run):
            time = predict(found.workload, hardware(found.hardware), found.precision).time
            assert sum(time.parts.values()) == pytest.approx(time.seconds)
            assert min(time.parts.values()) >= 0


def test_hardware_is_what_doctor_knows():
    assert set(cli._HARDWARE) == set(names())
    assert set(cli._PRECISIONS) == set(get_args(Format))
    assert set(names()) == set(TARGETS) == set(calibration().clock)
    for name in names():
        assert hardware(name).peak("nvfp4") > hardware(name).peak("mxfp8") > hardware(name).peak("bf16")
        # The clock says that a GPU gets more of its peak, not that it passes it.
        assert calibration().clock[name] * max(calibration().gemm, calibration().attention) < 1


# ---- advice


def test_advice_is_faster_and_fits():
    found = run("llama3-8b", "gb200", "nvfp4")
    mixed = dataclasses.replace(
        found.workload,
        linears=tuple(
            dataclasses.replace(one, formats={FOUR: 28, BF16: 4}) for one in found.workload.linears
        ),
        one_hot=True,
        sequences=1.0,
        remat=named("full"),
    )
    now = predict(mixed, hardware("gb200"), "nvfp4")
    given = advise(now)
    assert now.fits
    assert [advice.gain for advice in given] == sorted((advice.gain for advice in given), reverse=True)
    changes = {advice.change: advice for advice in given}
    assert {"nvfp4.recipe=all_layers", "use_iota_embed=false", "per_device_batch_size=2"} < set(changes)
    for advice in given:
        assert advice.gain > 1.01
        assert advice.prediction.fits
    best = predict(mixed.in_format("nvfp4"), hardware("gb200"), "nvfp4")
    assert changes["nvfp4.recipe=all_layers"].gain == pytest.approx(now.time.seconds / best.time.seconds)


def test_advice_for_what_does_not_fit_makes_it_fit():
    found = run("llama3-8b", "gb200", "nvfp4")
    now = predict(dataclasses.replace(found.workload, sequences=8.0), hardware("gb200"), "nvfp4")
    assert not now.fits
    given = advise(now)
    assert given
    assert all(advice.prediction.fits for advice in given)


# ---- the command


@pytest.fixture
def command(capsys):
    """Exit status, output and errors of a command."""

    def run(name, *words):
        try:
            status = cli.main(["predict", str(ROOT / "configs" / name), *words])
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


def told(command, *words):
    status, out, err = command(*words, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_json(command):
    found = told(command, "llama3-8b.yml", "--hardware", "gb200", "--gpus", "8")
    assert [one["precision"] for one in found["precisions"]] == ["nvfp4", "fp8", "mxfp8", "bf16"]
    four, fp8, _, bf16 = found["precisions"]
    for one in found["precisions"]:
        assert sum(one["breakdown"].values()) == pytest.approx(one["step_seconds"])
        assert sum(one["gemms_by_site"].values()) == pytest.approx(one["breakdown"]["gemms"])
        assert sum(one["memory"].values()) == pytest.approx(one["memory_gib"])
        assert one["tokens_per_second_per_gpu"] == pytest.approx(32768 / one["step_seconds"])
        assert one["mfu"] == pytest.approx(one["model_tflops_per_gpu"] / one["peak_tflops"])
        assert one["model_tflops_per_gpu"] == pytest.approx(
            51.470e9 * 32768 / 1e12 / one["step_seconds"], rel=1e-4
        )
    assert four["speedup_over_bf16"] == pytest.approx(bf16["step_seconds"] / four["step_seconds"])
    assert four["speedup_over_fp8"] == pytest.approx(fp8["step_seconds"] / four["step_seconds"])
    assert bf16["speedup_over_bf16"] == 1
    assert found["uncertainty"]["measurements"] > 10
    assert "causal" in found["flops_convention"]


def test_the_recipe_counts(command):
    all_, paper = (
        told(
            command,
            "qwen3-8b.yml",
            f"nvfp4.recipe={recipe}",
            "--hardware",
            "b300",
            "--gpus",
            "8",
            "--precision",
            "nvfp4",
        )
        for recipe in ("all_layers", "paper")
    )
    assert all_["precisions"][0]["step_seconds"] < paper["precisions"][0]["step_seconds"]


def test_a_mesh_that_does_not_fit_is_changed_and_named(command):
    words = ("--hardware", "b200", "--gpus", "8", "--precision", "nvfp4")
    found = told(command, "llama3-8b.yml", "ici_fsdp_parallelism=3", *words)
    assert found["changed"] == ["ici_fsdp_parallelism"]
    assert found["parallelism"]["ici_fsdp_parallelism"] == 8
    assert (
        "does not fit the machine: ici_fsdp_parallelism to 8."
        in command("llama3-8b.yml", "ici_fsdp_parallelism=3", *words)[1]
    )


def test_text_says_what_and_how_sure(command):
    text = command("demo-cpu.yml", "--hardware", "gb300", "--gpus", "2")[1]
    for words in ("2 x GB300", "over bf16", "quantization", "Uncertainty: over 16", "starting kernels"):
        assert words in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["llama3-8b.yml", "--hardware", "gb200", "--gpus", "6"],
            "--gpus: got 6: a node of GB200 has 4; write 4 or 8",
        ),
        (["llama3-8b.yml", "--hardware", "h100", "--gpus", "8"], "invalid choice: 'h100'"),
        (["llama3-8b.yml", "--hardware", "gb200", "--gpus", "0"], "got 0: not a count"),
        (
            ["llama3-8b.yml", "--hardware", "b200", "--gpus", "8", "--precision", "fp4"],
            "got fp4: not a precision",
        ),
        (
            ["llama3-8b.yml", "--hardware", "b200", "--gpus", "8", "--precision", ""],
            "got nothing: not a precision",
        ),
        (
            ["llama3-8b.yml", "--hardware", "gb200", "--gpus", "3"],
            "over 3 devices (fsdp); write sizes of the ici_* and dcn_* axes that divide it, or take another number of GPUs",
        ),
        (
            ["llama3-8b.yml", "--hardware", "b200", "--gpus", "8", "--precision", "fp8,fp8"],
            "got fp8: given twice",
        ),
        (
            ["llama3-8b.yml", "quantization=", "--hardware", "b200", "--gpus", "8"],
            "quantization is not set, so the section would have no effect",
        ),
        (
            ["llama3-8b.yml", "dtype=float32", "--hardware", "b200", "--gpus", "8"],
            "dtype: got float32: only steps that compute in BF16 are predicted; write bfloat16",
        ),
        (
            ["llama3-8b.yml", "max_target_length=8200", "--hardware", "b200", "--gpus", "8"],
            "wgrad: M=32800 (tokens on one device) is not a multiple of 64",
        ),
        (
            ["llama3-8b.yml", "per_device_batch_size=1.5", "--hardware", "b200", "--gpus", "8"],
            "would have 1.5 of them; write 1 or 2",
        ),
        (
            ["llama3-8b.yml", "remat_policy=minimal_offloaded", "--hardware", "b200", "--gpus", "8"],
            "remat_policy: got minimal_offloaded",
        ),
        (
            ["llama3-8b.yml", "--hardware", "gb200", "--gpus", "76"],
            "--gpus: got 76: 19 nodes do not divide into 2 NVLink domains equally, as JAX demands; write 72 or 80",
        ),
    ],
)
def test_refusals(command, words, says):
    status, out, err = command(*words)
    assert (status, out) == (2, "")
    assert says in err


def test_a_count_that_is_far_too_large_is_refused_at_once(command):
    status, _, err = command("llama3-8b.yml", "--hardware", "gb200", "--gpus", "99999")
    assert status == 2
    assert "--gpus: got 99999: a node of GB200 has 4; write " in err


def test_refusals_of_the_mesh_speak_of_gpus(command):
    status, _, err = command("llama3.1-70b.yml", "--hardware", "gb200", "--gpus", "72")
    assert status == 2
    assert "write --gpus 64, or ici_fsdp_parallelism=8 ici_data_parallelism=9" in err


def test_part_of_a_sequence_is_refused(command):
    words = ("per_device_batch_size=0.5", "--hardware", "gb200", "--gpus", "8")
    status, _, err = command("llama3-8b.yml", *words)
    assert status == 2
    assert "per_device_batch_size: got 0.5: the devices that share sequences would have 0.5" in err
    assert "write 1\n" in err
    both = told(command, "llama3-8b.yml", "ici_tensor_parallelism=2", *words, "--precision", "nvfp4")
    assert both["tokens_per_gpu"] == 4096


def test_advice_on_the_batch_is_of_a_microbatch():
    found = run("llama3-8b", "gb200", "nvfp4")
    step = dataclasses.replace(found.workload, sequences=1.0, microbatches=4, remat=named("full"))
    changes = {advice.change for advice in advise(predict(step, hardware("gb200"), "nvfp4"))}
    assert {change for change in changes if "batch" in change} == {"per_device_batch_size=2"}


def test_a_config_without_a_recipe(command, tmp_path):
    config = tmp_path / "stock.yml"
    config.write_text("base_config: base.yml\nmodel_name: llama3-8b\ntokenizer_path: none\n")
    where = (str(config), "--hardware", "b200", "--gpus", "8")
    status, out, err = command(*where)
    assert (status, out) == (2, "")
    assert "quantization: got '': there is no NVFP4 recipe to predict; write quantization=nvfp4, or" in err
    (only,) = told(command, *where, "--precision", "fp8")["precisions"]
    assert only["speedup_over_bf16"] > 1
