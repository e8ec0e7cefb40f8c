#!/usr/bin/env bash
# Runs the benchmarks one after the other and writes the page benchmarks/RESULTS.md from their results.
#
#   ./scripts/bench.sh                                 all of them, for about an hour on two cores
#   ./scripts/bench.sh emulation_overhead ...          only these
#   ./scripts/bench.sh --quick [NAME ...]              small sizes, a few minutes; shows that they run, measures little
#   ./scripts/bench.sh NAME -- --preset h200           what follows -- goes to the benchmarks
#   ./scripts/bench.sh --label h200 NAME -- ...        results to benchmarks/results/NAME_h200.json instead of NAME_cpu.json
#   ./scripts/bench.sh --peers                         first installs the peers that are written in PyTorch
#
# Quick results go to runs/benchmarks/ and change no page. The peers (PyTorch, torchao, fouroversix) get an environment of
# their own, .cache/bench-peers, made by pip: where pip knows of PyTorch's CPU builds it takes them, elsewhere it downloads
# several GB of CUDA libraries. Without them quantize_throughput says that they are not installed.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

PEERS=$ROOT/.cache/bench-peers
ALL=(quantize_throughput emulation_overhead telemetry_overhead checkpoint_overhead startup_time compile_scaling)

install_peers() {
    [[ -x $PEERS/bin/python ]] || python3 -m venv "$PEERS"
    local pip=("$PEERS/bin/python" -m pip install --quiet --disable-pip-version-check)
    "${pip[@]}" setuptools wheel ninja packaging numpy torch==2.13.0 torchao==0.18.0 transformers==5.24.0
    # Its set-up imports PyTorch, and compiles CUDA kernels unless it is told not to.
    SKIP_CUDA_BUILD=1 "${pip[@]}" --no-build-isolation --no-deps fouroversix==1.0.5
}

quick=() label=cpu names=() others=() out=$ROOT/benchmarks/results
while (($# > 0)); do
    case $1 in
        --quick) quick=(--quick) out=$ROOT/runs/benchmarks ;;
        --peers) peers=1 ;;
        --label) label=${2:?--label needs a name} && shift ;;
        --) others=("${@:2}") && break ;;
        -*) die "$1: not an option; see the head of scripts/bench.sh" ;;
        *)
            [[ " ${ALL[*]} " == *" $1 "* ]] || die "$1: no such benchmark; there are ${ALL[*]}"
            names+=("$1")
            ;;
    esac
    shift
done
((${#names[@]} > 0)) || names=("${ALL[@]}")

"$ROOT/scripts/setup.sh"
unset PYTHONDONTWRITEBYTECODE
cd "$ROOT"
[[ -z ${peers:-} ]] || install_peers

mkdir -p "$out"
for name in "${names[@]}"; do
    say "== $name"
    "$VENV/bin/python" "benchmarks/$name.py" "${quick[@]}" "${others[@]}" \
        --json "$(realpath --relative-to=. -- "$out")/${name}_$label.json"
done
((${#quick[@]} > 0)) || "$VENV/bin/python" benchmarks/results_page.py
