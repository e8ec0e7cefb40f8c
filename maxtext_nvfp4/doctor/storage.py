"""Where checkpoints go, how many fit, and whether what the run reads is there."""

from maxtext_nvfp4.doctor.facts import Situation
from maxtext_nvfp4.doctor.findings import Finding, listed, note, ok, problem, size

_LOCAL = ("btrfs", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
"""File systems that other nodes do not see by themselves."""


def folder(situation: Situation) -> Finding | None:
    """The folder for checkpoints can be written."""
    run = situation.run
    if run is None:
        return None
    place = run.folder
    if place is None:
        return note(
            "enable_checkpointing: false: a job that is stopped begins again",
            "enable_checkpointing: true, and checkpoint_period",
        )
    if not place.nearest:
        return note(
            f"{place.path} is not a file system, and was not tried", "write a file there with your tools"
        )
    if not place.writable:
        return problem(
            f"{place.nearest} is not writable", "base_output_directory: a folder that you may write"
        )
    return ok(f"{place.path}, on {place.kind}")


def space(situation: Situation) -> Finding | None:
    """The checkpoints that are kept, and one more while it is written, fit."""
    run = situation.run
    if run is None or run.folder is None or not run.folder.nearest:
        return None
    place, each, keep = run.folder, run.checkpoint_bytes, run.keys["max_num_checkpoints_to_keep"]
    steps, period = run.keys["steps"], run.keys["checkpoint_period"]
    assert isinstance(steps, int)
    assert isinstance(period, int)
    every = -(-steps // period) + bool(run.keys["save_checkpoint_on_start"])
    # A new one is complete before the oldest goes.
    count = min(every, keep + 1) if isinstance(keep, int) and keep > 0 else every
    needed = max(1, count - place.saved) * each
    found = f"a checkpoint is {size(each)}, {count} of them at most; {size(place.free)} free"
    if place.saved:
        found += f", {place.saved} there"
    if needed <= place.free:
        return ok(found)
    fits = place.free // each + place.saved
    if fits > 1:
        fix = f"max_num_checkpoints_to_keep: {fits - 1}, or another base_output_directory"
    else:
        fix = f"base_output_directory: a folder with {size(2 * each)} free and more"
    if not isinstance(keep, int) and fits > 1:
        return note(f"{found}; max_num_checkpoints_to_keep is not set, so all are kept", fix)
    return problem(found, fix)


def shared(situation: Situation) -> Finding | None:
    """All nodes see the folder for checkpoints."""
    run = situation.run
    if run is None or run.folder is None or situation.cluster.nodes == 1 or not run.folder.nearest:
        return None
    if run.folder.kind in _LOCAL:
        return note(
            f"{run.folder.nearest} is on {run.folder.kind}, which the other nodes see only if this one exports it",
            "base_output_directory: a folder on a parallel file system, or a bucket",
        )
    return ok(f"{run.folder.nearest} is on {run.folder.kind}")


def data(situation: Situation) -> Finding | None:
    """Files that the config names are there."""
    run = situation.run
    if run is None:
        return None
    if run.missing_paths:
        return problem(
            f"not there: {listed(list(run.missing_paths))}", "paths that exist on every node, in these keys"
        )
    return ok("every path that the config names is there")


def resume(situation: Situation) -> Finding | None:
    """The checkpoints that are there belong to this run's recipe."""
    run = situation.run
    if run is None or run.folder is None or not run.folder.nearest:
        return None
    if run.refusal:
        return problem(run.refusal, "another run_name to begin anew, or nvfp4.allow_recipe_change=true")
    return ok(f"{run.folder.saved} checkpoints to go on from" if run.folder.saved else "a new run")
