# Sourced by the other scripts: the repository root, messages, uv and Python 3.12.
# shellcheck shell=bash disable=SC2034  # variables are for the scripts that source this

ROOT=$(cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
UV_VERSION=0.13.9

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

# Whether the command runs and prints a first line that starts with the given text. A pyenv shim exists
# for every version pyenv has and fails for those that are not selected, so its presence proves nothing.
answers() {
    local want=$1 out
    shift
    out=$("$@" 2>/dev/null) && [[ $out == "$want"* ]]
}

# Waits until no other set-up of this checkout runs; later ones wait until this script ends.
lock_checkout() {
    mkdir -p "$ROOT/.cache"
    exec 9>"$ROOT/.cache/setup.lock"
    flock --nonblock 9 && return
    say "waiting for another set-up of this checkout"
    flock 9
}

# Sets UV to a working uv: the one on PATH, else one installed by pip under .cache/, where it touches
# no Python environment (which Debian and others protect). `find_uv pinned` takes only UV_VERSION.
find_uv() {
    local want="uv " private=$ROOT/.cache/uv-$UV_VERSION python
    [[ ${1:-} == pinned ]] && want="uv $UV_VERSION"
    for UV in uv "$private/bin/uv"; do
        answers "$want" "$UV" --version && return
    done
    for python in python3 python3.12 python3.13 python3.11 python /usr/bin/python3; do
        answers "pip " "$python" -m pip --version || continue
        say "installing uv $UV_VERSION into .cache/"
        rm -rf -- "$private"
        "$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
            --target "$private" "uv==$UV_VERSION" >&2 || die "pip could not install uv $UV_VERSION"
        UV=$private/bin/uv
        return
    done
    die "uv is missing, and so is a python3 with pip to install it; see https://docs.astral.sh/uv"
}

# Sets PYTHON to a Python 3.12: $MAXTEXT_NVFP4_PYTHON, python3.12 on PATH, one that pyenv has, else one
# that uv has or can download. Needs find_uv.
find_python() {
    local test=(-c 'import sys; print("%d.%d" % sys.version_info[:2])') candidate
    if [[ -n ${MAXTEXT_NVFP4_PYTHON:-} ]]; then
        answers 3.12 "$MAXTEXT_NVFP4_PYTHON" "${test[@]}" ||
            die "MAXTEXT_NVFP4_PYTHON=$MAXTEXT_NVFP4_PYTHON is not a working Python 3.12"
        PYTHON=$MAXTEXT_NVFP4_PYTHON
        return
    fi
    local candidates=(python3.12)
    if command -v pyenv >/dev/null; then
        candidates+=("$(pyenv root 2>/dev/null)"/versions/3.12*/bin/python)
    fi
    for candidate in "${candidates[@]}"; do
        if answers 3.12 "$candidate" "${test[@]}"; then
            PYTHON=$("$candidate" -c 'import sys; print(sys.executable)')
            return
        fi
    done
    for candidate in found installed; do
        if [[ $candidate == installed ]]; then
            say "no Python 3.12 here; asking uv to install one"
            "$UV" python install --quiet 3.12 >/dev/null 2>&1 || break
        fi
        if PYTHON=$("$UV" python find --quiet --no-project --python-preference only-managed 3.12 2>/dev/null); then
            return
        fi
    done
    die "Python 3.12 is needed (MaxText requires it) and uv could not download one." \
        "Install it (apt, dnf, pyenv or conda), then set MAXTEXT_NVFP4_PYTHON=/path/to/python3.12"
}

# Sets PROGRAM to maxtext-nvfp4: that of .venv if there is one, else that on PATH, as in a container.
find_program() {
    PROGRAM=$VENV/bin/maxtext-nvfp4
    [[ -x $PROGRAM ]] || PROGRAM=$(command -v maxtext-nvfp4)
}
