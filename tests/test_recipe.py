"""The recipe section: presets, overlay, every refusal, YAML in and out."""

import importlib.util
import re
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.recipe import (
    PRESETS,
    RECIPES,
    LossScale,
    Recipe,
    Rule,
    Switch,
    Telemetry,
    flag_rows,
    load_recipe,
    show,
)

BF16_EVERYWHERE = Rule(module="*", fprop="bf16", dgrad="bf16", wgrad="bf16")
SCOPES = {
    "paper": (0.15, ()),
    "all_layers": (0, ()),
    "bf16": (0, (BF16_EVERYWHERE,)),
    "mlp_only": (0, (Rule(module="w[io]*", fprop="nvfp4", dgrad="nvfp4", wgrad="nvfp4"), BF16_EVERYWHERE)),
    "nemotron": (
        0.15,
        (Rule(module="*[aA]ttention*/*", fprop="bf16", dgrad="bf16", wgrad="bf16"),),
    ),
}

FINGERPRINTS = {
    "all_layers": "ab81b1001317",
    "bf16": "c9aa309d7b7e",
    "mlp_only": "25d96a983517",
    "nemotron": "b49ffa0f53ab",
    "paper": "076453f9e410",
}


def refusal(section):
    with pytest.raises(ConfigError) as caught:
        load_recipe(section)
    return str(caught.value)


def test_presets_are_the_files_of_the_folder():
    assert PRESETS == ("all_layers", "bf16", "mlp_only", "nemotron", "paper")
    assert {path.stem for path in RECIPES.iterdir()} == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_exactly_the_published_scope(name):
    last, rules = SCOPES[name]
    assert load_recipe({"recipe": name}) == Recipe(
        recipe=name,
        backend="auto",
        bf16_first_layers=0,
        bf16_last_layers=last,
        rules=rules,
        weight_scaling="2d",
        hadamard="wgrad",
        stochastic_rounding="gradients",
        format="nvfp4",
        seed=0,
    )


@pytest.mark.parametrize("name", PRESETS)
def test_preset_names_its_source(name):
    comment, keys = (RECIPES / f"{name}.yml").read_text().split("bf16_first_layers", 1)
    assert re.search(r"2509\.25149|NVIDIA", comment)
    assert "#" not in keys


@pytest.mark.parametrize("section", [None, {}, {"recipe": "paper"}])
def test_the_default_is_paper(section):
    assert load_recipe(section) == load_recipe({"recipe": "paper"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("backend", "emulated"),
        ("backend", "xla"),
        ("bf16_first_layers", 2),
        ("bf16_first_layers", 0.1),
        ("bf16_last_layers", 0),
        ("bf16_last_layers", 0.999),
        ("weight_scaling", "1d"),
        ("hadamard", "none"),
        ("stochastic_rounding", "none"),
        ("format", "mxfp4"),
        ("seed", 2**32 - 1),
    ],
)
def test_a_key_replaces_the_preset_s_and_nothing_else(key, value):
    paper = load_recipe(None)
    assert getattr(paper, key) != value
    assert load_recipe({key: value}) == paper.model_copy(update={key: value})


@pytest.mark.parametrize("mode", [False, "off"])
def test_yaml_reads_a_bare_off_as_a_switch(mode):
    assert load_recipe(scale(mode=mode)).loss_scale.mode == "off"


def test_a_nested_section_goes_over_the_one_of_a_file(write):
    file = write(load_recipe(scale(mode="static", init=64)).to_yaml())
    merged = load_recipe({"recipe": file, **scale(init=128)}).loss_scale
    assert (merged.mode, merged.init, merged.backoff) == ("static", 128, 0.5)


def test_the_loss_scale_changes_no_bits_hence_no_fingerprint():
    assert load_recipe(scale(mode="static", init=2)).fingerprint == load_recipe(None).fingerprint


def test_rules_go_before_those_of_the_preset():
    own = [{"module": "mlp/wo", "layers": 0, "fprop": "bf16"}]
    assert load_recipe({"recipe": "nemotron", "rules": own}).rules == (
        Rule(module="mlp/wo", layers=0, fprop="bf16"),
        *SCOPES["nemotron"][1],
    )


@pytest.mark.parametrize(
    ("written", "layers"), [(0, (0, 0)), (5, (5, 5)), ("0..3", (0, 3)), ("7..7", (7, 7)), (None, None)]
)
def test_layer_ranges(written, layers):
    assert Rule.model_validate({"module": "*", "layers": written, "fprop": "bf16"}).layers == layers


def test_the_recipe_is_frozen():
    with pytest.raises(ValidationError):
        load_recipe(None).seed = 1


def rule(**keys):
    return {"rules": [{"module": "mlp/*", "fprop": "bf16"} | keys]}


def scale(**keys):
    return {"loss_scale": keys}


WRONG = [
    # section, key, what was given, what to write
    ({"sede": 3}, "nvfp4.sede", "3", "seed"),
    ({"bf16_last": 4}, "nvfp4.bf16_last", "4", "bf16_last_layers"),
    ({"stochastic": "none"}, "nvfp4.stochastic", "none", "stochastic_rounding"),
    ({"zzz": 1}, "nvfp4.zzz", "1", "one of recipe, backend, on_unsupported, bf16_first_layers"),
    ({5: "paper"}, "nvfp4.5", "5", "one of recipe, backend"),
    ({"recipe": "papre"}, "nvfp4.recipe", "papre", "paper"),
    ({"recipe": "MLP_only"}, "nvfp4.recipe", "MLP_only", "mlp_only"),
    ({"recipe": None}, "nvfp4.recipe", "null", "paper"),
    ({"recipe": True}, "nvfp4.recipe", "true", "paper"),
    ({"recipe": ["paper"]}, "nvfp4.recipe", "[paper]", "paper"),
    ({"recipe": "no/such.yml"}, "nvfp4.recipe", "no/such.yml", "another path, or one of all_layers, bf16"),
    ({"backend": "xia"}, "nvfp4.backend", "xia", "xla"),
    ({"backend": "emulate"}, "nvfp4.backend", "emulate", "emulated"),
    ({"backend": None}, "nvfp4.backend", "null", "auto or transformer_engine or emulated or xla"),
    ({"backend": "xla", "format": "mxfp4"}, "nvfp4.format", "mxfp4", "backend: emulated, or format: nvfp4"),
    ({"backend": "te"}, "nvfp4.backend", "te", "auto or transformer_engine"),
    (
        {"backend": "transformer_engine", "format": "mxfp4"},
        "nvfp4.format",
        "mxfp4",
        "backend: emulated, or format: nvfp4",
    ),
    ({"on_unsupported": True}, "nvfp4.on_unsupported", "true", "error or bf16 or no_hadamard"),
    ({"bf16_first_layers": -1}, "nvfp4.bf16_first_layers", "-1", "0 or more"),
    ({"bf16_first_layers": True}, "nvfp4.bf16_first_layers", "true", "a number of layers such as 4"),
    ({"bf16_first_layers": "2"}, "nvfp4.bf16_first_layers", "'2'", "2 without quotes"),
    ({"bf16_first_layers": None}, "nvfp4.bf16_first_layers", "null", "a number of layers such as 4"),
    ({"bf16_last_layers": 1.0}, "nvfp4.bf16_last_layers", "1.0", "1"),
    ({"bf16_last_layers": 0.0}, "nvfp4.bf16_last_layers", "0.0", "0"),
    ({"bf16_last_layers": 4.0}, "nvfp4.bf16_last_layers", "4.0", "4"),
    ({"bf16_last_layers": 1.5}, "nvfp4.bf16_last_layers", "1.5", "a fraction such as 0.15, or an integer"),
    ({"bf16_last_layers": -0.15}, "nvfp4.bf16_last_layers", "-0.15", "a fraction such as 0.15"),
    ({"bf16_last_layers": float("nan")}, "nvfp4.bf16_last_layers", ".nan", "a fraction such as 0.15"),
    ({"bf16_last_layers": float("inf")}, "nvfp4.bf16_last_layers", ".inf", "a fraction such as 0.15"),
    ({"bf16_last_layers": "0.15"}, "nvfp4.bf16_last_layers", "'0.15'", "0.15 without quotes"),
    ({"bf16_last_layers": "1e-1"}, "nvfp4.bf16_last_layers", "1e-1", "0.1 without quotes"),
    ({"bf16_last_layers": "15%"}, "nvfp4.bf16_last_layers", "15%", "or a fraction of them such as 0.15"),
    ({"bf16_last_layers": [4]}, "nvfp4.bf16_last_layers", "[4]", "a number of layers such as 4"),
    ({"weight_scaling": "2D"}, "nvfp4.weight_scaling", "2D", "2d"),
    ({"weight_scaling": 2}, "nvfp4.weight_scaling", "2", "2d"),
    ({"weight_scaling": "blocks"}, "nvfp4.weight_scaling", "blocks", "2d or 1d"),
    ({"hadamard": "WGRAD"}, "nvfp4.hadamard", "WGRAD", "wgrad"),
    ({"hadamard": False}, "nvfp4.hadamard", "false", "none"),
    ({"hadamard": "fprop"}, "nvfp4.hadamard", "fprop", "wgrad or all or none"),
    ({"stochastic_rounding": True}, "nvfp4.stochastic_rounding", "true", "gradients"),
    ({"stochastic_rounding": "gradient"}, "nvfp4.stochastic_rounding", "gradient", "gradients"),
    ({"format": "fp8"}, "nvfp4.format", "fp8", "nvfp4 or mxfp4"),
    ({"format": "nvfp-4"}, "nvfp4.format", "nvfp-4", "nvfp4"),
    ({"switch": {"at": 0}}, "nvfp4.switch.at", "0", "1 or more, or a fraction such as 0.82"),
    ({"switch": {"at": -3}}, "nvfp4.switch.at", "-3", "1 or more, or a fraction such as 0.82"),
    ({"switch": {"at": 1.5}}, "nvfp4.switch.at", "1.5", "a fraction such as 0.82, or an integer"),
    ({"switch": {"at": 820.0}}, "nvfp4.switch.at", "820.0", "820"),
    ({"switch": {"at": 0.0}}, "nvfp4.switch.at", "0.0", "a fraction such as 0.82"),
    ({"switch": {"at": float("nan")}}, "nvfp4.switch.at", ".nan", "a fraction such as 0.82"),
    ({"switch": {"at": "decay"}}, "nvfp4.switch.at", "decay", "a step such as 820, or lr_decay"),
    ({"switch": {"at": "0.82"}}, "nvfp4.switch.at", "'0.82'", "0.82 without quotes"),
    ({"switch": {"at": True}}, "nvfp4.switch.at", "true", "a step such as 820, or lr_decay"),
    ({"switch": {"at": None}}, "nvfp4.switch.at", "null", "a step such as 820, or lr_decay"),
    ({"switch": {}}, "nvfp4.switch.at", "nothing", "a fraction such as 0.82, an integer >= 1, or lr_decay"),
    ({"switch": True}, "nvfp4.switch", "true", "a mapping such as {at: 0.82, gemms: fprop}"),
    ({"switch": 0.82}, "nvfp4.switch", "0.82", "a mapping such as {at: 0.82, gemms: fprop}"),
    ({"switch": {"at": 9, "gemms": "dgrad"}}, "nvfp4.switch.gemms", "dgrad", "fprop or all"),
    ({"switch": {"at": 9, "to": "fp8"}}, "nvfp4.switch.to", "fp8", "bf16"),
    ({"switch": {"at": 9, "gemm": "all"}}, "nvfp4.switch.gemm", "all", "gemms"),
    ({"seed": -1}, "nvfp4.seed", "-1", "an integer from 0 to 4294967295"),
    ({"seed": 2**32}, "nvfp4.seed", "4294967296", "an integer from 0 to 4294967295"),
    ({"seed": 1.0}, "nvfp4.seed", "1.0", "an integer from 0 to 4294967295"),
    ({"seed": "7"}, "nvfp4.seed", "'7'", "7 without quotes"),
    ({"seed": False}, "nvfp4.seed", "false", "an integer such as 0"),
    ({"rules": {"module": "*"}}, "nvfp4.rules", "{module: '*'}", "a list of rules such as [{module: mlp/*"),
    ({"rules": "mlp/*"}, "nvfp4.rules", "mlp/*", "a list of rules such as [{module: mlp/*"),
    ({"rules": None}, "nvfp4.rules", "null", "a list of rules such as [{module: mlp/*"),
    ({"rules": ["mlp/*"]}, "nvfp4.rules.1", "mlp/*", "a list of rules such as [{module: mlp/*"),
    ({"rules": [{"module": "*"}]}, "nvfp4.rules.1", "{module: '*'}", "one or more of fprop, dgrad and wgrad"),
    ({"rules": [{"fprop": "bf16"}]}, "nvfp4.rules.1.module", "nothing", "a glob pattern such as mlp/*"),
    (rule(module=""), "nvfp4.rules.1.module", "''", "a glob pattern such as mlp/*"),
    (rule(module=3), "nvfp4.rules.1.module", "3", "a glob pattern such as mlp/*"),
    (rule(fprop="mxfp4"), "nvfp4.rules.1.fprop", "mxfp4", "nvfp4"),
    (rule(dgrad="BF16"), "nvfp4.rules.1.dgrad", "BF16", "bf16"),
    (rule(wgrad=16), "nvfp4.rules.1.wgrad", "16", "bf16"),
    (rule(wgrad="fp8"), "nvfp4.rules.1.wgrad", "fp8", "nvfp4 or bf16"),
    (rule(layer=3), "nvfp4.rules.1.layer", "3", "layers"),
    (rule(modul="a"), "nvfp4.rules.1.modul", "a", "module"),
    (rule(**{"7": 1}), "nvfp4.rules.1.7", "1", "one of module, layers, fprop, dgrad, wgrad"),
    (rule(layers=-1), "nvfp4.rules.1.layers", "-1", "a layer such as 0, or a range such as 0..3"),
    (rule(layers="-4..-1"), "nvfp4.rules.1.layers", "-4..-1", "a layer such as 0"),
    (rule(layers="3..0"), "nvfp4.rules.1.layers", "3..0", "0..3"),
    (rule(layers="10..9"), "nvfp4.rules.1.layers", "10..9", "9..10"),
    (rule(layers="4-7"), "nvfp4.rules.1.layers", "4-7", "4..7"),
    (rule(layers="10-9"), "nvfp4.rules.1.layers", "10-9", "9..10"),
    (rule(layers="4...7"), "nvfp4.rules.1.layers", "4...7", "4..7"),
    (rule(layers="5"), "nvfp4.rules.1.layers", "'5'", "5"),
    (rule(layers=5.0), "nvfp4.rules.1.layers", "5.0", "5"),
    (rule(layers=True), "nvfp4.rules.1.layers", "true", "0..3"),
    (rule(layers=[0, 3]), "nvfp4.rules.1.layers", "[0, 3]", "0..3"),
    (rule(layers="last"), "nvfp4.rules.1.layers", "last", "0..3"),
    (rule(layers="0..3 "), "nvfp4.rules.1.layers", "'0..3 '", "0..3"),
    (
        {"loss_scale": "dynamic"},
        "nvfp4.loss_scale",
        "dynamic",
        "a mapping such as {mode: static, init: 1024}",
    ),
    ({"loss_scale": None}, "nvfp4.loss_scale", "null", "a mapping such as {mode: static, init: 1024}"),
    (scale(mode="dynamics"), "nvfp4.loss_scale.mode", "dynamics", "dynamic"),
    (scale(mode=True), "nvfp4.loss_scale.mode", "true", "dynamic or static or off"),
    (scale(initial=2), "nvfp4.loss_scale.initial", "2", "init"),
    (scale(init=1000), "nvfp4.loss_scale.init", "1000", "a power of two such as 1024"),
    (scale(init=0), "nvfp4.loss_scale.init", "0", "a power of two such as 32768"),
    (scale(init=-2), "nvfp4.loss_scale.init", "-2", "a power of two such as 32768"),
    (scale(init=float("inf")), "nvfp4.loss_scale.init", ".inf", "a power of two such as 32768"),
    (scale(init="32768"), "nvfp4.loss_scale.init", "'32768'", "32768 without quotes"),
    (scale(init=True), "nvfp4.loss_scale.init", "true", "a power of two such as 32768"),
    (scale(max=3), "nvfp4.loss_scale.max", "3", "a power of two such as 4"),
    (scale(max=10**30), "nvfp4.loss_scale.max", f"{10**30}", f"a power of two such as {2**100}"),
    (scale(init=1e300), "nvfp4.loss_scale.init", "1.0e+300", f"a power of two such as {2**100}"),
    (scale(init=10**16), "nvfp4.loss_scale.init", f"{10**16}", f"a power of two such as {2**53}"),
    (scale(growth=2**100 + 1), "nvfp4.loss_scale.growth", f"{2**100 + 1}", f"such as {2**100}"),
    (scale(backoff=1e-300), "nvfp4.loss_scale.backoff", "1.0e-300", f"a power of two such as {2.0**-100}"),
    (scale(init=0.5), "nvfp4.loss_scale.init", "0.5", "a power of two from 1 to 2**100"),
    (scale(max=2.0**101), "nvfp4.loss_scale.max", "2.535301200456459e+30", "from 1 to 2**100"),
    (scale(growth=1), "nvfp4.loss_scale.growth", "1", "2, or a larger power of two"),
    (scale(growth=0.5), "nvfp4.loss_scale.growth", "0.5", "2, or a larger power of two"),
    (scale(growth=1.5), "nvfp4.loss_scale.growth", "1.5", "a power of two such as 2"),
    (scale(backoff=1), "nvfp4.loss_scale.backoff", "1", "0.5, or a smaller power of two"),
    (scale(backoff=0), "nvfp4.loss_scale.backoff", "0", "a power of two such as 0.5"),
    (scale(growth_interval=0), "nvfp4.loss_scale.growth_interval", "0", "an integer of 1 or more"),
    (scale(growth_interval=2**31), "nvfp4.loss_scale.growth_interval", f"{2**31}", "from 1 to 2147483647"),
    (scale(growth_interval=1.5), "nvfp4.loss_scale.growth_interval", "1.5", "an integer of 1 or more"),
    (
        scale(max_consecutive_skips=-1),
        "nvfp4.loss_scale.max_consecutive_skips",
        "-1",
        "an integer of 1 or more",
    ),
    (scale(init=64, max=32), "nvfp4.loss_scale", "{init: 64, max: 32}", "a max of 64 or more"),
    ({"telemetry": 5}, "nvfp4.telemetry", "5", "a mapping such as {every: 100}"),
    ({"telemetry": {"every": 0}}, "nvfp4.telemetry.every", "0", "an integer of 1 or more"),
    ({"telemetry": {"evry": 5}}, "nvfp4.telemetry.evry", "5", "every"),
    ({"telemetry": {"stats": "amax"}}, "nvfp4.telemetry.stats", "amax", "all, or a list such as [amax,"),
    ({"telemetry": {"stats": ["amx"]}}, "nvfp4.telemetry.stats", "[amx]", "amax"),
    ({"telemetry": {"stats": []}}, "nvfp4.telemetry.stats", "[]", "all, or a list"),
    ({"telemetry": {"layers": "3..1"}}, "nvfp4.telemetry.layers", "3..1", "1..3"),
]


@pytest.mark.parametrize(("section", "key", "value", "write"), WRONG, ids=lambda part: str(part)[:40])
def test_a_wrong_section_says_what_and_why_and_the_fix(section, key, value, write):
    message = refusal(section)
    assert message.startswith(f"{key}: got {value}: ")
    why, _, fix = message.removeprefix(f"{key}: got {value}: ").partition("; write ")
    assert why
    assert fix.startswith(write) if len(write) < 12 else write in fix
    assert "\n" not in message
    assert not re.search(r"pydantic|validation error|Input should|input_type", message)


def test_every_fault_has_its_line_and_rules_count_from_one():
    section = {
        "weight_scaling": "2D",
        "rules": [{"module": "mlp/*", "fprop": "bf16"}, {"module": "*", "fprop": "fp8", "layers": "2..1"}],
        "sede": 1,
    }
    assert refusal(section).splitlines() == [
        "nvfp4.rules.2.layers: got 2..1: the range runs backwards; write 1..2",
        "nvfp4.rules.2.fprop: got fp8: no such choice; write nvfp4 or bf16",
        "nvfp4.weight_scaling: got 2D: no such choice; write 2d",
        "nvfp4.sede: got 1: no such key; write seed",
    ]


def test_the_chain_of_the_validator_is_not_shown():
    with pytest.raises(ConfigError) as caught:
        load_recipe({"seed": "x"})
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("section", ["paper", ["paper"], 3, True])
def test_a_section_is_a_mapping(section):
    assert refusal(section) == (
        f"nvfp4: got {show(section)}: not a mapping of keys; write nvfp4: {{recipe: paper}}"
    )


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.yml"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


COMPLETE = """\
bf16_first_layers: 1
bf16_last_layers: 2
rules:
  - {module: mlp/wo, layers: 1..2, wgrad: bf16}
weight_scaling: 1d
hadamard: none
stochastic_rounding: none
format: mxfp4
"""


def test_a_recipe_file(write):
    path = write(COMPLETE + "seed: 9\nbackend: emulated\n")
    assert load_recipe({"recipe": path, "hadamard": "wgrad"}) == Recipe(
        recipe=path,
        backend="emulated",
        bf16_first_layers=1,
        bf16_last_layers=2,
        rules=(Rule(module="mlp/wo", layers="1..2", wgrad="bf16"),),
        weight_scaling="1d",
        hadamard="wgrad",
        stochastic_rounding="none",
        format="mxfp4",
        seed=9,
    )


@pytest.mark.parametrize("key", list(yaml.safe_load(COMPLETE)))
def test_a_recipe_file_is_complete(write, key):
    keys = yaml.safe_load(COMPLETE)
    del keys[key]
    path = write(yaml.safe_dump(keys))
    assert refusal({"recipe": path, key: yaml.safe_load(COMPLETE)[key]}).startswith(
        f"{path}: {key}: got nothing: the key is required; write "
    )


def test_all_missing_keys_are_named(write):
    path = write("seed: 1\n")
    assert [line.split(": ")[1] for line in refusal({"recipe": path}).splitlines()] == list(
        yaml.safe_load(COMPLETE)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: [\nseed: 1\n", "nvfp4.recipe: got PATH: not valid YAML (line 3, column 1: "),
        (
            "rules:\n - {module: *, fprop: bf16}\n",
            "nvfp4.recipe: got PATH: not valid YAML (line 2, column 14: ",
        ),
        ("seed: \x00", "nvfp4.recipe: got PATH: not valid YAML (unacceptable character"),
        ("", "PATH: got null: not a mapping of keys; write keys such as hadamard: wgrad"),
        ("- seed", "PATH: got [seed]: not a mapping of keys; write keys such as hadamard: wgrad"),
        (
            COMPLETE + "recipe: paper",
            "PATH: recipe: got paper: a recipe file is complete and starts from no other",
        ),
        (COMPLETE + "sede: 1", "PATH: sede: got 1: no such key; write seed"),
        (
            COMPLETE + "backend: xla",
            "PATH: format: got mxfp4: backend xla has no MXFP4; write backend: emulated",
        ),
    ],
)
def test_a_wrong_recipe_file_is_named_with_the_line(write, text, message):
    path = write(text)
    assert refusal({"recipe": path}).startswith(message.replace("PATH", path))


def test_a_recipe_file_that_cannot_be_read(tmp_path):
    assert f"nvfp4.recipe: got {tmp_path}: the file cannot be read (" in refusal({"recipe": f"{tmp_path}/"})
    (tmp_path / "latin.yml").write_bytes(b"# \xe9\n")
    assert "the file cannot be read ('utf-8' codec" in refusal({"recipe": str(tmp_path / "latin.yml")})


PRECISIONS = st.sampled_from([None, "nvfp4", "bf16"])
RULES = st.builds(
    lambda module, layers, gemms: {
        key: value
        for key, value in {"module": module, "layers": layers, **gemms}.items()
        if value is not None
    },
    st.sampled_from(["*", "mlp/*", "self_attention/query"])
    | st.text(alphabet=" *[]{}:#'\"-?!&%@/\\\n\té\u2028~0x", min_size=1, max_size=8),
    st.none()
    | st.integers(0, 200)
    | st.tuples(st.integers(0, 9), st.integers(0, 200)).map(lambda ends: f"{ends[0]}..{sum(ends)}"),
    st.fixed_dictionaries(dict.fromkeys(("fprop", "dgrad", "wgrad"), PRECISIONS)).filter(
        lambda gemms: any(gemms.values())
    ),
)
COUNTS = st.integers(0, 500) | st.floats(0, 1, exclude_min=True, exclude_max=True)
SECTIONS = st.fixed_dictionaries(
    {},
    optional={
        "recipe": st.sampled_from(PRESETS),
        "backend": st.sampled_from(["auto", "emulated"]),
        "bf16_first_layers": COUNTS,
        "bf16_last_layers": COUNTS,
        "rules": st.lists(RULES, max_size=3),
        "weight_scaling": st.sampled_from(["2d", "1d"]),
        "hadamard": st.sampled_from(["wgrad", "none"]),
        "stochastic_rounding": st.sampled_from(["gradients", "none"]),
        "format": st.sampled_from(["nvfp4", "mxfp4"]),
        "switch": st.fixed_dictionaries(
            {
                "at": st.integers(1)
                | st.floats(0, 1, exclude_min=True, exclude_max=True)
                | st.just("lr_decay")
            },
            optional={"gemms": st.sampled_from(["fprop", "all"]), "to": st.just("bf16")},
        ),
        "seed": st.integers(0, 2**32 - 1),
    },
)


@given(section=SECTIONS)
def test_yaml_round_trip(section, tmp_path_factory):
    recipe = load_recipe(section)
    path = tmp_path_factory.getbasetemp() / "round_trip.yml"
    path.write_text(recipe.to_yaml(), encoding="utf-8")
    again = load_recipe({"recipe": str(path)})
    assert again.model_copy(update={"recipe": recipe.recipe}) == recipe
    assert again.fingerprint == recipe.fingerprint


def test_to_yaml_is_readable():
    section = {
        "recipe": "bf16",
        "rules": [{"module": "mlp/wo", "layers": "0..3", "wgrad": "nvfp4"}],
        "seed": 4,
    }
    assert load_recipe(section).to_yaml() == textwrap.dedent(
        f"""\
        # Resolved from recipe bf16, fingerprint {load_recipe(section).fingerprint}
        backend: auto
        on_unsupported: error
        bf16_first_layers: 0
        bf16_last_layers: 0
        rules:
        - module: mlp/wo
          layers: 0..3
          wgrad: nvfp4
        - module: '*'
          fprop: bf16
          dgrad: bf16
          wgrad: bf16
        weight_scaling: 2d
        hadamard: wgrad
        stochastic_rounding: gradients
        format: nvfp4
        seed: 4
        loss_scale:
          mode: dynamic
          init: 32768
          growth_interval: 2000
          growth: 2
          backoff: 0.5
          max: 16777216
          max_consecutive_skips: 20
        """
    )


def test_fingerprints_of_the_presets_do_not_drift():
    assert {name: load_recipe({"recipe": name}).fingerprint for name in PRESETS} == FINGERPRINTS


@pytest.mark.parametrize(
    "change",
    [
        {"bf16_first_layers": 1},
        {"bf16_last_layers": 0.16},
        {"rules": [{"module": "*", "fprop": "bf16"}]},
        {"rules": [{"module": "*", "dgrad": "bf16"}]},
        {"rules": [{"module": "*", "layers": 0, "dgrad": "bf16"}]},
        {"weight_scaling": "1d"},
        {"hadamard": "none"},
        {"stochastic_rounding": "none"},
        {"format": "mxfp4"},
        {"seed": 1},
        {"on_unsupported": "bf16"},
        {"switch": {"at": 0.82}},
    ],
)
def test_what_determines_bits_changes_the_fingerprint(change):
    assert load_recipe(change).fingerprint != load_recipe(None).fingerprint


def test_every_key_of_the_switch_is_in_the_fingerprint():
    switches = [
        {"at": 0.82},
        {"at": 0.83},
        {"at": 82},
        {"at": "lr_decay"},
        {"at": 0.82, "gemms": "all"},
        None,
    ]
    assert len({load_recipe({"switch": switch}).fingerprint for switch in switches}) == len(switches)


def test_name_backend_and_spelling_do_not_change_the_fingerprint():
    paper = load_recipe(None).fingerprint
    assert load_recipe({"backend": "xla"}).fingerprint == paper
    assert load_recipe({"telemetry": {"every": 5}}).fingerprint == paper
    assert load_recipe({"recipe": "all_layers", "bf16_last_layers": 0.15}).fingerprint == paper
    one, range_of_one = ({"rules": [{"module": "*", "layers": x, "fprop": "bf16"}]} for x in (5, "5..5"))
    assert load_recipe(one).fingerprint == load_recipe(range_of_one).fingerprint


def test_flag_rows_cover_the_schema():
    rows = {key: (values, default, meaning) for key, values, default, meaning in flag_rows()}
    nested = {f"rules[].{name}" for name in Rule.model_fields}
    nested |= {f"loss_scale.{name}" for name in LossScale.model_fields}
    nested |= {f"switch.{name}" for name in Switch.model_fields}
    nested |= {f"telemetry.{name}" for name in Telemetry.model_fields}
    assert set(rows) == set(Recipe.model_fields) | nested
    assert rows["switch"][1] == "absent"
    assert rows["switch.at"][1] == "required"
    assert rows["bf16_last_layers"][:2] == ("an integer >= 0, or a fraction such as 0.15", "0.15")
    assert rows["weight_scaling"][:2] == ("2d or 1d", "2d")
    assert rows["recipe"][:2] == (
        "all_layers, bf16, mlp_only, nemotron, paper, or the path of a YAML file",
        "paper",
    )
    assert rows["rules[].module"][1] == "required"
    assert rows["loss_scale.init"][:2] == ("a power of two", "32768")
    assert all(values and default and meaning.endswith(".") for values, default, meaning in rows.values())


@pytest.fixture(scope="module")
def flag_table():
    path = Path(__file__).parent.parent / "scripts" / "flag_table.py"
    spec = importlib.util.spec_from_file_location("flag_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_flag_table_is_written_and_checked(flag_table, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- flags -->\nstale\n<!-- /flags -->\nafter\n")
    with pytest.raises(SystemExit, match="out of date"):
        flag_table.main(["--check"], readme)
    assert "stale" in readme.read_text()
    flag_table.main([], readme)
    flag_table.main(["--check"], readme)
    text = readme.read_text()
    assert text.startswith("before\n<!-- flags -->\n\n| key | values | default | meaning |\n| --- |")
    assert "| `nvfp4.seed` | an integer from 0 to 2**32 - 1 | `0` | Seed of stochastic rounding. |\n" in text
    assert text.endswith("\n<!-- /flags -->\nafter\n")


def test_the_flag_table_needs_its_place(flag_table, tmp_path):
    readme = tmp_path / "README.md"
    with pytest.raises(SystemExit, match="does not exist"):
        flag_table.main(["--check"], readme)
    readme.write_text("no markers\n")
    with pytest.raises(SystemExit, match="one pair of"):
        flag_table.main([], readme)
