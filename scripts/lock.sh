#!/usr/bin/env bash
# Rewrites requirements.lock from pyproject.toml and requirements.in: every package pinned and hashed,
# for Python 3.12 on Linux x86-64 and aarch64. Keeps the pins it has unless told otherwise:
#
#   ./scripts/lock.sh                          after editing pyproject.toml or requirements.in
#   ./scripts/lock.sh --upgrade                newest versions of everything
#   ./scripts/lock.sh --upgrade-package NAME   newest version of one package
#
# The overrides and exclusions are in pyproject.toml under [tool.uv].
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

find_uv pinned
find_python
UV_CUSTOM_COMPILE_COMMAND=scripts/lock.sh "$UV" pip compile --quiet --universal --python "$PYTHON" \
    --python-version 3.12 --generate-hashes --no-emit-index-url --output-file requirements.lock \
    "$@" pyproject.toml requirements.in
say "wrote requirements.lock: $(grep -c '^[a-z0-9].*==' requirements.lock) packages"
