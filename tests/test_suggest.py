"""The layers that `suggest` names are those whose weight gradients telemetry found most disturbed."""

import json
import math

import pytest
import yaml

from maxtext_nvfp4.cli import main
from maxtext_nvfp4.recipe import load_recipe
from maxtext_nvfp4.runs.suggest import layer_errors, suggest
from maxtext_nvfp4.samples import FOLDER, Reading, write_sample


def sample(run, step, errors, gemm="wgrad", site="decoder/layers/mlp/wo", operand="product"):
    """A sample with the given relative squared error of each layer."""
    reading = Reading(
        step=step,
        site=site,
        gemm=gemm,
        operand=operand,
        layers=tuple(range(len(errors))),
        values={"relative_mse": tuple(errors)},
    )
    write_sample(run / FOLDER, step, [reading])
    return reading


def test_an_error_is_the_root_of_the_mean_over_sites_and_samples():
    def reading(site, gemm="wgrad", operand="product", layers=(0, 1), values=(0.04, 0.01)):
        return Reading(
            step=0, site=site, gemm=gemm, operand=operand, layers=layers, values={"relative_mse": values}
        )

    found = layer_errors(
        {
            9: [
                reading("decoder/layers/mlp/wi"),
                reading("decoder/layers/mlp/wo", values=(0.12, 0.03)),
                reading("decoder/layers/mlp/wo", gemm="fprop", values=(9.0, 9.0)),
                reading("decoder/layers/mlp/wo", operand="gradient", values=(9.0, 9.0)),
                reading("decoder/logits_dense", layers=(), values=(9.0,)),
            ],
            19: [reading("decoder/layers/mlp/wi", values=(0.08, 0.05))],
        }
    )
    assert list(found) == ["decoder/layers_0", "decoder/layers_1"]
    assert found["decoder/layers_0"] == pytest.approx(math.sqrt((0.04 + 0.12 + 0.08) / 3))
    assert found["decoder/layers_1"] == pytest.approx(math.sqrt((0.01 + 0.03 + 0.05) / 3))


def test_layers_are_ordered_by_number():
    errors = [0.01] * 12
    reading = Reading(
        step=0, site="decoder/layers/a/b", gemm="wgrad", operand="product",
        layers=tuple(range(12)), values={"relative_mse": tuple(errors)},
    )  # fmt: skip
    assert list(layer_errors({0: [reading]}))[-2:] == ["decoder/layers_10", "decoder/layers_11"]


def test_the_planted_layers_become_rules(tmp_path, capsys):
    errors = [0.01] * 20
    errors[3] = errors[18] = 0.09
    errors[19] = math.nan
    sample(tmp_path, 9, errors)
    found = suggest(tmp_path)
    assert found.keep == ("decoder/layers_19", "decoder/layers_3", "decoder/layers_18")
    rules = yaml.safe_load(found.to_yaml())["nvfp4"]
    assert [rule["layers"] for rule in rules["rules"]] == [3, "18..19"]
    assert len(load_recipe(rules).rules) == 2
    assert main(["suggest", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("<- keep in BF16") == 3
    assert "decoder/layers_19       nan  not finite  <- keep in BF16" in said
    assert main(["suggest", str(tmp_path), "--json", "--share", "0.05"]) == 0
    assert json.loads(capsys.readouterr().out)["keep_bf16"] == [19]


def test_only_the_newest_samples_count(tmp_path):
    for step in range(0, 120, 10):
        sample(tmp_path, step, [0.5, 0.01] if step < 20 else [0.01, 0.04])
    found = suggest(tmp_path, share=0.5)
    assert (found.samples, found.steps, found.keep) == (10, (20, 110), ("decoder/layers_1",))
    assert found.spread == pytest.approx(0.2 / 0.15)


def test_errors_that_are_alike_are_said_to_be(tmp_path):
    sample(tmp_path, 9, [0.01] * 8)
    assert "any other choice of layers would do as well" in suggest(tmp_path).to_text()
    sample(tmp_path, 9, [0.01] * 7 + [0.09])
    assert "any other choice" not in suggest(tmp_path).to_text()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda run: None, "no such folder"),
        (
            lambda run: run.mkdir(),
            "no samples in nvfp4_telemetry; train it with nvfp4.telemetry: {every: 100}",
        ),
        (lambda run: sample(run, 9, [0.1], gemm="fprop"), "no relative_mse of wgrad's product"),
    ],
    ids=["absent", "unsampled", "other-gemms"],
)
def test_a_run_without_samples_is_said_so(make, says, tmp_path, capsys):
    make(tmp_path / "run")
    assert main(["suggest", str(tmp_path / "run")]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("share", ["0", "1.5", "x", "-1"])
def test_a_share_is_a_part(share, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["suggest", str(tmp_path), f"--share={share}"])
    assert end.value.code == 2
    assert "not a share" in capsys.readouterr().err
