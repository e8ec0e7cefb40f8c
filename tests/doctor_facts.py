"""A tray of two that has everything, and ways to break it: the facts that tests of `doctor` start from."""

import dataclasses
from typing import Any

from maxtext_nvfp4.doctor import probes
from maxtext_nvfp4.doctor.cluster import Cluster
from maxtext_nvfp4.doctor.facts import Clock, Folder, Gpu, JaxView, Machine, Reached, Situation
from maxtext_nvfp4.doctor.launch import Launch

NEEDED = probes.needed_versions()

GPU = Gpu(name="NVIDIA GB200", capability="10.0", memory=186_000_000_000, fabric="Completed")

ENVIRONMENT = {
    "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_triton_gemm=false",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
    "NVTE_JAX_ALL_REDUCE_IN_FP32": "1",
}

MACHINE = Machine(
    python="3.12.9",
    packages={name: version.replace("any", "1.0").replace("*", "2") for name, version in NEEDED.items()},
    needed=NEEDED,
    gpus=(GPU,) * 4,
    driver="580.95.05",
    libraries={"CUDA": "13.5", "cuBLASLt": "13.10.0", "cuDNN": "9.28.1", "NCCL": "2.32.3"},
    jax=JaxView(platform="gpu", devices=4),
    environment=ENVIRONMENT,
    shared_memory=400_000_000_000,
    locked_memory=None,
    clock=Clock(True, 0.001),
    imex_channels=1,
    coordinator=Reached(address="10.0.0.1", outcome="connected"),
)

TRAYS = Cluster(nodes=2, gpus_per_node=4, rack_gpus=72)
LAUNCH = Launch(by="slurm", process=3, count=8, nodes=2, host="tray1", port=61441)
LUSTRE = Folder(
    path="/lustre/run/checkpoints", nearest="/lustre", writable=True, free=10**15, kind="lustre", saved=0
)

MODEL: dict[str, Any] = {
    "base_config": "base.yml",
    "run_name": "tiny",
    "quantization": "nvfp4",
    "nvfp4": {"recipe": "all_layers"},
    "hardware": "gpu_multiprocess",
    "decoder_block": "llama2",
    "base_emb_dim": 256,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "base_mlp_dim": 512,
    "head_dim": 64,
    "vocab_size": 128,
    "base_num_decoder_layers": 2,
    "max_target_length": 128,
    "per_device_batch_size": 1,
    "attention": "cudnn_flash_te",
    "dataset_type": "synthetic",
    "steps": 10,
    "checkpoint_period": 5,
    "max_num_checkpoints_to_keep": 2,
    "log_config": False,
    "jax_cache_dir": "",
}
"""Keys of a small model whose every GEMM is one that Transformer Engine takes."""


def machine(*, environment: dict[str, str] | None = None, **changes: Any) -> Machine:
    """The good machine with some facts changed."""
    return dataclasses.replace(MACHINE, environment={**ENVIRONMENT, **(environment or {})}, **changes)


def situation(run: Any, *, keys: dict[str, Any] | None = None, **changes: Any) -> Situation:
    """The good situation with some facts changed; `keys` are the run's."""
    good = Situation(machine=MACHINE, cluster=TRAYS, cluster_given=False, launch=LAUNCH, run=run, target=None)
    if keys:
        changes["run"] = dataclasses.replace(run, keys={**run.keys, **keys})
    return dataclasses.replace(good, **changes)
