"""The facts that checks look at: plain data, read elsewhere."""

import dataclasses
from collections.abc import Mapping

from maxtext_nvfp4.doctor.cluster import Cluster, MeshPlan
from maxtext_nvfp4.doctor.launch import Launch
from maxtext_nvfp4.doctor.targets import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as its driver lists it.

    Attributes:
      name: Such as `NVIDIA GB200`.
      capability: Compute capability such as `10.0`.
      memory: Bytes.
      fabric: State of its NVLink fabric: `Completed` where it has joined one, `N/A` where there is none.
    """

    name: str
    capability: str
    memory: int
    fabric: str = "N/A"


@dataclasses.dataclass(frozen=True, kw_only=True)
class JaxView:
    """What a process with this environment gets from JAX and Transformer Engine.

    Attributes:
      platform: Such as `gpu`; empty if JAX did not start.
      devices: Number of devices.
      error: Why JAX did not start, in a line; empty if it did.
      engine: Why Transformer Engine cannot be used, whatever the GPU; None if it can.
    """

    platform: str = ""
    devices: int = 0
    error: str = ""
    engine: str | None = None


@dataclasses.dataclass(frozen=True)
class Clock:
    """The kernel's opinion of the system clock: whether something keeps it right, and its largest error."""

    synchronized: bool
    error_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reached:
    """An attempt to reach the coordinator.

    Attributes:
      address: Its IP address; empty if the name does not resolve.
      outcome: `connected`, `refused` (the host answers, nothing listens), `free` or `taken` (this process is
        the coordinator, and the port is its own to open), else an error in words.
    """

    address: str
    outcome: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What is known of a machine.

    Attributes:
      python: Version.
      packages: Installed versions by name of the distribution; what is missing is not in it.
      needed: Versions that this package asks for, or was tested with, by the same names; `any` if all will do.
      gpus: GPUs the driver lists.
      driver: Version of NVIDIA's driver; empty without one.
      libraries: Versions of CUDA libraries that load.
      jax: What JAX gets.
      environment: Environment variables.
      shared_memory: Size of /dev/shm in bytes; None without one.
      locked_memory: Most bytes a process may lock; None if unlimited.
      clock: None where the kernel does not say.
      imex_channels: How many IMEX channels this machine may use.
      coordinator: None where no coordinator is named.
    """

    python: str
    packages: Mapping[str, str]
    needed: Mapping[str, str]
    gpus: tuple[Gpu, ...]
    driver: str
    libraries: Mapping[str, str]
    jax: JaxView
    environment: Mapping[str, str]
    shared_memory: int | None
    locked_memory: int | None
    clock: Clock | None
    imex_channels: int
    coordinator: Reached | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
    """Where checkpoints go.

    Attributes:
      path: As the config has it.
      nearest: The deepest folder of it that exists; empty for storage that is not a file system.
      writable: Whether this user may write there.
      free: Bytes free.
      kind: Type of the file system, such as `lustre`.
      saved: How many checkpoints of the run are there.
    """

    path: str
    nearest: str
    writable: bool
    free: int
    kind: str
    saved: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """What becomes of the 4-bit GEMMs at their sizes on one device.

    Attributes:
      backend: The backend that the run will use.
      fault: Why the run would be refused, a line a site; empty if it would not.
      changed: Sites that `nvfp4.on_unsupported` changes, with the reason.
      gemms: Number of 4-bit GEMMs of a step, and of all GEMMs of linear layers.
      fraction: Share of the step's FLOPs in 4 bits.
      uncovered: What no 4-bit GEMM exists for, with the reason.
    """

    backend: str
    fault: str
    changed: tuple[str, ...] = ()
    gemms: tuple[int, int] = (0, 0)
    fraction: float = 0.0
    uncovered: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a run from its config, on the cluster it is meant for.

    Attributes:
      keys: The resolved values of the MaxText keys that checks read.
      plan: Its mesh, as derived for the cluster; None if there can be none.
      mesh_fault: Why MaxText would refuse the mesh as it is written, and what to write; empty if it would not.
      mesh_fix: What to write instead.
      shapes: Of its 4-bit GEMMs; None without `quantization: nvfp4`, or without a mesh.
      backend_wanted: `nvfp4.backend`; empty without the mode.
      parameters: Number of them.
      checkpoint_bytes: Of parameters and optimizer state.
      device_bytes: The same with gradients, on one device; 0 without a mesh.
      rows: Rows of a microbatch.
      row_parts: Devices that split them.
      token_parts: Devices that split rows and sequences.
      folder: Where checkpoints go; None if there are none.
      missing_paths: `key: path` of what is named and is not there.
      overridden: Environment variables by which MaxText takes another value for a key than the config's.
      refusal: Why the checkpoints that are there would not be taken up; empty if they would.
    """

    keys: Mapping[str, object]
    plan: MeshPlan | None
    mesh_fault: str
    mesh_fix: str
    shapes: Shapes | None
    backend_wanted: str
    parameters: int
    checkpoint_bytes: int
    device_bytes: int
    rows: int
    row_parts: int
    token_parts: int
    folder: Folder | None
    missing_paths: tuple[str, ...]
    overridden: tuple[str, ...] = ()
    refusal: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """All that a check may look at.

    Attributes:
      machine: This machine, its hardware replaced where there is a target.
      cluster: What the run is meant for.
      cluster_given: Whether it was given by hand, and this process may be no part of the job.
      launch: How this process was started.
      run: None without a config.
      target: The hardware that was asked for in place of this machine's.
    """

    machine: Machine
    cluster: Cluster
    cluster_given: bool
    launch: Launch
    run: Run | None
    target: Target | None

    @property
    def on_gpus(self) -> bool:
        """Whether the run uses NVIDIA GPUs: its config says so, or without one, this machine has some."""
        if self.run is None:
            return bool(self.machine.gpus)
        return str(self.run.keys["hardware"]).startswith("gpu")

    @property
    def in_engine(self) -> bool:
        """Whether the run's 4-bit GEMMs are Transformer Engine's."""
        return bool(self.run and self.run.shapes and self.run.shapes.backend == "transformer_engine")
