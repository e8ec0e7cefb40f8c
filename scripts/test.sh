#!/usr/bin/env bash
# Sets up .venv, then checks the code and runs the tests.
#
#   ./scripts/test.sh                              every check, then all tests but the slow ones
#   ./scripts/test.sh tests/test_recipe.py -k y    only pytest, with these arguments
#   ./scripts/test.sh te [-k y]                    installs Transformer Engine and runs the tests that need it
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

"$ROOT/scripts/setup.sh"
cd "$ROOT"
bin=$VENV/bin
unset PYTHONDONTWRITEBYTECODE

if [[ ${1:-} == te ]]; then
    "$ROOT/scripts/install_te.sh"
    exec "$bin/python" -m pytest tests/te --numprocesses 2 --dist loadfile "${@:2}"
fi
if (($# > 0)); then
    ignore=(--ignore tests/te)
    [[ "$* " == *tests/te[/\ ]* ]] && ignore=()
    exec "$bin/python" -m pytest "${ignore[@]}" "$@"
fi

check() {
    say "== $*"
    "$bin/$1" "${@:2}"
}

check ruff check
check ruff format --check
check mypy
check lint-imports --no-logo
check shellcheck .ci/run scripts/*.sh scripts/*/*.sh scripts/*/*.sbatch
check python scripts/flag_table.py --check
# Two processes: more of them mostly wait for the same cores, and each holds its own MaxText and compiler.
check python -m pytest --ignore tests/te -m "not slow" --numprocesses 2 --dist loadfile --durations 10
