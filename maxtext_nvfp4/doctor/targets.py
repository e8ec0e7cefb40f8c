"""Hardware that a config can be checked for without having it: a table."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A kind of machine with NVFP4.

    Attributes:
      gpu: Name of its GPU.
      capability: Compute capability.
      gpus_per_node: GPUs that one operating system sees.
      domain: GPUs that one NVLink domain joins, over nodes.
      memory: Bytes of a GPU.
    """

    gpu: str
    capability: str
    gpus_per_node: int
    domain: int
    memory: int


# Memory: what NVIDIA's product pages give for the whole (13.4 TB and 20 TB for the racks, 1.44 TB and 2.1 TB
# for the 8-GPU boards), by the number of GPUs.
TARGETS = {
    "gb200": Target(
        gpu="NVIDIA GB200", capability="10.0", gpus_per_node=4, domain=72, memory=186_000_000_000
    ),
    "gb300": Target(
        gpu="NVIDIA GB300", capability="10.3", gpus_per_node=4, domain=72, memory=277_000_000_000
    ),
    "b200": Target(gpu="NVIDIA B200", capability="10.0", gpus_per_node=8, domain=8, memory=180_000_000_000),
    "b300": Target(gpu="NVIDIA B300", capability="10.3", gpus_per_node=8, domain=8, memory=262_000_000_000),
}


def domain_of(gpu: str, gpus_per_node: int) -> int:
    """GPUs of the NVLink domain of a GPU by its name; those of one node if the name is not in the table."""
    return next((target.domain for target in TARGETS.values() if target.gpu == gpu), gpus_per_node)
