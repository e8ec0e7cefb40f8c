#!/usr/bin/env bash
# Makes or updates .venv: Python 3.12, the hash-checked packages of requirements.lock and this package,
# editable. Takes well under a second when nothing changed. Packages that others put into .venv stay.
#
#   ./scripts/setup.sh
#
# MAXTEXT_NVFP4_PYTHON names the Python 3.12 to use when none is found.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

STAMP=$VENV/.maxtext-nvfp4-setup    # holds the fingerprint of the inputs of a finished set-up
UNFINISHED=$VENV/.maxtext-nvfp4-unfinished

wanted=$(cat requirements.lock pyproject.toml scripts/setup.sh scripts/common.sh | sha256sum)
up_to_date() { [[ -x $VENV/bin/maxtext-nvfp4 && -x $VENV/bin/python && $(cat "$STAMP" 2>/dev/null) == "$wanted" ]]; }

up_to_date && exit 0

lock_checkout
up_to_date && exit 0

start=$SECONDS
find_uv
reinstall=()
if answers 3.12 "$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; then
    # An installation that was cut short can leave a package half unpacked but listed as installed.
    [[ -e $UNFINISHED ]] && reinstall=(--reinstall)
else
    find_python
    say "making .venv with $PYTHON"
    "$UV" venv --quiet --no-project --clear --python "$PYTHON" "$VENV"
fi
rm -f -- "$STAMP"
: >"$UNFINISHED"

# --no-deps: the lock is complete. One package exists as source only; the lock pins what builds it too.
"$UV" pip install --quiet --python "$VENV/bin/python" --no-deps --require-hashes "${reinstall[@]}" \
    --build-constraints requirements.lock -r requirements.lock
"$UV" pip install --quiet --python "$VENV/bin/python" --no-deps --no-build-isolation --editable .

# Shows that MaxText imports, and writes the bytecode of what it imports even where the environment says
# not to (as many container images do): without it every start of Python here takes 12 s longer.
imports='import maxtext.trainers.pre_train.train, tensorflow_datasets, pytest, hypothesis
tensorflow_datasets.dataset_builders.store_as_tfds_dataset'
env -u PYTHONDONTWRITEBYTECODE JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 \
    "$VENV/bin/python" -c "$imports" >.cache/setup.log 2>&1 ||
    die "MaxText does not import in .venv:"$'\n'"$(tail -n 5 .cache/setup.log)"

rm -f -- "$UNFINISHED"
printf '%s\n' "$wanted" >"$STAMP.new"
mv -- "$STAMP.new" "$STAMP"
say "set up .venv in $((SECONDS - start)) s"
