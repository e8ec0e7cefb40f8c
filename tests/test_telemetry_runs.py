"""Telemetry of whole runs through MaxText's loop: meshes, a late switch, and faults that it has to find."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from command_line import start_in
from jax import numpy as jnp
from maxtext.trainers.pre_train import train
from maxtext.utils import max_logging
from maxtext_models import QUICK_FLAGS, load, named, train_loop

from maxtext_nvfp4.integration import sampling
from maxtext_nvfp4.plan import GEMMS
from maxtext_nvfp4.samples import FOLDER, OPERANDS, PRODUCT, Reading, read_samples

EVERY = 2
Samples = dict[int, list[Reading]]


@dataclasses.dataclass
class Run:
    """What a run left.

    Attributes:
      samples: Its files, by step.
      written: Steps whose file was written, in order.
      scalars: Telemetry in MaxText's metrics, by step.
      said: What was logged of it.
    """

    samples: Samples = dataclasses.field(default_factory=dict)
    written: list[int] = dataclasses.field(default_factory=list)
    scalars: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    said: list[str] = dataclasses.field(default_factory=list)


def trained(folder: Path, plant: Callable[[int, dict[str, Any]], None] | None = None, **keys: Any) -> Run:
    """Trains in this process.

    Args:
      folder: Where the run's files go.
      plant: Called before each step with its number and what MaxText's loop keeps on the device.
      **keys: The config's.
    """
    config = load(**{"quantization": "nvfp4", "base_output_directory": str(folder), **keys})
    run = Run()
    iteration, write, log = train.training_loop_iteration, sampling.write_sample, max_logging.log

    def recorded(device: dict[str, Any], python: dict[str, Any], immutable: Any) -> Any:
        step = python["step"]
        if plant:
            plant(step, device)
        metrics = iteration(device, python, immutable)
        scalars = metrics["scalar"].items()
        run.scalars[step] = {tag: float(value) for tag, value in scalars if tag.startswith("nvfp4/decoder/")}
        return metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "training_loop_iteration", recorded)
        patch.setattr(sampling, "write_sample", lambda *args: (run.written.append(args[1]), write(*args)))
        patch.setattr(max_logging, "log", lambda line: (run.said.append(str(line)), log(line)))
        train_loop(config)
    run.samples = read_samples(folder / "tiny" / FOLDER)
    return run


def section(**keys: Any) -> dict[str, Any]:
    return {"recipe": "all_layers", "telemetry": {"every": EVERY}, **keys}


MESHES = {"steps": 4, "dtype": "float32", "nvfp4": section()}
"""In float32 only the order of sums differs between meshes."""


def on(devices: int, **mesh: int) -> dict[str, Any]:
    """Keys of one global batch and the same samples on any number of devices."""
    return {**MESHES, "per_device_batch_size": 4 / devices, **(mesh or {"ici_fsdp_parallelism": devices})}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return trained(tmp_path_factory.mktemp("single"), **on(1)).samples


COUNTED = {"nonfinite": 0.0, "zero_scales": 0.0, "rounded_to_zero": 5e-4, "saturated": 5e-4}
"""Counts and by how much they may differ: two elements of the smallest tensor may lie on a border between codes."""

ERROR = 1e-3
"""By how much all else may differ, relatively, and what one other code does to a product's error is below it."""


def assert_same_samples(found: Samples, expected: Samples) -> None:
    assert list(found) == list(expected) == [1, 3]
    for step, readings in expected.items():
        for ours, theirs in zip(found[step], readings, strict=True):
            head = [(one.step, one.site, one.gemm, one.operand, one.layers) for one in (ours, theirs)]
            assert head[0] == head[1]
            assert ours.values.keys() == theirs.values.keys()
            for stat, values in theirs.values.items():
                tolerance = {"atol": COUNTED[stat], "rtol": 0} if stat in COUNTED else {"rtol": ERROR}
                np.testing.assert_allclose(ours.values[stat], values, err_msg=f"{stat} {ours}", **tolerance)


def train_on(folder: str, mesh: dict[str, int]) -> None:
    run = trained(Path(folder), **on(jax.device_count(), **mesh))
    assert run.written == [1, 3]


@pytest.mark.parametrize(
    ("devices", "mesh"),
    [
        (2, {"ici_fsdp_parallelism": 2}),
        pytest.param(4, {"ici_fsdp_parallelism": 4}, marks=pytest.mark.slow),
        pytest.param(4, {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}, marks=pytest.mark.slow),
    ],
)
def test_samples_do_not_depend_on_the_mesh(
    single: Samples, on_devices: Any, tmp_path: Path, devices: int, mesh: dict[str, int]
) -> None:
    on_devices(devices, train_on, str(tmp_path), mesh)
    assert_same_samples(read_samples(tmp_path / "tiny" / FOLDER), single)


@pytest.mark.slow
def test_of_two_processes_the_first_writes(single: Samples, tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    keys = {**on(2), "enable_checkpointing": False}
    processes = start_in(folders, environment={"XLA_FLAGS": QUICK_FLAGS}, **keys)
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said[0][-3000:]
    assert_same_samples(read_samples(folders[0] / "out" / "tiny" / FOLDER), single)
    assert list(folders[1].rglob(FOLDER)) == []


AT = 3


@pytest.mark.parametrize(
    ("gemms", "scan", "every"),
    [
        ("fprop", True, 2),  # the step of the switch is sampled
        pytest.param("fprop", False, 3, marks=pytest.mark.slow),  # the step before it is
        pytest.param("all", True, 2, marks=pytest.mark.slow),
    ],
)
def test_after_a_switch_only_gemms_in_4_bits_are_sampled(
    tmp_path: Path, gemms: str, scan: bool, every: int
) -> None:
    switch = {"at": AT, "gemms": gemms}
    nvfp4 = {"recipe": "mlp_only", "telemetry": {"every": every}, "switch": switch}
    run = trained(tmp_path, steps=6, scan_layers=scan, nvfp4=nvfp4)
    last = AT if gemms == "all" else 6
    assert list(run.samples) == run.written == [step for step in range(last) if (step + 1) % every == 0]
    for step, readings in run.samples.items():
        left = GEMMS if step < AT else ("dgrad", "wgrad")
        assert [(one.step, one.site, one.gemm, one.operand, one.layers) for one in readings] == [
            (step, f"decoder/layers/mlp/{name}", gemm, operand, (0, 1))
            for name in ("wi_0", "wi_1", "wo")
            for gemm in left
            for operand in (*OPERANDS[gemm], PRODUCT)
        ]
    for step, scalars in run.scalars.items():
        expected = {tag: value for one in run.samples.get(step, []) for tag, value in one.scalars()}
        assert scalars == pytest.approx(expected, rel=1e-5)


FAULTY = 1
"""The layer, of four, that has the faults."""


def set_part(state: Any, part: str, edit: Callable[[jax.Array], jax.Array]) -> None:
    """Replaces a parameter of the faulty layer, in place."""
    leaves = named(state)
    if variable := leaves.get(f"model/decoder/layers/{part}"):
        stacked = variable.get_value()
        value = stacked.at[:, FAULTY].set(edit(stacked[:, FAULTY]))
    else:
        variable = leaves[f"model/decoder/layers_{FAULTY}/{part}"]
        value = edit(variable.get_value())
    variable.set_value(value)


def outlier_in_a_weight(state: Any) -> None:
    set_part(state, "mlp/wi_0/kernel", lambda kernel: kernel.at[7].set(32.0))


def outlier_in_an_activation(state: Any) -> None:
    set_part(state, "post_self_attention_layer_norm/scale", lambda scale: scale.at[7].set(64.0))


def dead(state: Any) -> None:
    for name in ("wi_0", "wi_1", "wo"):
        set_part(state, f"mlp/{name}/kernel", jnp.zeros_like)


def diverged(state: Any) -> None:
    set_part(state, "mlp/wi_0/kernel", lambda kernel: kernel.at[7, 5].set(jnp.nan))


def diverged_above_the_layers(state: Any) -> None:
    scale = named(state)["model/decoder/decoder_norm/scale"]
    scale.set_value(scale.get_value().at[7].set(jnp.nan))


FAULTS: list[Callable[[Any], None]] = [
    outlier_in_a_weight,
    outlier_in_an_activation,
    dead,
    diverged,
    diverged_above_the_layers,
]

Place = tuple[str, str, str, int]
"""Site below the decoder layers, GEMM, operand and layer."""


@dataclasses.dataclass
class Planted:
    """A run in which each fault lasts from just after a sample to the next one, and the first period has none."""

    run: Run

    def step(self, fault: Callable[[Any], None]) -> int:
        """The first sample after a fault was planted."""
        return EVERY * (FAULTS.index(fault) + 2) - 1

    def values(self, stat: str, step: int) -> dict[Place, float]:
        """All that was measured of a statistic."""
        return {
            (one.site.removeprefix("decoder/layers/"), one.gemm, one.operand, layer): value
            for one in self.run.samples[step]
            for layer, value in zip(one.layers, one.values.get(stat, ()), strict=False)
        }

    def found(
        self, fault: Callable[[Any], None], stat: str, stands_out: Callable[[float, float], bool]
    ) -> set[Place]:
        """Where a statistic stands out: by its value without the fault and with it."""
        without, values = self.values(stat, EVERY - 1), self.values(stat, self.step(fault))
        assert values.keys() == without.keys()
        return {place for place, value in values.items() if stands_out(without[place], value)}


@pytest.fixture(
    scope="module", params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["scanned", "unscanned"]
)
def planted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Planted:
    kept: list[Any] = []

    def plant(step: int, device: dict[str, Any]) -> None:
        if step == 0:
            kept.append(jax.tree.map(jnp.copy, device["state"]))
        if step % EVERY == 0:
            device["state"] = jax.tree.map(jnp.copy, kept[0])
        if step >= EVERY:
            FAULTS[step // EVERY - 1](device["state"])

    run = trained(
        tmp_path_factory.mktemp("planted"),
        plant,
        steps=EVERY * (len(FAULTS) + 1),
        base_num_decoder_layers=4,
        scan_layers=request.param,
        abort_on_nan_loss=False,
        # It skips steps that are not finite, so that NaN stays where it was planted.
        nvfp4=section(loss_scale={"mode": "dynamic"}),
    )
    return Planted(run)


def forward(places: set[Place]) -> set[Place]:
    """Without gradients, which all layers below a fault inherit."""
    return {place for place in places if place[2] in ("activation", "weight")}


def at(*names: str, layers: tuple[int, ...] = (FAULTY,)) -> set[Place]:
    """Places by `site gemm operand`."""
    return {(site, gemm, operand, layer) for layer in layers for site, gemm, operand in map(str.split, names)}


def grown(factor: float) -> Callable[[float, float], bool]:
    return lambda without, value: value > factor * without


def alarm(planted: Planted, fault: Callable[[Any], None]) -> list[str]:
    return [line for line in planted.run.said if line.startswith(f"nvfp4: step {planted.step(fault)}: ")]


def test_an_outlier_in_a_weight_stands_out(planted: Planted) -> None:
    weight = at("mlp/wi_0 fprop weight", "mlp/wi_0 dgrad weight")
    larger = planted.found(outlier_in_a_weight, "amax", grown(4))
    assert forward(larger) == weight | at("mlp/wo fprop activation", "mlp/wo wgrad activation")
    lost = planted.found(outlier_in_a_weight, "rounded_to_zero", grown(2))
    assert {place for place in lost if place[2] == "weight"} == weight
    assert {place[3] for place in lost} == {FAULTY}


def test_an_outlier_in_an_activation_stands_out(planted: Planted) -> None:
    larger = planted.found(outlier_in_an_activation, "amax", grown(4))
    activation = at("mlp/wi_0 fprop activation", "mlp/wi_1 fprop activation")
    assert forward(larger) == activation | at(
        "mlp/wi_0 wgrad activation",
        "mlp/wi_1 wgrad activation",
        "mlp/wo fprop activation",
        "mlp/wo wgrad activation",
    )
    lost = planted.found(outlier_in_an_activation, "rounded_to_zero", grown(2))
    assert forward(lost) == activation
    noisy = planted.found(outlier_in_an_activation, "relative_mse", grown(10))
    assert noisy == at("mlp/wo wgrad product")
    [line] = alarm(planted, outlier_in_an_activation)
    assert f": decoder/layers_{FAULTY}/mlp/wo wgrad product: the gradient is 0." in line


def test_a_dead_layer_stands_out(planted: Planted) -> None:
    operands = at(
        *(f"mlp/{name} {gemm} weight" for name in ("wi_0", "wi_1", "wo") for gemm in ("fprop", "dgrad")),
        *(f"mlp/{name} {gemm} gradient" for name in ("wi_0", "wi_1") for gemm in ("dgrad", "wgrad")),
        *(f"mlp/wo {gemm} activation" for gemm in ("fprop", "wgrad")),
    )
    products = at(*(f"mlp/{name} {gemm} product" for name in ("wi_0", "wi_1", "wo") for gemm in GEMMS))
    assert planted.found(dead, "zero_scales", grown(1)) == operands
    assert planted.found(dead, "zero_scales", lambda _, value: value == 1) == operands
    assert planted.found(dead, "amax", lambda without, value: value == 0 < without) == operands
    assert planted.found(dead, "relative_mse", lambda _, value: value == 0) == operands | products


def broken(planted: Planted, fault: Callable[[Any], None]) -> set[Place]:
    return planted.found(fault, "nonfinite", grown(1))


def everything(planted: Planted, operand: str) -> set[Place]:
    return {place for place in planted.values("nonfinite", EVERY - 1) if place[2] == operand}


def test_a_weight_that_diverged_is_named(planted: Planted) -> None:
    """By its one element; and by the activations behind it, while all gradients are lost."""
    weight = at("mlp/wi_0 fprop weight", "mlp/wi_0 dgrad weight")
    behind = {place for place in everything(planted, "activation") if place[3] > FAULTY}
    behind |= at("mlp/wo fprop activation", "mlp/wo wgrad activation")
    assert broken(planted, diverged) == weight | behind | everything(planted, "gradient")
    counts = planted.values("nonfinite", planted.step(diverged))
    assert {counts[place] for place in weight} == {1}
    for place in weight:
        # JSON has no NaN: null, which is read as one.
        assert np.isnan(planted.values("amax", planted.step(diverged))[place])
    site = f"nvfp4/decoder/layers_{FAULTY}/mlp/wi_0/fprop/weight/nonfinite"
    assert planted.run.scalars[planted.step(diverged)][site] == 1
    [line] = alarm(planted, diverged)
    assert f": decoder/layers_{FAULTY}/mlp/wi_0 " in line
    assert " weight: 1 Inf or NaN (and " in line


def test_a_loss_that_diverged_above_the_layers_leaves_only_gradients_broken(planted: Planted) -> None:
    assert broken(planted, diverged_above_the_layers) == everything(planted, "gradient")
