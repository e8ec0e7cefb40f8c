"""Wrong inputs at the command line: exit status 2, one message that names key, value and fix, nothing written."""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml

from maxtext_nvfp4 import cli

ROOT = Path(__file__).parents[1]

GOOD: dict[str, Any] = {
    "base_config": "base.yml",
    "run_name": "bad",
    "quantization": "nvfp4",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "decoder_block": "llama2",
    "base_emb_dim": 64,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 128,
    "head_dim": 16,
    "vocab_size": 256,
    "base_num_decoder_layers": 4,
    "max_target_length": 64,
    "per_device_batch_size": 4,
    "dataset_type": "synthetic",
    "steps": 2,
    "enable_checkpointing": True,
    "save_checkpoint_on_completion": False,
    "log_config": False,
    "jax_cache_dir": "",
}
"""A config that `explain` takes; each case changes it."""

BOTH, TRAIN, EXPLAIN = ("train", "explain"), ("train",), ("explain",)
ABSENT = object()


@dataclasses.dataclass(frozen=True)
class Case:
    """A wrong input.

    Attributes:
      says: What the message must contain: the key, what was given, what to write.
      keys: Changes to the file; a value of `ABSENT` removes the key.
      arguments: `key=value` arguments.
      text: The whole file instead; None where there is no such file.
      name: The file's name.
      commands: Commands that must refuse it. A mistake that only the machine of a run shows is not `explain`'s.
      files: Further files, by name.
    """

    says: tuple[str, ...]
    keys: dict[str, Any] = dataclasses.field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    text: str | None = ""
    name: str = "config.yml"
    commands: tuple[str, ...] = BOTH
    files: dict[str, str] = dataclasses.field(default_factory=dict)


def key(*says: str, commands: tuple[str, ...] = BOTH, **keys: Any) -> Case:
    """A wrong MaxText key."""
    return Case(says, keys=keys, commands=commands)


def recipe(*says: str, **section: Any) -> Case:
    """A wrong key of the section `nvfp4:`."""
    return Case(says, keys={"nvfp4": section})


def rule(*says: str, **fields: Any) -> Case:
    """A wrong first rule."""
    return recipe(*says, rules=[fields])


def argument(*says: str, give: str) -> Case:
    """A wrong argument after the file."""
    return Case(says, arguments=(give,))


COMPLETE = {
    "bf16_first_layers": 0,
    "bf16_last_layers": 1,
    "rules": [],
    "weight_scaling": "2d",
    "hadamard": "wgrad",
    "stochastic_rounding": "gradients",
    "format": "nvfp4",
}


def recipe_file(*says: str, text: str) -> Case:
    """A wrong recipe file of the user's own."""
    return Case(says, keys={"nvfp4": {"recipe": "DIR/mine.yml"}}, files={"mine.yml": text})


CASES = {
    # Unknown keys, with near misses.
    "unknown-key": key("quantisation", "nvfp4", "write quantization", quantisation="nvfp4"),
    "unknown-key-plural": key("scan_layer", "true", "scan_layers", scan_layer=True),
    "unknown-key-far": key("zzz", "1", "base.yml", zzz=1),
    "unknown-argument": argument("stepz", "3", "write steps", give="stepz=3"),
    "recipe-key-at-top": key("hadamard", "none", "nvfp4: {hadamard", hadamard="none"),
    "unknown-recipe-key": recipe("nvfp4.recpie", "paper", "write recipe", recpie="paper"),
    "unknown-recipe-argument": argument("nvfp4.hadmard", "none", "hadamard", give="nvfp4.hadmard=none"),
    "number-as-key": key("3", "4", "base.yml", **{"3": 4}),
    # Wrong types.
    "steps-text": key("steps", "many", "an integer", steps="many"),
    "steps-null": key("steps", "null", "an integer", steps=None),
    "steps-mapping": argument("steps", "{x: 1}", "an integer", give="steps.x=1"),
    "switch-text": key("scan_layers", "maybe", "true", scan_layers="maybe"),
    "number-text": key("learning_rate", "fast", "a number", learning_rate="fast"),
    "number-of-two-types": key("per_device_batch_size", "four", "a number", per_device_batch_size="four"),
    "list-text": key("mlp_activations", "silu", "a list", mlp_activations="silu"),
    "axis-text": key("dcn_fsdp_parallelism", "all", "an integer", dcn_fsdp_parallelism="all"),
    "section-list": key("nvfp4", "[paper]", "{recipe: paper}", nvfp4=["paper"]),
    "section-text": key("nvfp4", "paper", "{recipe: paper}", nvfp4="paper"),
    "section-number": argument("nvfp4", "4", "{recipe: paper}", give="nvfp4=4"),
    "layers-text": recipe("nvfp4.bf16_last_layers", "four", "such as 4", bf16_last_layers="four"),
    "layers-quoted": recipe("nvfp4.bf16_last_layers", "'2'", "2 without quotes", bf16_last_layers="2"),
    "hadamard-switch": recipe("nvfp4.hadamard", "true", "write wgrad", hadamard=True),
    "rules-text": recipe("nvfp4.rules", "mlp/*", "a list of rules", rules="mlp/*"),
    "rules-mapping": recipe("nvfp4.rules", "module: mlp/*", "a list of rules", rules={"module": "mlp/*"}),
    "seed-fraction": recipe("nvfp4.seed", "1.5", "an integer", seed=1.5),
    # Impossible values.
    "steps-negative": key("steps", "-5", "a number at least -1", steps=-5),
    "steps-zero": key("steps", "0", "1 or more", steps=0),
    "batch-zero": key("per_device_batch_size", "0", "above 0", per_device_batch_size=0),
    "batch-negative": key("per_device_batch_size", "-1", "above 0", per_device_batch_size=-1),
    "sequence-zero": key("max_target_length", "0", "above 0", max_target_length=0),
    "layers-zero": key("base_num_decoder_layers", "0", "above 0", base_num_decoder_layers=0),
    "vocabulary-negative": key("vocab_size", "-1", "above 0", vocab_size=-1),
    "accumulation-zero": key(
        "gradient_accumulation_steps", "0", "a number above 0", gradient_accumulation_steps=0
    ),
    "bf16-layers-negative": recipe("nvfp4.bf16_last_layers", "-1", "0 or more", bf16_last_layers=-1),
    "bf16-fraction-above-1": recipe("nvfp4.bf16_last_layers", "1.5", "0.15", bf16_last_layers=1.5),
    "bf16-layers-beyond-model": recipe("nvfp4.bf16_last_layers", "9", "at most 4", bf16_last_layers=9),
    "bf16-layers-all": recipe("nvfp4.bf16_last_layers", "4", "recipe: bf16", bf16_last_layers=4),
    "bf16-layers-meet": recipe(
        "nvfp4.bf16_last_layers",
        "bf16_first_layers: 2",
        "leave a layer",
        bf16_first_layers=2,
        bf16_last_layers=2,
    ),
    "seed-negative": recipe("nvfp4.seed", "-1", "0 to 4294967295", seed=-1),
    "seed-large": recipe("nvfp4.seed", "4294967296", "0 to 4294967295", seed=2**32),
    # The late switch.
    "switch-at-zero": recipe("nvfp4.switch.at", "0", "1 or more", switch={"at": 0}),
    "switch-above-1": recipe("nvfp4.switch.at", "1.5", "such as 0.82", switch={"at": 1.5}),
    "switch-negative": recipe("nvfp4.switch.at", "-3", "1 or more", switch={"at": -3}),
    "switch-typo": recipe("nvfp4.switch.at", "decay", "or lr_decay", switch={"at": "decay"}),
    "switch-on": recipe("nvfp4.switch.at", "true", "or lr_decay", switch={"at": True}),
    "switch-after-the-run": recipe(
        "nvfp4.switch.at", "2", "whose last step is 1", "a step below 2", switch={"at": 2}
    ),
    "switch-before-the-run": recipe("nvfp4.switch.at", "0.4", "a larger fraction", switch={"at": 0.4}),
    "switch-gemms": recipe("nvfp4.switch.gemms", "dgrad", "fprop or all", switch={"at": 1, "gemms": "dgrad"}),
    "switch-to": recipe("nvfp4.switch.to", "fp8", "write bf16", switch={"at": 1, "to": "fp8"}),
    "switch-cosine": recipe("nvfp4.switch.at", "cosine", "lr_schedule_type: wsd", switch={"at": "lr_decay"}),
    "switch-without-a-constant-phase": key(
        "nvfp4.switch.at",
        "lr_decay",
        "no constant phase",
        lr_schedule_type="wsd",
        learning_rate_schedule_steps=10,
        wsd_decay_steps_fraction=0.9,
        nvfp4={"switch": {"at": "lr_decay"}},
    ),
    "switch-beyond-steps": key(
        "nvfp4.switch.at",
        "step 900",
        lr_schedule_type="wsd",
        learning_rate_schedule_steps=1000,
        nvfp4={"switch": {"at": "lr_decay"}},
    ),
    "switch-of-nothing": recipe(
        "nvfp4.switch", "no fprop GEMM in 4 bits", "no switch", recipe="bf16", switch={"at": 1}
    ),
    "telemetry-and-a-compiled-step": key(
        "compiled_trainstep_file",
        "needs a second one",
        'compiled_trainstep_file: ""',
        compiled_trainstep_file="step.pickle",
        nvfp4={"telemetry": {}},
    ),
    "telemetry-and-bf16-accumulation": key(
        "shard_optimizer_over_data",
        "sums in BF16",
        "shard_optimizer_over_data: false",
        shard_optimizer_over_data=True,
        gradient_accumulation_steps=2,
        nvfp4={"telemetry": {}},
    ),
    "switch-compiled-elsewhere": key(
        "compiled_trainstep_file",
        "step.pickle",
        'compiled_trainstep_file: ""',
        compiled_trainstep_file="step.pickle",
        nvfp4={"switch": {"at": 1}},
    ),
    # Choices that are none.
    "weight-scaling": recipe("nvfp4.weight_scaling", "3d", "2d or 1d", weight_scaling="3d"),
    "stochastic-rounding": recipe(
        "nvfp4.stochastic_rounding",
        "weights",
        "gradients or gradients_and_activations or none",
        stochastic_rounding="weights",
    ),
    "hadamard-of-fprop": recipe("nvfp4.hadamard", "fprop", "wgrad or all or none", hadamard="fprop"),
    "format-fp8": recipe("nvfp4.format", "fp8", "nvfp4 or mxfp4", format="fp8"),
    "backend-typo": recipe("nvfp4.backend", "emulate", "write emulated", backend="emulate"),
    "mode-typo": key("quantization", "nvfp", "write nvfp4", quantization="nvfp"),
    "mode-number": key("quantization", "4", "nvfp4", quantization=4),
    "mode-upper-case": key("quantization", "NVFP4", "nvfp4", quantization="NVFP4"),
    "mode-list": key("quantization", "[nvfp4]", "write nvfp4", quantization=["nvfp4"]),
    "model-name": key("model_name", "llama3-9b", "llama3-8b", model_name="llama3-9b", decoder_block=ABSENT),
    "decoder-block": key("decoder_block", "llama9", "llama2", decoder_block="llama9"),
    "hardware": key("hardware", "cuda", "gpu_multiprocess", hardware="cuda"),
    "attention": key("attention", "flash3", "write flash", attention="flash3"),
    "remat-policy": key(
        "remat_policy", "minimal_context", "minimal_with_context", remat_policy="minimal_context"
    ),
    "activation": key("mlp_activations", "liner", "write linear", mlp_activations=["silu", "liner"]),
    "optimizer": key("opt_type", "adam", "adamw", opt_type="adam"),
    "dataset-type": key("dataset_type", "parquet", "tfds", dataset_type="parquet"),
    "schedule": key("lr_schedule_type", "linear", "cosine", lr_schedule_type="linear"),
    # The section without the mode, and modes that exclude each other.
    "section-without-mode": key(
        "nvfp4", "{recipe: paper}", "quantization: nvfp4", quantization=ABSENT, nvfp4={"recipe": "paper"}
    ),
    "section-with-empty-mode": key(
        "nvfp4", "{recipe: paper}", "quantization: nvfp4", quantization="", nvfp4={"recipe": "paper"}
    ),
    "section-with-another-mode": key(
        "nvfp4", "quantization is fp8", "quantization: nvfp4", quantization="fp8", nvfp4={"recipe": "paper"}
    ),
    "no-recipe-to-explain": key("quantization", "int8", "nvfp4", quantization="int8", commands=EXPLAIN),
    "with-qwix": key(
        "use_qwix_quantization", "true", "use_qwix_quantization: false", use_qwix_quantization=True
    ),
    "with-manual-quantization": key(
        "use_manual_quantization", "true", "use_manual_quantization: false", use_manual_quantization=True
    ),
    "with-quant-cfg": key("quant_cfg_path", "x.json", "quant_cfg_path: ''", quant_cfg_path="x.json"),
    "with-te-gmm": key(
        "te_gmm_quantization", "te_mxfp8", "te_gmm_quantization: ''", te_gmm_quantization="te_mxfp8"
    ),
    "with-te-gemm-overlap": key(
        "te_comm_gemm_overlap", "mlp", "te_comm_gemm_overlap: disabled", te_comm_gemm_overlap="mlp"
    ),
    "with-quantized-cache": key("quantize_kvcache", "true", "quantize_kvcache: false", quantize_kvcache=True),
    "with-m3": key("use_m3_model", "true", "use_m3_model: false", use_m3_model=True),
    "with-diloco": key("enable_diloco", "true", "enable_diloco: false", enable_diloco=True),
    "with-batch-split": key(
        "use_batch_split_schedule", "true", "use_batch_split_schedule: false", use_batch_split_schedule=True
    ),
    "with-pipeline": key(
        "ici_pipeline_parallelism", "2", "ici_pipeline_parallelism: 1", ici_pipeline_parallelism=2
    ),
    "with-pipeline-across-slices": key(
        "dcn_pipeline_parallelism", "2", "dcn_pipeline_parallelism: 1", dcn_pipeline_parallelism=2
    ),
    "with-explicit-sharding": key("shard_mode", "explicit", "shard_mode: auto", shard_mode="explicit"),
    "with-fp8-activations": key("dtype", "float8_e4m3fn", "dtype: bfloat16", dtype="float8_e4m3fn"),
    "with-fp16-activations": key("dtype", "float16", "dtype: bfloat16", dtype="float16"),
    "with-fp8-weights": key(
        "weight_dtype", "float8_e5m2", "weight_dtype: float32", weight_dtype="float8_e5m2"
    ),
    "dtype-typo": key("dtype", "bf16", "dtype: bfloat16", dtype="bf16"),
    "xla-mxfp4": recipe("nvfp4.format", "mxfp4", "backend: emulated", format="mxfp4", backend="xla"),
    # Rules.
    "rule-matches-nothing": rule(
        "nvfp4.rules.1", "attn/query", "self_attention/query", module="attn/query", fprop="bf16"
    ),
    "rule-out-of-range": rule("nvfp4.rules.1", "2..9", "0..3", module="mlp/*", layers="2..9", fprop="bf16"),
    "rule-runs-backwards": rule(
        "nvfp4.rules.1.layers", "3..1", "1..3", module="mlp/*", layers="3..1", fprop="bf16"
    ),
    "rule-layers-list": rule(
        "nvfp4.rules.1.layers", "[0, 3]", "0..3", module="mlp/*", layers=[0, 3], fprop="bf16"
    ),
    "rule-of-the-head": rule(
        "nvfp4.rules.1", "logits_dense", "output head", module="*logits_dense", fprop="nvfp4"
    ),
    "rule-without-gemm": rule("nvfp4.rules.1", "mlp/*", "fprop: bf16", module="mlp/*"),
    "rule-precision": rule("nvfp4.rules.1.fprop", "fp8", "nvfp4 or bf16", module="mlp/*", fprop="fp8"),
    "rule-unknown-key": rule("nvfp4.rules.1.modul", "mlp/*", "write module", modul="mlp/*", fprop="bf16"),
    "rule-shadowed": recipe(
        "nvfp4.rules.2",
        "mlp/wo",
        "rule 1",
        rules=[{"module": "*", "fprop": "bf16"}, {"module": "mlp/wo", "fprop": "nvfp4"}],
    ),
    "rule-by-index": argument("nvfp4.rules", "'0'", "a list of rules", give="nvfp4.rules.0.fprop=bf16"),
    # Recipes.
    "recipe-typo": recipe("nvfp4.recipe", "papr", "write paper", recipe="papr"),
    "recipe-number": recipe("nvfp4.recipe", "3", "write paper", recipe=3),
    "recipe-file-missing": recipe("nvfp4.recipe", "missing/r.yml", "another path", recipe="missing/r.yml"),
    "recipe-file-a-directory": recipe("nvfp4.recipe", "DIR", "another path", recipe="DIR/"),
    "recipe-file-not-yaml": recipe_file("nvfp4.recipe", "line 1", "hadamard: wgrad", text="hadamard: [wgrad"),
    "recipe-file-a-list": recipe_file("mine.yml", "[paper]", "hadamard: wgrad", text="- paper"),
    "recipe-file-incomplete": recipe_file(
        "mine.yml: hadamard",
        "nothing",
        "wgrad",
        text=yaml.safe_dump({name: value for name, value in COMPLETE.items() if name != "hadamard"}),
    ),
    "recipe-file-unknown-key": recipe_file(
        "mine.yml: hadmard", "none", "write hadamard", text=yaml.safe_dump({**COMPLETE, "hadmard": "none"})
    ),
    "recipe-file-based-on-another": recipe_file(
        "mine.yml: recipe", "paper", "without this one", text=yaml.safe_dump({**COMPLETE, "recipe": "paper"})
    ),
    # Sizes that do not divide into blocks.
    "head-dim": key("self_attention/query", "N=40", "{module: self_attention/query", head_dim=10),
    "mlp-dim": key("mlp/wi_0", "N=120", "{module: mlp/wi_0", base_mlp_dim=120),
    "emb-dim": key("mlp/wi_0", "K=72", "{module: mlp/wi_0", base_emb_dim=72),
    "tokens": key("M=63 (tokens)", "16", "wgrad: bf16", max_target_length=63, per_device_batch_size=1),
    "tokens-mxfp4": key(
        "M=16 (tokens)",
        "32",
        "wgrad: bf16",
        max_target_length=16,
        per_device_batch_size=1,
        nvfp4={"format": "mxfp4"},
    ),
    # The config file.
    "file-missing": Case(("config.yml", "no such file", "configs/demo-cpu.yml"), text=None),
    "file-a-directory": Case(
        ("folder.yml", "a directory", "configs/demo-cpu.yml"), text=None, name="folder.yml"
    ),
    "file-not-yml": Case((".json", "ends in .yml", "configs/demo-cpu.yml"), name="config.json"),
    "file-yaml-ending": Case((".yaml", "ends in .yml", "configs/demo-cpu.yml"), name="config.yaml"),
    "file-first": Case(("steps=3", "before the key=value pairs", "configs/demo-cpu.yml"), name="steps=3"),
    "file-invalid-yaml": Case(
        ("config.yml", "line 2, column", "one on each line"), text="steps: 1\n  bad: [\n"
    ),
    "file-empty": Case(("config.yml", "empty", "base_config: base.yml"), text="\n"),
    "file-a-list": Case(("config.yml", "a list", "base_config: base.yml"), text="- base.yml\n"),
    "file-a-sentence": Case(("just words", "no such MaxText option", "base.yml"), text="just words\n"),
    "file-binary": Case(("config.yml", "not UTF-8", "base_config: base.yml"), text="\udcff\udcfe\n"),
    "file-key-twice": Case(("config.yml", "steps", "one on each line"), text="steps: 1\nsteps: 2\n"),
    "base-missing": key("base_config", "bse.yml", "base_config: base.yml", base_config="bse.yml"),
    "base-list": key("base_config", "[base.yml]", "base_config: base.yml", base_config=["base.yml"]),
    "base-itself": key("base_config", "config.yml is based on itself", "rename", base_config="config.yml"),
    "unknown-variable": key(
        "run_name", "NOT_SET_ANYWHERE", "not found", run_name="${oc.env:NOT_SET_ANYWHERE}"
    ),
    # Arguments.
    "argument-without-value": argument("steps", "without a value", "key=value", give="steps"),
    "argument-without-key": argument("=3", "without a value", "key=value", give="=3"),
    "argument-bad-yaml": argument(
        "nvfp4.rules", "[{module: mlp", "in quotes", give="nvfp4.rules=[{module: mlp/*"
    ),
    "argument-with-dashes": argument("--steps=3", "unrecognized", "usage", give="--steps=3"),
    # MaxText's own refusals.
    "mesh-of-the-wrong-size": key(
        "ICI parallelism 3", "devices", "1", ici_fsdp_parallelism=3, commands=TRAIN
    ),
    "mesh-with-two-open-axes": key(
        "ici_data_parallelism", "-1", "a number", ici_data_parallelism=-1, ici_fsdp_parallelism=-1
    ),
    "slices-that-are-not-there": key(
        "DCN parallelism", "one slice", "", dcn_data_parallelism=2, commands=TRAIN
    ),
    "head-counts": key("num_kv_heads", "GQA", "", base_num_query_heads=3),
    "preset-changed": Case(
        ("base_emb_dim", "model config", "override_model_config=True"),
        keys={"model_name": "llama3-8b"},
        arguments=("base_emb_dim=128",),
    ),
    "two-checkpoints": key(
        "load_parameters_path",
        "load_full_state_path",
        "At most one",
        load_parameters_path="DIR",
        load_full_state_path="DIR",
    ),
    "grain-without-files": key("dataset_type=grain", "grain_train_files", "set", dataset_type="grain"),
    "model-scale": key("parameter scale", "power of two", "base_mlp_dim", global_parameter_scale=3),
    # What only a run needs.
    "data-folder-missing": key(
        "dataset_path", "/no/data", "a path", dataset_type="tfds", dataset_path="/no/data", commands=TRAIN
    ),
    "data-set-missing": key(
        "dataset_name",
        "corpus:1.0.0",
        "a path",
        dataset_type="tfds",
        dataset_path="DIR",
        dataset_name="corpus:1.0.0",
        commands=TRAIN,
    ),
    "prepared-data-missing": key(
        "dataset_name",
        "corpus:1.0.0",
        "a path",
        dataset_type="grain",
        grain_file_type="tfrecord",
        dataset_path="DIR",
        dataset_name="corpus:1.0.0",
        commands=TRAIN,
    ),
    "data-files-missing": key(
        "grain_train_files",
        "/no/*.array_record",
        "a path",
        dataset_type="grain",
        grain_train_files="/no/*.array_record",
        commands=TRAIN,
    ),
    "tokenizer-missing": key(
        "tokenizer_path",
        "/no/t.model",
        "a path",
        dataset_type="hf",
        hf_path="json",
        tokenizer_path="/no/t.model",
        commands=TRAIN,
    ),
    "checkpoint-missing": key(
        "load_parameters_path", "/no/items", "a path", load_parameters_path="/no/items", commands=TRAIN
    ),
    "kernel-for-gpus": key(
        "attention", "cudnn_flash_te", "dot_product", attention="cudnn_flash_te", commands=TRAIN
    ),
    "mode-without-its-library": key(
        "quantization", "te_nvfp4", "Transformer Engine", quantization="te_nvfp4", commands=TRAIN
    ),
    "no-distributed-job": key(
        "skip_jax_distributed_system", "false", "JOB_INDEX", skip_jax_distributed_system=False, commands=TRAIN
    ),
}

RUNS = [
    pytest.param(command, case, id=f"{name}-{command}")
    for name, case in CASES.items()
    for command in case.commands
]


def write(case: Case, folder: Path) -> list[str]:
    """Puts the case's files into a folder; returns the arguments after the command."""

    def placed(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("DIR", str(folder))
        if isinstance(value, dict):
            return {name: placed(item) for name, item in value.items()}
        return [placed(item) for item in value] if isinstance(value, list) else value

    path = folder / case.name
    if case.text is None:
        if case.name == "folder.yml":
            path.mkdir()
    elif case.text:
        path.write_bytes(case.text.encode(errors="surrogateescape"))
    else:
        keys = {**GOOD, "base_output_directory": str(folder / "out"), **placed(case.keys)}
        path.write_text(yaml.safe_dump({name: value for name, value in keys.items() if value is not ABSENT}))
    for name, text in case.files.items():
        (folder / name).write_text(text)
    return [str(path) if case.name != "steps=3" else case.name, *case.arguments]


def check(case: Case, status: int, out: str, err: str, folder: Path) -> None:
    """What holds for every wrong input."""
    assert status == 2
    messages = re.findall(r"^maxtext-nvfp4: .*", err, re.MULTILINE)
    assert len(messages) == 1, err
    message = err[err.index(messages[0]) :] if "usage:" not in err else err
    for words in case.says:
        assert words.replace("DIR", str(folder)) in message
    assert "Traceback" not in out + err
    assert not re.search(r"[<]class|object at 0x|Error\(", message)
    assert not (folder / "out").exists(), "a refused run has written something"


@pytest.fixture
def process_options():
    """MaxText sets options of its process, which here is also that of other tests."""
    from absl import logging

    environment, verbosity, prng = dict(os.environ), logging.get_verbosity(), jax.config.jax_default_prng_impl
    yield
    os.environ.clear()
    os.environ.update(environment)
    logging.set_verbosity(verbosity)
    jax.config.update("jax_default_prng_impl", prng)


@pytest.mark.parametrize(("command", "case"), RUNS)
def test_wrong_input_is_one_clear_message(command, case, tmp_path, capsys, monkeypatch, process_options):
    monkeypatch.chdir(tmp_path)
    arguments = write(case, tmp_path)
    try:
        status = cli.main([command, *arguments])
    except SystemExit as exit_:  # argparse
        status = exit_.code
    out, err = capsys.readouterr()
    check(case, status, out, err, tmp_path)


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "maxtext_nvfp4", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    "name", ["mesh-of-the-wrong-size", "steps-text"], ids=["found-by-the-run", "found-by-the-config"]
)
def test_wrong_input_in_a_process_of_its_own(name, tmp_path):
    """MaxText exits by itself on a wrong config, but not where it knows that it is being tested."""
    case = CASES[name]
    process = start("train", *write(case, tmp_path), cwd=tmp_path)
    out, err = process.communicate()
    check(case, process.returncode, out, err, tmp_path)


def test_a_closed_pipe_is_no_error(tmp_path):
    process = start("explain", *write(Case(()), tmp_path), cwd=tmp_path)
    process.stdout.close()  # before a line is written: head ends sooner than explain does
    assert process.stderr.read() == ""
    assert process.wait() == 0


def test_there_are_enough_cases():
    assert len(CASES) >= 45


def test_the_good_config_is_good(tmp_path, capsys):
    assert cli.main(["explain", *write(Case(()), tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "linear-layer GEMMs in 4 bits" in out
    assert err == ""


@pytest.mark.parametrize(
    "keys",
    [
        {"nvfp4": None},
        {"quantization": "nvfp4", "nvfp4": {}},
        {"dcn_data_parallelism": 2},
        {"dcn_data_parallelism": 1, "dcn_fsdp_parallelism": -1},
        {
            "attention": "cudnn_flash_te",
            "hardware": "gpu_multiprocess",
            "remat_policy": "minimal_with_context",
        },
        {"skip_jax_distributed_system": False, "dataset_type": "tfds", "dataset_path": "/elsewhere"},
    ],
    ids=["empty-section", "empty-mapping", "two-slices", "open-slices", "gpu-kernel", "data-elsewhere"],
)
def test_explain_takes_what_another_machine_would_run(keys, tmp_path, capsys):
    assert cli.main(["explain", *write(Case((), keys=keys), tmp_path)]) == 0
    assert "63 of 87 linear-layer GEMMs" in capsys.readouterr().out


def test_a_programming_error_is_not_hidden():
    from maxtext_nvfp4.integration import config_errors

    with pytest.raises(ZeroDivisionError), config_errors.raising_setup_errors():
        _ = 1 / 0
    with pytest.raises(ValueError, match="ours"), config_errors.raising_setup_errors():
        exec(compile("raise ValueError('ours')", str(Path(config_errors.__file__)), "exec"))


def test_names_of_choices_are_those_of_maxtext():
    from maxtext.configs import pyconfig_deprecated
    from maxtext.layers import attention_op, nnx_decoders

    from maxtext_nvfp4.integration import config_checks

    attention = set(config_checks._CHOICES["attention"])
    with pytest.raises(ValueError, match="attention kernel") as refused:
        pyconfig_deprecated.validate_attention_kernel("none such")
    assert set(refused.value.args[1]) <= attention
    source = inspect.getsource(attention_op)
    assert all(f'"{name}"' in source for name in attention)

    class Decoder:
        minimal_policy = nnx_decoders.NNXDecoder.minimal_policy

        def __init__(self, remat_policy):
            keys = {"scan_layers": False, "tensors_on_device": [], "tensors_to_offload": []}
            self.config = types.SimpleNamespace(remat_policy=remat_policy, **keys)

    for name in config_checks._CHOICES["remat_policy"]:
        nnx_decoders.NNXDecoder.get_remat_policy(Decoder(name))
    source = inspect.getsource(nnx_decoders.NNXDecoder.get_remat_policy)
    in_maxtext = set(re.findall(r'remat_policy (?:==|in) (?:"(\w+)"|\{"(\w+)", "(\w+)"\})', source))
    assert {name for names in in_maxtext for name in names if name} - {"none"} <= set(
        config_checks._CHOICES["remat_policy"]
    )
