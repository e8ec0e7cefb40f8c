"""Installed versions against those that this package asks for or was tested with."""

from maxtext_nvfp4.backends import te_library
from maxtext_nvfp4.doctor.facts import Situation
from maxtext_nvfp4.doctor.findings import Finding, note, ok, problem

_MATRIX = "docs/transformer-engine.md has the tested versions"


def python(situation: Situation) -> Finding:
    """Python is the version that MaxText needs."""
    found, needed = situation.machine.python, situation.machine.needed["python"]
    if _same(found, needed):
        return ok(f"Python {found}")
    return problem(
        f"Python {found}, and {needed} is needed", "./scripts/setup.sh, which finds or installs it"
    )


def pinned(situation: Situation) -> Finding:
    """MaxText, JAX and Flax, whose internals are used, are exactly the pinned versions."""
    machine = situation.machine
    pins = {name: machine.needed[name] for name in ("maxtext", "jax", "flax")}
    wrong = {name: pin for name, pin in pins.items() if not _same(machine.packages.get(name, ""), pin)}
    if not wrong:
        return ok(", ".join(f"{name} {pin}" for name, pin in pins.items()))
    found = [
        f"{name} {machine.packages.get(name, 'not installed')}, needed {pin}" for name, pin in wrong.items()
    ]
    packages = " ".join(f"{name}=={pin}" for name, pin in wrong.items())
    return problem("; ".join(found), f"./scripts/setup.sh, or pip install {packages}")


def orbax(situation: Situation) -> Finding:
    """Orbax, which reads and writes checkpoints, is the tested version."""
    machine = situation.machine
    found, tested = machine.packages.get("orbax-checkpoint", ""), machine.needed["orbax-checkpoint"]
    if not found:
        return problem(
            "orbax-checkpoint is not installed", "./scripts/setup.sh, or pip install orbax-checkpoint"
        )
    if _same(found, tested):
        return ok(f"orbax-checkpoint {found}")
    return note(
        f"orbax-checkpoint {found}; tested with {tested}",
        f"pip install orbax-checkpoint=={tested}, or try a resume before a long run",
    )


def others(situation: Situation) -> Finding:
    """The other packages that this one imports are installed."""
    machine = situation.machine
    named = ("python", "maxtext", "jax", "flax", "orbax-checkpoint", "transformer-engine")
    missing = [name for name in machine.needed if name not in named and name not in machine.packages]
    if missing:
        return problem(f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return ok(f"{len(machine.needed) - len(named)} more packages are there")


def transformer_engine(situation: Situation) -> Finding:
    """Transformer Engine is there, and the tested version, where the run uses it."""
    machine, run = situation.machine, situation.run
    found, tested = machine.packages.get("transformer-engine", ""), machine.needed["transformer-engine"]
    attention = run is not None and run.keys["attention"] == "cudnn_flash_te"
    wanted = situation.in_engine or (run is not None and run.backend_wanted == "transformer_engine")
    if fault := machine.jax.engine:
        user = "attention: cudnn_flash_te" if attention else "backend transformer_engine"
        if wanted or attention:
            return problem(f"{user}: {fault}", "./scripts/install_te.sh")
        return ok(
            "this run does without Transformer Engine" if run else f"without Transformer Engine: {fault}"
        )
    if _same(found, tested):
        return ok(f"Transformer Engine {found}")
    return note(
        f"Transformer Engine {found}; tested with {tested}, and {'.'.join(map(str, te_library.OLDEST))} is the "
        "oldest that works",
        f"./scripts/install_te.sh installs {tested}; {_MATRIX}",
    )


def _same(found: str, needed: str) -> bool:
    """Whether a version is the one that is needed; what a vendor appends after a plus sign does not count.

    A version that ends in `.*` stands for all that begin like it.
    """
    public = found.partition("+")[0]
    if needed.endswith(".*"):
        return f"{public}.".startswith(needed[:-1])
    return bool(found) and needed in ("any", public)
