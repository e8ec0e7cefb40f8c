"""What the recipe does to the model on this cluster: sizes after sharding, and what stays in high precision."""

from maxtext_nvfp4.doctor.facts import Situation
from maxtext_nvfp4.doctor.findings import Finding, listed, note, ok, problem


def recipe(situation: Situation) -> Finding | None:
    """The config asks for NVFP4, and its GEMMs are in 4 bits."""
    run = situation.run
    if run is None:
        return None
    if not run.backend_wanted:
        return note(
            "quantization is not nvfp4: MaxText trains as without this package", "quantization: nvfp4"
        )
    if run.shapes is None or run.shapes.fault:
        return None
    count, total = run.shapes.gemms
    found = (
        f"{count} of {total} linear-layer GEMMs in 4 bits, {run.shapes.fraction:.1%} of the step's FLOPs, by "
        f"backend {run.shapes.backend}"
    )
    if not count:
        return note(found, "another nvfp4.recipe; maxtext-nvfp4 explain says why")
    return ok(found)


def gemms(situation: Situation) -> Finding | None:
    """The sizes of every 4-bit GEMM on one device are those that the backend takes."""
    run = situation.run
    if run is None or run.shapes is None:
        return None
    if run.shapes.fault:
        return problem(
            run.shapes.fault, "one of the ways that each line names; nvfp4.on_unsupported: bf16 is for all"
        )
    if changed := list(run.shapes.changed):
        return note(
            f"{len(changed)} sites are changed to what the backend can run: {listed(changed, 2)}",
            "sizes that divide: max_target_length, per_device_batch_size and tensor parallelism; explain has all",
        )
    return ok(f"backend {run.shapes.backend} takes every site")


def uncovered(situation: Situation) -> Finding | None:
    """Matrix multiplies that no 4-bit GEMM exists for are named."""
    run = situation.run
    if run is None or run.shapes is None or run.shapes.fault:
        return None
    if parts := list(run.shapes.uncovered):
        return note(
            f"in high precision: {listed(parts)}", "nothing; the speed-up is that of the other layers"
        )
    return ok("only attention, router and head stay outside")
