#!/usr/bin/env bash
# Installs NVIDIA's Transformer Engine for JAX.
#
#   ./scripts/install_te.sh                into .venv, which scripts/setup.sh makes first
#   ./scripts/install_te.sh --container    only this package, into the python3 of a container that has JAX,
#                                          MaxText and Transformer Engine; changes nothing else in it
#
# Into .venv go the hash-checked packages of requirements-te.lock. One of them is compiled here: it needs a C++
# compiler ($CXX or g++), about 1.6 GB of downloads and 3 minutes, after which uv has it in its cache. With a
# GPU, JAX gets its CUDA packages (requirements-cuda.lock), without one it gets none; without a driver a
# stand-in for the driver's library is made in .venv/lib/cuda-stub, for tests. Takes well under a second when
# nothing changed.
#
# MAXTEXT_NVFP4_PYTHON names the Python 3.12 to use, for .venv or in the container.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

LOG=$ROOT/.cache/install_te.log
mkdir -p .cache

# Runs a command with its output in the log; on failure shows the end of it under the given message.
logged() {
    local message=$1
    shift
    "$@" >>"$LOG" 2>&1 </dev/null || die "$message; the end of $LOG:"$'\n'"$(tail -n 15 "$LOG")"
}

container() {
    local python=${MAXTEXT_NVFP4_PYTHON:-python3} report
    answers 3. "$python" -c 'import platform; print(platform.python_version())' ||
        die "--container: $python does not run; activate the container's Python, or set MAXTEXT_NVFP4_PYTHON"
    report=$("$python" scripts/te/container_versions.py pyproject.toml) ||
        die "nothing was installed, as $python has other packages than this plugin supports:"$'\n'"$report"
    : >"$LOG"
    logged "pip could not install this package" "$python" -m pip install --disable-pip-version-check \
        --root-user-action=ignore --no-deps --force-reinstall .
    (cd / && logged "this package does not import" "$python" -c 'import maxtext_nvfp4')
    say "installed maxtext-nvfp4, and nothing else, beside"$'\n'"$report"
}

case $* in
    "") ;;
    --container)
        container
        exit
        ;;
    *) die "$*: write nothing, or --container" ;;
esac

STAMP=$VENV/.maxtext-nvfp4-te    # holds the fingerprint of the inputs of a finished installation
UNFINISHED=$VENV/.maxtext-nvfp4-te-unfinished
SITE=$VENV/lib/python3.12/site-packages
STUB=$VENV/lib/cuda-stub/libcuda.so.1

# What this machine has: gpu, driver (but no GPU) or nothing. The stand-in has no cuInit.
machine() {
    "$VENV/bin/python" -SE -c 'import ctypes; ctypes.CDLL("libcuda.so.1").cuInit' 2>/dev/null || return 0
    if answers "GPU " nvidia-smi -L; then echo gpu; else echo driver; fi
}

up_to_date() {
    [[ $(cat "$STAMP" 2>/dev/null) == "$wanted" && (-n $machine || -e $STUB) ]] &&
        compgen -G "$SITE/transformer_engine/wheel_lib/*jax*.so" >/dev/null
}

"$ROOT/scripts/setup.sh"
machine=$(machine)
wanted=$({
    echo "$machine"
    cat requirements*.lock scripts/install_te.sh scripts/te/*.c scripts/te/*.py
} | sha256sum)
up_to_date && exit 0

lock_checkout
up_to_date && exit 0

start=$SECONDS
export CXX=${CXX:-g++}
command -v "${CXX%% *}" >/dev/null ||
    die "a C++ compiler is needed, and there is no $CXX: install g++ (apt install g++), or set CXX"
export CC=${CC:-$CXX}
headers=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[[ -e $headers/Python.h ]] ||
    die "$headers/Python.h is missing: install the headers of this Python (apt install python3.12-dev)"
answers yes python3 -c 'import sys, importlib.util as i
"'"$VENV"'" == sys.prefix or (i.find_spec("jax") and i.find_spec("transformer_engine") and print("yes"))' &&
    say "note: python3 has JAX and Transformer Engine already; --container installs this package beside them"
find_uv
: >"$LOG"
say "installing Transformer Engine; the first time downloads 1.6 GB and compiles for minutes"

if [[ -e $UNFINISHED ]]; then
    # A package can be half unpacked but listed as installed. Taken off the list it is unpacked again, from
    # uv's cache; --reinstall would download and compile everything anew.
    while IFS= read -r name; do
        rm -rf -- "$SITE/${name//-/_}"-*.dist-info
    done < <(sed -nE 's/^([a-z0-9-]+)==.*/\1/p' requirements-te.lock requirements-cuda.lock)
fi
rm -f -- "$STAMP"
: >"$UNFINISHED"
install=("$UV" pip install --python "$VENV/bin/python" --no-deps --require-hashes)

# The extension comes last, as it is compiled against the others: against CUDA in their wheels, whatever
# other CUDA this machine has. (In a build environment of its own it would ask for JAX with CUDA 12.)
extension=transformer-engine-jax
for part in others "$extension"; do
    awk -v part="$part" -v extension="$extension" \
        '/^[a-z]/ { name = $0; sub(/==.*/, "", name) } (name == extension) == (part == extension)' \
        requirements-te.lock >".cache/$part.lock"
    logged "Transformer Engine could not be installed" env NVTE_BUILD_USE_NVIDIA_WHEELS=1 "${install[@]}" \
        --no-build-isolation -r ".cache/$part.lock"
done

verify=(scripts/te/verify.py)
if [[ $machine == gpu ]]; then
    logged "JAX's CUDA packages could not be installed" "${install[@]}" -r requirements-cuda.lock
    verify+=(--gpu)
else
    logged "JAX's CUDA packages could not be removed" \
        "$UV" pip uninstall --python "$VENV/bin/python" jax-cuda13-plugin jax-cuda13-pjrt
    rm -rf -- "$SITE/jax_plugins/xla_cuda13" # what an installation that was cut short has left
fi
if [[ -z $machine ]]; then
    mkdir -p -- "${STUB%/*}"
    logged "the stand-in for libcuda.so.1 could not be compiled" \
        "$CXX" -x c++ -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$STUB" scripts/te/libcuda_stub.c
    verify+=(--stub "$STUB")
fi

versions=$(env -u PYTHONDONTWRITEBYTECODE "$VENV/bin/python" "${verify[@]}" 2>>"$LOG") ||
    die "Transformer Engine or JAX does not load in .venv; the end of $LOG:"$'\n'"$(tail -n 15 "$LOG")"

rm -f -- "$UNFINISHED"
printf '%s\n' "$wanted" >"$STAMP.new"
mv -- "$STAMP.new" "$STAMP"
say "$versions"
say "installed Transformer Engine in $((SECONDS - start)) s"
