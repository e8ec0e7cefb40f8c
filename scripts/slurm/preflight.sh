#!/usr/bin/env bash
# Checks a run before its job proper starts, in the environment of one of its tasks; scripts/slurm/train.sbatch
# calls it.
#
#   scripts/slurm/preflight.sh CONFIG.yml [key=value ...] --nodes N --gpus-per-node N
#
# Exit status: that of `maxtext-nvfp4 doctor`, 0 only when the run can start.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/../common.sh"

find_program || die "maxtext-nvfp4 is neither in $VENV nor on PATH; run scripts/setup.sh"
exec "$PROGRAM" doctor "$@"
