"""Every check, in the order of the report."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from maxtext_nvfp4.doctor import (
    environment,
    hardware,
    network,
    parallelism,
    precision,
    shapes,
    speed,
    storage,
    versions,
)
from maxtext_nvfp4.doctor.cluster import counted
from maxtext_nvfp4.doctor.facts import Situation
from maxtext_nvfp4.doctor.findings import Finding, Outcome


@dataclasses.dataclass(frozen=True)
class Check:
    """A check of the registry.

    Attributes:
      name: As in the report.
      examine: The check; None where it does not apply. Its docstring says what holds when it is ok.
      about: `hardware` is skipped where a target stands in for this machine's; a problem of this `machine` is a
        note there, as the run will be on another; the `run` is the same everywhere.
    """

    name: str
    examine: Callable[[Situation], Finding | None]
    about: Literal["hardware", "machine", "run"]

    @property
    def meaning(self) -> str:
        """What holds when it is ok."""
        assert self.examine.__doc__
        return self.examine.__doc__.strip()

    def outcome(self, situation: Situation) -> Outcome | None:
        """What it finds; None where it does not apply."""
        if self.about == "hardware" and situation.target:
            return None
        finding = self.examine(situation)
        if finding is None:
            return None
        if self.about == "machine" and situation.target and finding.status == "problem":
            finding = Finding("note", f"on this machine: {finding.found}", finding.fix)
        return Outcome(self.name, finding)


CHECKS = (
    Check("python", versions.python, "machine"),
    Check("pinned_packages", versions.pinned, "machine"),
    Check("orbax", versions.orbax, "machine"),
    Check("other_packages", versions.others, "machine"),
    Check("transformer_engine", versions.transformer_engine, "machine"),
    Check("nvfp4_hardware", hardware.nvfp4, "run"),
    Check("hardware_key", hardware.key, "run"),
    Check("jax_start", hardware.start, "machine"),
    Check("platform", hardware.platform, "hardware"),
    Check("visible_gpus", hardware.visible, "hardware"),
    Check("driver", hardware.driver, "hardware"),
    Check("cuda_libraries", hardware.libraries, "hardware"),
    Check("nvlink_fabric", hardware.fabric, "hardware"),
    Check("gpu_memory", hardware.memory, "run"),
    Check("racks", parallelism.racks, "run"),
    Check("mesh", parallelism.mesh, "run"),
    Check("processes", parallelism.processes, "machine"),
    Check("batch", parallelism.batch, "run"),
    Check("recipe", shapes.recipe, "run"),
    Check("gemm_shapes", shapes.gemms, "run"),
    Check("uncovered_gemms", shapes.uncovered, "run"),
    Check("backend_speed", speed.backend, "run"),
    Check("attention", speed.attention, "run"),
    Check("remat", speed.remat, "run"),
    Check("scan", speed.scan, "run"),
    Check("gradient_accumulation", precision.accumulation, "run"),
    Check("gradient_reduction", precision.reduction, "run"),
    Check("checkpoint_folder", storage.folder, "machine"),
    Check("checkpoint_space", storage.space, "machine"),
    Check("shared_folder", storage.shared, "machine"),
    Check("data", storage.data, "machine"),
    Check("resume", storage.resume, "machine"),
    Check("cuda_environment", environment.cuda, "machine"),
    Check("engine_environment", environment.engine, "machine"),
    Check("xla_flags", environment.xla, "machine"),
    Check("xla_memory", environment.memory, "machine"),
    Check("nccl_environment", environment.nccl, "machine"),
    Check("jax_environment", environment.jax, "machine"),
    Check("config_environment", environment.config, "machine"),
    Check("shared_memory", network.shared_memory, "hardware"),
    Check("locked_memory", network.locked_memory, "hardware"),
    Check("clock", network.clock, "hardware"),
    Check("coordinator", network.coordinator, "machine"),
)


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The outcomes of all checks that apply."""

    outcomes: tuple[Outcome, ...]

    @property
    def can_start(self) -> bool:
        """Whether nothing keeps the run from starting."""
        return not self.count("problem")

    def count(self, status: str) -> int:
        """How many checks have a status."""
        return sum(outcome.finding.status == status for outcome in self.outcomes)

    def summary(self) -> str:
        """The last line of the report."""
        verdict = "the run can start" if self.can_start else "the run cannot start"
        counts = [counted(count, word) for word in ("problem", "note") if (count := self.count(word))]
        return f"{verdict}: {', '.join([*counts, f'{self.count("ok")} ok'])}"

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "can_start": self.can_start,
            "summary": self.summary(),
            "checks": [outcome.to_json() for outcome in self.outcomes],
        }

    def to_text(self) -> str:
        """A line or more for each check, and the summary."""
        width = max(len(outcome.name) for outcome in self.outcomes)
        lines = []
        for outcome in self.outcomes:
            finding = outcome.finding
            found = finding.found.replace("\n", "\n" + " " * (width + 11))
            lines.append(f"{finding.status:<9}{outcome.name:<{width}}  {found}")
            if finding.fix:
                lines.append(f"{'':<9}{'fix: ':>{width}}  {finding.fix}")
        return "\n".join([*lines, "", self.summary()])


def examine(situation: Situation) -> Diagnosis:
    """Runs every check."""
    outcomes = (check.outcome(situation) for check in CHECKS)
    return Diagnosis(tuple(outcome for outcome in outcomes if outcome))
