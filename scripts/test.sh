#!/usr/bin/env bash
# Sets up .venv, then checks the code and runs the tests.
#
#   ./scripts/test.sh                              every check, then all tests but the slow ones
#   ./scripts/test.sh tests/test_recipe.py -k y    only pytest, with these arguments
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

"$ROOT/scripts/setup.sh"
cd "$ROOT"
bin=$VENV/bin
unset PYTHONDONTWRITEBYTECODE

if (($# > 0)); then
    exec "$bin/python" -m pytest "$@"
fi

check() {
    say "== $*"
    "$bin/$1" "${@:2}"
}

check ruff check
check ruff format --check
check mypy
check lint-imports --no-logo
check python scripts/flag_table.py --check
# Two processes: more of them mostly wait for the same cores, and each holds its own MaxText and compiler.
check python -m pytest -m "not slow" --numprocesses 2 --dist loadfile --durations 10
