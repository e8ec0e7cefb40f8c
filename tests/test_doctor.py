"""`doctor` in broken situations: what it finds, how bad that is, and what it says to do.

The facts are made up, or read from real configs; every check runs as it does in the command.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from doctor_facts import GPU, LAUNCH, LUSTRE, MACHINE, MODEL, NEEDED, TRAYS, machine, situation
from etils import epath

from maxtext_nvfp4.doctor import launch
from maxtext_nvfp4.doctor.cluster import Cluster
from maxtext_nvfp4.doctor.facts import Clock, JaxView, Reached, Situation
from maxtext_nvfp4.doctor.registry import CHECKS, Diagnosis, examine
from maxtext_nvfp4.doctor.targets import TARGETS

ROOT = Path(__file__).parents[1]


def facts(folder: Path, cluster: Cluster = TRAYS, look=lambda path: LUSTRE, **keys):
    """The facts of a run of the small model with other keys, from its config."""
    from maxtext_nvfp4.integration import cluster_mesh, run_facts

    config = folder / "tiny.yml"
    merged = {key: value for key, value in {**MODEL, **keys}.items() if value is not None}
    config.write_text(yaml.safe_dump({"base_output_directory": str(folder), **merged}))
    argv = ["", str(config)]
    return run_facts.read(
        argv,
        cluster_mesh.checked_keys(argv),
        cluster,
        capability=GPU.capability,
        engine=True,
        environment={},
        look=look,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The facts of the small model."""
    from maxtext_nvfp4.integration import register

    register()
    return facts(tmp_path_factory.mktemp("run"))


def outcome(diagnosis: Diagnosis, name: str):
    """What a check of a diagnosis found."""
    return {one.name: one.finding for one in diagnosis.outcomes}[name]


def test_nothing_is_wrong_with_the_good_situation(run):
    diagnosis = examine(situation(run))
    assert {one.finding.status for one in diagnosis.outcomes} == {"ok"}
    assert {one.name for one in diagnosis.outcomes} == {check.name for check in CHECKS}
    assert diagnosis.can_start
    assert diagnosis.summary() == f"the run can start: {len(CHECKS)} ok"


WITHOUT = {name: {k: v for k, v in MACHINE.packages.items() if k != name} for name in MACHINE.packages}
HOPPER = dataclasses.replace(GPU, name="NVIDIA H100 80GB HBM3", capability="9.0")
DESKTOP = dataclasses.replace(GPU, name="NVIDIA RTX PRO 6000", capability="12.0")

BROKEN = {
    # What is installed
    "an older Python": (
        {"machine": machine(python="3.11.4")},
        ("python", "problem", "3.11.4, and 3.12.* is needed", "setup.sh"),
    ),
    "another JAX": (
        {"machine": machine(packages={**MACHINE.packages, "jax": "0.9.0"})},
        ("pinned_packages", "problem", "jax 0.9.0, needed", f"jax=={NEEDED['jax']}"),
    ),
    "no MaxText": (
        {"machine": machine(packages=WITHOUT["maxtext"])},
        ("pinned_packages", "problem", "maxtext not installed", "maxtext==0.2.5"),
    ),
    "a vendor's Flax, which is another version": (
        {"machine": machine(packages={**MACHINE.packages, "flax": "0.12.11+nv26.1"})},
        ("pinned_packages", "problem", "flax 0.12.11+nv26.1", "flax=="),
    ),
    "an untested Orbax": (
        {"machine": machine(packages={**MACHINE.packages, "orbax-checkpoint": "0.13.0"})},
        ("orbax", "note", "tested with", f"orbax-checkpoint=={NEEDED['orbax-checkpoint']}"),
    ),
    "no Orbax": (
        {"machine": machine(packages=WITHOUT["orbax-checkpoint"])},
        ("orbax", "problem", "not installed", "orbax-checkpoint"),
    ),
    "a dependency missing": (
        {"machine": machine(packages=WITHOUT["tensorstore"])},
        ("other_packages", "problem", "tensorstore", "pip install tensorstore"),
    ),
    "no Transformer Engine": (
        {"machine": machine(jax=JaxView(platform="gpu", devices=4, engine="which is not installed"))},
        ("transformer_engine", "problem", "cudnn_flash_te: which is not installed", "install_te.sh"),
    ),
    "a newer Transformer Engine": (
        {"machine": machine(packages={**MACHINE.packages, "transformer-engine": "2.25.0"})},
        ("transformer_engine", "note", "tested with 2.20.*", "install_te.sh"),
    ),
    # Hardware
    "Hopper": (
        {"machine": machine(gpus=(HOPPER,) * 4)},
        ("nvfp4_hardware", "note", "capability 9.0, not 10.0 or 10.3", "emulated works here"),
    ),
    "a desktop Blackwell": (
        {"machine": machine(gpus=(DESKTOP,))},
        ("nvfp4_hardware", "note", "zeros", "emulated works here"),
    ),
    "no GPU": (
        {"machine": machine(gpus=(), driver="", libraries={}, jax=JaxView(platform="cpu", devices=1))},
        (
            "nvfp4_hardware",
            "note",
            "NVFP4 hardware is missing: there is no NVIDIA GPU",
            "emulated works here",
        ),
    ),
    "a config for GPUs on a machine without": (
        {"machine": machine(gpus=(), driver="", libraries={}, jax=JaxView(platform="cpu", devices=1))},
        ("platform", "problem", "hardware: gpu_multiprocess, but JAX has 1 x cpu", "hardware: cpu"),
    ),
    "JAX without its CUDA packages": (
        {"machine": machine(jax=JaxView(platform="cpu", devices=1))},
        ("platform", "problem", "JAX has 1 x cpu", "install_te.sh"),
    ),
    "a flag XLA does not know": (
        {"machine": machine(jax=JaxView(error="Unknown flag in XLA_FLAGS: --xla_gpu_magic"))},
        ("jax_start", "problem", "--xla_gpu_magic", "XLA_FLAGS"),
    ),
    "one GPU of four seen": (
        {"machine": machine(jax=JaxView(platform="gpu", devices=1))},
        ("visible_gpus", "problem", "JAX sees 1 of 4 GPUs", "no CUDA_VISIBLE_DEVICES"),
    ),
    "a GPU for each Slurm task": (
        {"machine": machine(environment={"SLURM_GPUS_PER_TASK": "1"})},
        ("visible_gpus", "problem", "SLURM_GPUS_PER_TASK=1", "no --gpus-per-task but --gpus-per-node"),
    ),
    "cgroups hide GPUs": (
        {
            "machine": machine(
                gpus=(GPU,), jax=JaxView(platform="gpu", devices=1), environment={"SLURM_GPUS_ON_NODE": "4"}
            )
        },
        ("visible_gpus", "problem", "JAX sees 1 of 4 GPUs", "--gpus-per-node"),
    ),
    "an old driver": (
        {"machine": machine(driver="550.163.01")},
        ("driver", "problem", "550.163.01", "580"),
    ),
    "a cuBLASLt without NVFP4": (
        {"machine": machine(libraries={**MACHINE.libraries, "cuBLASLt": "12.6.4"})},
        ("cuda_libraries", "problem", "cuBLASLt 12.6.4 is older than 12.8", "install_te.sh"),
    ),
    "no cuDNN": (
        {"machine": machine(libraries={"cuBLASLt": "13.10.0"})},
        ("cuda_libraries", "problem", "not found: cuDNN", "CUDA 13"),
    ),
    "GPUs outside the NVLink fabric": (
        {"machine": machine(gpus=(dataclasses.replace(GPU, fabric="In Progress"),) * 4)},
        ("nvlink_fabric", "problem", "In Progress", "nvidia-fabricmanager"),
    ),
    "no IMEX channel": (
        {"machine": machine(imex_channels=0)},
        ("nvlink_fabric", "problem", "no IMEX channel", "ComputeDomain"),
    ),
    # Cluster and processes
    "nodes that no racks share equally": (
        {"cluster": Cluster(nodes=37, gpus_per_node=4, rack_gpus=72)},
        ("racks", "problem", "37 nodes need 3 racks", "--nodes 36 or --nodes 39"),
    ),
    "one process a node": (
        {"launch": dataclasses.replace(LAUNCH, count=2, process=1)},
        ("processes", "problem", "each would see one GPU", "4 tasks a node"),
    ),
    "too many processes": (
        {"launch": dataclasses.replace(LAUNCH, count=16)},
        ("processes", "problem", "16 processes by slurm for 8 GPUs", "one process per GPU"),
    ),
    "GPUs that the config leaves idle": (
        {"keys": {"hardware": "cpu"}},
        ("hardware_key", "note", "leaves 4 x NVIDIA GB200 idle", "hardware: gpu_multiprocess"),
    ),
    "processes that do not find each other": (
        {"keys": {"skip_jax_distributed_system": True}},
        ("processes", "problem", "each would train by itself", "skip_jax_distributed_system: false"),
    ),
    "nodes that do not find each other, seen before the job": (
        {
            "keys": {"skip_jax_distributed_system": True},
            "launch": dataclasses.replace(LAUNCH, by="alone", count=1, process=0),
        },
        ("processes", "problem", "each would train by itself", "skip_jax_distributed_system: false"),
    ),
    "the hardware that does not look for Slurm": (
        {"keys": {"hardware": "gpu"}},
        ("processes", "problem", "hardware: gpu,", "hardware: gpu_multiprocess"),
    ),
    "an environment that contradicts itself": (
        {"launch": launch.read({"SLURM_PROCID": "8", "SLURM_NTASKS": "8"}, 4)},
        ("processes", "problem", "SLURM_PROCID=8", "docs/clusters.md"),
    ),
    "a job without a place": (
        {"launch": launch.read({"JAX_PROCESS_COUNT": "8"}, 4)},
        ("processes", "problem", "without JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID", "docs/clusters.md"),
    ),
    # Choices
    "the score matrix in memory": (
        {"keys": {"attention": "dot_product"}},
        ("attention", "note", "score matrix", "attention: cudnn_flash_te"),
    ),
    "packing without a limit": (
        {"keys": {"packing": True, "dataset_type": "grain", "max_segments_per_seq": -1}},
        ("attention", "problem", "max_segments_per_seq: -1", "max_segments_per_seq: 32"),
    ),
    "everything computed twice": (
        {"keys": {"remat_policy": "full"}},
        ("remat", "note", "repeats the forward pass", "minimal_with_context_and_quantization"),
    ),
    "quantized twice": (
        {"keys": {"remat_policy": "minimal_with_context"}},
        ("remat", "note", "a second time", "minimal_with_context_and_quantization"),
    ),
    "layers compiled one by one": (
        {"keys": {"scan_layers": False, "num_decoder_layers": 20}},
        ("scan", "note", "20 layers", "scan_layers: true"),
    ),
    "gradients in BF16": (
        {"keys": {"grad_dtype": "bfloat16"}},
        ("gradient_accumulation", "note", "before the optimizer", "grad_dtype: float32"),
    ),
    "accumulation in BF16": (
        {"keys": {"shard_optimizer_over_data": True}},
        (
            "gradient_accumulation",
            "note",
            "accumulated gradients become BF16",
            "shard_optimizer_over_data: false",
        ),
    ),
    # Environment
    "keys in the environment": (
        {"run": ("overridden", ("M_STEPS",))},
        ("config_environment", "note", "M_STEPS", "unset M_STEPS, and write steps=VALUE after the config"),
    ),
    "no checkpoints": (
        {"run": ("folder", None)},
        ("checkpoint_folder", "note", "begins again", "enable_checkpointing: true"),
    ),
    "a setting for Hopper": (
        {"machine": machine(environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})},
        ("cuda_environment", "note", "CUDA_DEVICE_MAX_CONNECTIONS=1", "unset CUDA_DEVICE_MAX_CONNECTIONS"),
    ),
    "Transformer Engine's kernels off": (
        {"machine": machine(environment={"NVTE_JAX_CUSTOM_CALLS": "GemmPrimitive=false"})},
        ("engine_environment", "problem", "without NVFP4 kernels", "unset NVTE_JAX_CUSTOM_CALLS"),
    ),
    "fused attention off": (
        {"machine": machine(environment={"NVTE_FUSED_ATTN": "0"})},
        ("engine_environment", "note", "unfused", "unset NVTE_FUSED_ATTN"),
    ),
    "stochastic rounding off for others": (
        {"machine": machine(environment={"NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1"})},
        ("engine_environment", "note", "nvfp4.stochastic_rounding: none", "unset NVTE_NVFP4_DISABLE"),
    ),
    "the transform off for others": (
        {"machine": machine(environment={"NVTE_NVFP4_DISABLE_RHT": "1"})},
        ("engine_environment", "note", "nvfp4.hadamard: none", "unset NVTE_NVFP4_DISABLE_RHT"),
    ),
    "no XLA flags": (
        {"machine": machine(environment={"XLA_FLAGS": ""})},
        ("xla_flags", "note", "waits for compute", "--xla_gpu_enable_latency_hiding_scheduler=true"),
    ),
    "Triton GEMMs": (
        {
            "machine": machine(
                environment={
                    "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler --xla_gpu_enable_triton_gemm"
                }
            )
        },
        ("xla_flags", "note", "Triton GEMMs", "--xla_gpu_enable_triton_gemm=false"),
    ),
    "a quarter of the memory unused": (
        {"machine": machine(environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": ""})},
        ("xla_memory", "note", "75%", "XLA_PYTHON_CLIENT_MEM_FRACTION: 0.9"),
    ),
    "more than all of the memory": (
        {"machine": machine(environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": "90"})},
        ("xla_memory", "problem", "not a fraction", "XLA_PYTHON_CLIENT_MEM_FRACTION: 0.9"),
    ),
    "no memory for NCCL": (
        {"machine": machine(environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.99"})},
        ("xla_memory", "note", "memory of their own", "XLA_PYTHON_CLIENT_MEM_FRACTION: 0.9"),
    ),
    "NVLink between nodes off": (
        {"machine": machine(environment={"NCCL_MNNVL_ENABLE": "0"})},
        ("nccl_environment", "note", "instead of NVLink", "unset NCCL_MNNVL_ENABLE"),
    ),
    "in-switch reductions off, and more": (
        {"machine": machine(environment={"NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "Ring"})},
        ("nccl_environment", "note", "NVLink switches", "unset NCCL_NVLS_ENABLE; unset NCCL_ALGO"),
    ),
    "JAX kept from GPUs": (
        {"machine": machine(environment={"JAX_PLATFORMS": "cpu"})},
        ("jax_environment", "problem", "does not look for GPUs", "unset JAX_PLATFORMS"),
    ),
    "NaN debugging left on": (
        {"machine": machine(environment={"JAX_DEBUG_NANS": "True"})},
        ("jax_environment", "note", "loss scaling would skip", "unset JAX_DEBUG_NANS"),
    ),
    "TensorBoard logs to nowhere": (
        {"machine": machine(environment={"DECOUPLE_GCLOUD": "TRUE"})},
        ("jax_environment", "note", "TensorBoard", "unset DECOUPLE_GCLOUD"),
    ),
    # Memory, clock, network
    "Docker's shared memory": (
        {"machine": machine(shared_memory=64 * 2**20)},
        ("shared_memory", "problem", "/dev/shm holds 67.1 MB", "--shm-size"),
    ),
    "no shared memory": (
        {"machine": machine(shared_memory=None)},
        ("shared_memory", "problem", "there is no /dev/shm", "emptyDir"),
    ),
    "locked memory limited": (
        {"machine": machine(locked_memory=8_388_608)},
        ("locked_memory", "note", "ulimit -l is 8.39 MB", "IPC_LOCK"),
    ),
    "a clock that nobody sets": (
        {"machine": machine(clock=Clock(False, 16.0))},
        ("clock", "note", "not synchronized", "chronyd"),
    ),
    "a clock that is off": (
        {"machine": machine(clock=Clock(True, 2.5))},
        ("clock", "note", "off by 2.5 s", "chronyd"),
    ),
    "a coordinator without a name": (
        {"machine": machine(coordinator=Reached(address="", outcome="Name or service not known"))},
        ("coordinator", "problem", "tray1 does not resolve", "headless Service"),
    ),
    "a firewall": (
        {"machine": machine(coordinator=Reached(address="10.0.0.1", outcome="timed out"))},
        ("coordinator", "problem", "timed out", "let TCP port 61441 through"),
    ),
    "a port that is taken": (
        {"machine": machine(coordinator=Reached(address="10.0.0.1", outcome="taken"))},
        ("coordinator", "problem", "another one does", "another port"),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_machine(name, run):
    changes, (check, status, found, fix) = BROKEN[name]
    if "run" in changes:
        field, value = changes["run"]
        changes = {"run": dataclasses.replace(run, **{field: value})}
    finding = outcome(examine(situation(**{"run": run, **changes})), check)
    assert finding.status == status
    assert found in finding.found
    assert fix in finding.fix


def test_what_a_vendor_appends_to_a_version_does_not_count(run):
    packages = {name: f"{version}+nv27.1" for name, version in MACHINE.packages.items()}
    diagnosis = examine(situation(run, machine=machine(packages=packages)))
    for name in ("pinned_packages", "orbax", "transformer_engine"):
        assert outcome(diagnosis, name).status == "ok"


STORAGE = {
    "a folder of others": (
        {"writable": False},
        {},
        ("checkpoint_folder", "problem", "/lustre is not writable", "base_output_directory"),
    ),
    "a bucket": (
        {"path": "gs://bucket/run", "nearest": ""},
        {},
        ("checkpoint_folder", "note", "gs://bucket/run", "write a file there"),
    ),
    "no room for one checkpoint": (
        {"free": 1000},
        {},
        ("checkpoint_space", "problem", "1 kB free", "base_output_directory"),
    ),
    "room for fewer checkpoints than are kept": (
        {"free": 3 * 14_000_000 + 1},
        {"max_num_checkpoints_to_keep": 5, "steps": 1000},
        ("checkpoint_space", "problem", "6 of them", "max_num_checkpoints_to_keep: 2"),
    ),
    "checkpoints kept for ever": (
        {"free": 5 * 14_000_000},
        {"max_num_checkpoints_to_keep": None, "steps": 1000},
        ("checkpoint_space", "note", "all are kept", "max_num_checkpoints_to_keep: 4"),
    ),
    "a disk that other nodes do not see": (
        {"kind": "tmpfs"},
        {},
        (
            "shared_folder",
            "note",
            "tmpfs, which the other nodes see only if this one",
            "parallel file system",
        ),
    ),
}


@pytest.mark.parametrize("name", STORAGE)
def test_broken_storage(name, run):
    changes, keys, (check, status, found, fix) = STORAGE[name]
    broken = dataclasses.replace(
        run, checkpoint_bytes=14_000_000, folder=dataclasses.replace(LUSTRE, **changes)
    )
    finding = outcome(examine(situation(broken, keys=keys)), check)
    assert finding.status == status
    assert found in finding.found
    assert fix in finding.fix


def test_checkpoints_that_are_there_need_no_room(run):
    there = dataclasses.replace(LUSTRE, free=20_000_000, saved=2)
    full = dataclasses.replace(run, checkpoint_bytes=14_000_000, folder=there)
    assert outcome(examine(situation(full)), "checkpoint_space").status == "ok"


CONFIGS = {
    "FSDP for another cluster": (
        {"ici_fsdp_parallelism": 4},
        ("mesh", "problem", "ici_fsdp_parallelism=4", "ici_fsdp_parallelism=8 dcn_data_parallelism=1"),
    ),
    "parallelism between racks within one": (
        {"dcn_fsdp_parallelism": 2},
        ("mesh", "problem", "dcn_fsdp_parallelism=2", "ici_fsdp_parallelism=8 dcn_data_parallelism=1"),
    ),
    "tensor parallelism that does not divide": (
        {"ici_tensor_parallelism": 3},
        ("mesh", "problem", "3 does not divide 8", "ici_tensor_parallelism: 2"),
    ),
    "rows that do not divide": (
        {"per_device_batch_size": 0.5, "max_target_length": 256},
        ("batch", "problem", "4 rows does not divide over 8", "larger per_device_batch_size"),
    ),
    "tokens that the transform does not take": (
        {"max_target_length": 96},
        ("gemm_shapes", "problem", "M=96", "on_unsupported"),
    ),
    "tokens that the transform may do without": (
        {"max_target_length": 96, "nvfp4": {"recipe": "all_layers", "on_unsupported": "bf16"}},
        ("gemm_shapes", "note", "7 sites are changed", "max_target_length"),
    ),
    "weights cut too small by FSDP and tensor parallelism": (
        {"base_mlp_dim": 192, "ici_tensor_parallelism": 4},
        ("gemm_shapes", "problem", "K=48", "on_unsupported"),
    ),
    "experts": (
        {"decoder_block": "mixtral", "num_experts": 8, "num_experts_per_tok": 2, "base_moe_mlp_dim": 512},
        ("uncovered_gemms", "note", "grouped GEMMs", "the speed-up"),
    ),
    "nothing in 4 bits": (
        {"nvfp4": {"recipe": "bf16"}},
        ("recipe", "note", "0 of", "another nvfp4.recipe"),
    ),
    "no NVFP4": (
        {"quantization": None, "nvfp4": None},
        ("recipe", "note", "quantization is not nvfp4", "quantization: nvfp4"),
    ),
    "emulation on Blackwell": (
        {"nvfp4": {"backend": "emulated"}},
        ("backend_speed", "note", "costs more", "nvfp4.backend: auto"),
    ),
    "weights in BF16": (
        {"weight_dtype": "bfloat16"},
        ("gradient_accumulation", "note", "accumulated in it", "weight_dtype: float32, mu_dtype: float32"),
    ),
    "data that is not there": (
        {
            "dataset_type": "grain",
            "grain_train_files": "/nowhere/*.array_record",
            "tokenizer_path": "tokenizer.llama2",
            "max_segments_per_seq": 32,
        },
        ("data", "problem", "grain_train_files: /nowhere/*.array_record", "paths that exist"),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_broken_config(name, run, tmp_path):
    keys, (check, status, found, fix) = CONFIGS[name]
    finding = outcome(examine(situation(facts(tmp_path, **keys))), check)
    assert finding.status == status
    assert found in finding.found
    assert fix in finding.fix


def test_a_look_before_the_job_may_have_one_process_a_node(run):
    one_each = dataclasses.replace(LAUNCH, count=2, process=1)
    finding = outcome(examine(situation(run, launch=one_each, cluster_given=True)), "processes")
    assert finding.status == "ok"


def test_a_model_that_is_too_large(run):
    large = dataclasses.replace(run, device_bytes=180_000_000_000)
    finding = outcome(examine(situation(large)), "gpu_memory")
    assert (finding.status, "ici_fsdp_parallelism" in finding.fix) == ("problem", True)
    tight = dataclasses.replace(run, device_bytes=150_000_000_000)
    assert outcome(examine(situation(tight)), "gpu_memory").status == "note"


def test_gradients_summed_in_bf16_between_devices(run):
    bare = machine(environment={"NVTE_JAX_ALL_REDUCE_IN_FP32": ""})
    finding = outcome(examine(situation(run, machine=bare)), "gradient_reduction")
    assert finding.status == "note"
    assert "over 8 devices in BF16" in finding.found
    assert "NVTE_JAX_ALL_REDUCE_IN_FP32=1" in finding.fix


def test_transformer_engine_asked_for_without_its_hardware(tmp_path, run):
    wanted = facts(tmp_path, nvfp4={"backend": "transformer_engine"})
    finding = outcome(examine(situation(wanted, machine=machine(gpus=()))), "nvfp4_hardware")
    assert finding.status == "problem"
    assert "nvfp4.backend: emulated" in finding.fix


def test_sizes_are_those_after_sharding(run):
    """The small model by hand: what a device holds of its parameters, moments and gradients."""
    emb, mlp, heads, vocabulary, layers = 256, 512, 4 * 64, 128, 2
    norms = emb * (2 * layers + 1)
    matrices = layers * (4 * emb * heads + 3 * emb * mlp) + 2 * vocabulary * emb
    assert run.parameters == matrices + norms
    assert run.checkpoint_bytes == pytest.approx(
        12 * run.parameters, abs=16
    )  # and the optimizer's step count
    # Eight parts of everything but the norms, which are whole: parameter, two moments, gradient.
    assert run.device_bytes == pytest.approx(16 * (matrices / 8 + norms), rel=0.01)


def test_a_run_of_another_recipe_is_not_taken_up(tmp_path, run):
    from maxtext_nvfp4.doctor import probes
    from maxtext_nvfp4.integration import history
    from maxtext_nvfp4.recipe import load_recipe

    folder = tmp_path / "tiny"
    (folder / "checkpoints" / "5").mkdir(parents=True)
    old = history.continued((), load_recipe({"recipe": "paper"}), None, 0)
    history.write(epath.Path(folder), old)
    finding = outcome(examine(situation(facts(tmp_path, look=probes.folder))), "resume")
    assert finding.status == "problem"
    assert "trained with another recipe" in finding.found
    assert "another run_name" in finding.fix
    same = facts(tmp_path, look=probes.folder, nvfp4={"recipe": "paper", "backend": "transformer_engine"})
    finding = outcome(examine(situation(same)), "resume")
    assert (finding.status, finding.found) == ("ok", "1 checkpoints to go on from")


def test_a_target_stands_in_for_the_hardware(run):
    """What this machine lacks is no obstacle there; what the config lacks is."""
    bare = machine(
        python="3.11.1",
        gpus=(GPU,) * 4,
        driver="",
        jax=JaxView(platform="cpu", devices=1, engine="which is not installed"),
        shared_memory=None,
        environment={"JAX_PLATFORMS": "cpu"},
    )
    assert not examine(situation(run, machine=bare)).can_start
    diagnosis = examine(situation(run, machine=bare, target=TARGETS["gb200"]))
    assert diagnosis.can_start
    for name in ("python", "transformer_engine", "jax_environment"):
        finding = outcome(diagnosis, name)
        assert (finding.status, finding.found.startswith("on this machine: ")) == ("note", True)
    names = {one.name for one in diagnosis.outcomes}
    assert not names & {"platform", "visible_gpus", "driver", "cuda_libraries", "shared_memory", "clock"}
    broken = situation(run, target=TARGETS["gb200"], cluster=Cluster(nodes=37, gpus_per_node=4, rack_gpus=72))
    assert not examine(broken).can_start


def test_a_machine_alone_is_checked_without_a_config():
    bare = machine(gpus=(), driver="", libraries={}, jax=JaxView(platform="cpu", devices=1), coordinator=None)
    one = Cluster(nodes=1, gpus_per_node=1, rack_gpus=1)
    diagnosis = examine(
        Situation(
            machine=bare, cluster=one, cluster_given=False, launch=launch.read({}, 1), run=None, target=None
        )
    )
    assert diagnosis.can_start
    assert {one.name for one in diagnosis.outcomes if one.finding.status == "note"} == {"nvfp4_hardware"}


def test_text_and_json_say_the_same(run):
    changes = {"machine": machine(driver="550.1", shared_memory=None), "keys": {"remat_policy": "full"}}
    diagnosis = examine(situation(run, **changes))
    report = json.loads(json.dumps(diagnosis.to_json()))
    assert report.keys() == {"can_start", "summary", "checks"}
    assert report["can_start"] is False
    assert report["summary"].startswith("the run cannot start: 2 problems, 1 note, ")
    text = diagnosis.to_text()
    assert text.splitlines()[-1] == report["summary"]
    for check in report["checks"]:
        assert check.keys() == {"name", "status", "found", "fix"}
        assert check["status"] in ("ok", "problem", "note")
        assert bool(check["fix"]) == (check["status"] != "ok")
        assert f"{check['status']:<9}{check['name']}" in text
        assert check["fix"] in text


def test_the_page_lists_every_check():
    rows = [f"| `{check.name}` | {check.meaning} |" for check in CHECKS]
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    listed = [line for line in page.splitlines() if line.startswith("| `") and line.count("|") == 3]
    assert listed == rows, "the table of docs/doctor.md should be:\n" + "\n".join(rows)
