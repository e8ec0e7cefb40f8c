#!/usr/bin/env bash
# Rewrites the lock files: every package pinned and hashed, for Python 3.12 on Linux x86-64 and aarch64.
#
#   requirements.lock         from pyproject.toml and requirements.in
#   requirements-te.lock      from requirements-te.in: Transformer Engine
#   requirements-cuda.lock    from requirements-cuda.in: what JAX needs to see an NVIDIA GPU
#
# A package that is in two of them has one version. Keeps the pins it has unless told otherwise:
#
#   ./scripts/lock.sh                          after editing one of the files they are made from
#   ./scripts/lock.sh --upgrade                newest versions of everything
#   ./scripts/lock.sh --upgrade-package NAME   newest version of one package
#
# The overrides and exclusions are in pyproject.toml under [tool.uv].
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

find_uv pinned
find_python

lock() {
    local name=$1
    shift
    UV_CUSTOM_COMPILE_COMMAND=scripts/lock.sh "$UV" pip compile --quiet --universal --python "$PYTHON" \
        --python-version 3.12 --generate-hashes --no-emit-index-url --output-file "$name" "$@"
    say "wrote $name: $(grep -c '^[a-z0-9].*==' "$name") packages"
}

lock requirements.lock "$@" pyproject.toml requirements.in
lock requirements-te.lock "$@" --no-deps --constraints requirements.lock requirements-te.in
# JAX itself and what it needs on a CPU are in requirements.lock already.
mapfile -t present < <(sed -nE 's/^([a-z0-9-]+)==.*/--no-emit-package=\1/p' requirements.lock)
lock requirements-cuda.lock "$@" --constraints requirements.lock --constraints requirements-te.lock \
    "${present[@]}" requirements-cuda.in
