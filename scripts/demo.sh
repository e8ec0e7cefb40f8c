#!/usr/bin/env bash
# Trains configs/demo-cpu.yml, a 6-million-parameter model in NVFP4, on real text: the sources of Python's
# standard library. Each run takes up where the last one stopped and trains 150 steps more.
#
#   ./scripts/demo.sh                                     150 steps into runs/demo, then 150 more, ...
#   ./scripts/demo.sh steps=500                           up to 500 steps in all
#   ./scripts/demo.sh base_output_directory=/tmp/try run_name=bf16 quantization=
#
# Arguments are MaxText's key=value pairs and win over the file. Delete the run's folder to start again.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

STEPS=150
output=$ROOT/runs name=demo steps='' overrides=()
for pair in "$@"; do
    case $pair in
        base_output_directory=?*) output=$(realpath -m -- "${pair#*=}") ;; # MaxText needs it absolute
        run_name=?*) name=${pair#*=} ;;
        steps=*) steps=${pair#*=} ;;
        [!=-]*=*) overrides+=("$pair") ;;
        *) die "$pair: not a key=value pair, such as steps=300" ;;
    esac
done
[[ -z $steps || $steps =~ ^[1-9][0-9]*$ ]] || die "steps=$steps: write a whole number, such as steps=300"

"$ROOT/scripts/setup.sh"
unset PYTHONDONTWRITEBYTECODE

# Orbax names a checkpoint by the last step it contains, and only once it is complete.
last=-1
for checkpoint in "$output/$name/checkpoints"/*/; do
    step=$(basename -- "$checkpoint")
    [[ $step =~ ^[0-9]+$ ]] && ((step > last)) && last=$step
done
done_steps=$((last + 1))
if [[ -n $steps ]] && ((done_steps >= steps)); then
    say "$output/$name has $done_steps steps already; write steps=$((done_steps + STEPS)), say, for more"
    exit 0
fi
steps=${steps:-$((done_steps + STEPS))}

"$VENV/bin/maxtext-nvfp4" corpus --out "$output/corpus"
if ((done_steps > 0)); then
    say "resuming $output/$name after $done_steps steps, up to $steps"
else
    say "training $output/$name for $steps steps"
fi
exec "$VENV/bin/maxtext-nvfp4" train "$ROOT/configs/demo-cpu.yml" \
    base_output_directory="$output" run_name="$name" steps="$steps" \
    dataset_path="$output/corpus" tokenizer_path="$output/corpus/tokenizer.model" \
    jax_cache_dir="$ROOT/.cache/jax" "${overrides[@]}"
