#!/usr/bin/env bash
# Trains with one process per GPU, or one process where there is none. Slurm starts it once per task, Kubernetes
# once per pod; without either it starts all processes of this machine.
#
#   scripts/launch.sh CONFIG.yml [key=value ...]
#
# Which processes these are comes from the first of:
#
#   Slurm, inside srun       one process per task, the coordinator on the first node of the step
#   Kubernetes Indexed Job   JOB_COMPLETION_INDEX, which Kubernetes sets; from the manifest JAX_COORDINATOR_ADDRESS,
#                            PODS_IN_JOB, for a JobSet JOBS and JOB_INDEX, and if it is not one per GPU
#                            PROCESSES_PER_POD
#   by hand                  JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID, JAX_PROCESS_COUNT: one process
#   none of them             this machine alone
#
# Every process gets the last three; with one process per GPU, JAX_LOCAL_DEVICE_IDS too. All GPUs stay visible to
# CUDA, so that NCCL finds its way between them.
#
# Exit status: 2 for an environment that cannot be; that of the first process that failed, the others being killed;
# 143 after SIGTERM, here or to any other process of the run: all save a checkpoint and end.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

DEFAULT_PORT=61440
STOPPED=75 # what the processes are told to end with after SIGTERM, as 0 is for a complete run

refuse() {
    say "error: $*"
    exit 2
}

# Needs the variable to be a whole number from MIN to MAX, without signs or leading zeros.
number() {
    local name=$1 min=$2 max=$3
    [[ ${!name} =~ ^(0|[1-9][0-9]{0,8})$ && ${!name} -ge $min && ${!name} -le $max ]] ||
        refuse "$name=${!name}: write a whole number from $min to $max"
}

# Needs each variable to be set and not empty.
need() {
    local why=$1 name
    shift
    for name in "$@"; do
        [[ -n ${!name:-} ]] || refuse "$name is not set: $why"
    done
}

# Refuses variables that belong to another way of starting.
without() {
    local why=$1 name
    shift
    for name in "$@"; do
        [[ ! -v $name ]] || refuse "$name=${!name}: $why; unset $name"
    done
}

# Completes JAX_COORDINATOR_ADDRESS with the default port.
coordinator_of_environment() {
    coordinator=$JAX_COORDINATOR_ADDRESS
    [[ $coordinator =~ ^(\[[^]]+\]|[^]:[]+)(:([1-9][0-9]{0,4}))?$ && ${BASH_REMATCH[3]:-1} -le 65535 ]] ||
        refuse "JAX_COORDINATOR_ADDRESS=$coordinator: write host or host:port, such as node1:$DEFAULT_PORT"
    [[ -n ${BASH_REMATCH[2]} ]] || coordinator+=:$DEFAULT_PORT
}

# Sets gpus to the number that CUDA would show here.
count_gpus() {
    local devices
    if [[ ${JAX_PLATFORMS:-} == cpu ]]; then
        gpus=0
    elif [[ -v CUDA_VISIBLE_DEVICES ]]; then
        case $CUDA_VISIBLE_DEVICES in
            "" | -1* | NoDevFiles) gpus=0 ;; # the last is Slurm's word for none
            *) IFS=, read -ra devices <<<"$CUDA_VISIBLE_DEVICES" && gpus=${#devices[@]} ;;
        esac
    else
        gpus=$({ nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true)
    fi
}

# Each of the following sets coordinator, count, and of the processes to start here: first (its id), processes,
# and device, the GPU of the first one, or nothing.

from_slurm() {
    local here pattern='^([^],[]+)(\[([^],-]+))?'
    [[ -n ${SLURM_STEP_NODELIST:-} && -n ${SLURM_PROCID:-} ]] ||
        refuse "SLURM_JOB_ID=${SLURM_JOB_ID:-}: this is a Slurm job, but not a task that srun started in it;" \
            "write srun scripts/launch.sh ..."
    need "srun sets it beside SLURM_PROCID=$SLURM_PROCID; write srun scripts/launch.sh ..." \
        SLURM_NTASKS SLURM_LOCALID SLURM_JOB_ID
    without "Slurm numbers the processes" JAX_PROCESS_ID JAX_PROCESS_COUNT JAX_LOCAL_DEVICE_IDS
    number SLURM_NTASKS 1 1000000
    number SLURM_PROCID 0 $((SLURM_NTASKS - 1))
    number SLURM_LOCALID 0 $((SLURM_NTASKS - 1))
    number SLURM_JOB_ID 0 4294967295
    first=$SLURM_PROCID count=$SLURM_NTASKS processes=1
    if [[ -n ${JAX_COORDINATOR_ADDRESS:-} ]]; then
        coordinator_of_environment # where the nodes' own names lead to the wrong network
    else
        # n1, or n1,m2, or n[1-4,7]: as JAX reads it, as containers lack scontrol
        [[ $SLURM_STEP_NODELIST =~ $pattern ]] || refuse "SLURM_STEP_NODELIST=$SLURM_STEP_NODELIST: no list of nodes"
        coordinator=${BASH_REMATCH[1]}${BASH_REMATCH[3]:-}:$((DEFAULT_PORT + SLURM_JOB_ID % 4096)) # JAX's port
    fi
    ((gpus)) || return 0
    here=$(slurm_tasks_here)
    ((gpus == here)) ||
        refuse "$here tasks on this node, and each sees $gpus GPUs: one process per GPU needs as many tasks as GPUs," \
            "all visible to each; write --ntasks-per-node=$gpus --gpus-per-node=$gpus, and no --gpus-per-task," \
            "or set CUDA_VISIBLE_DEVICES"
    device=$SLURM_LOCALID
}

# Tasks of the step on this node: SLURM_STEP_TASKS_PER_NODE is such as 4(x2),3.
slurm_tasks_here() {
    local part repeated node=${SLURM_NODEID:-0} parts
    IFS=, read -ra parts <<<"${SLURM_STEP_TASKS_PER_NODE:-$SLURM_NTASKS}"
    for part in "${parts[@]}"; do
        repeated=1
        [[ $part =~ \(x([0-9]+)\)$ ]] && repeated=${BASH_REMATCH[1]}
        ((node < repeated)) && break
        ((node -= repeated)) || true
    done
    echo "${part%%(*}"
}

from_kubernetes() {
    need "this is a pod of an Indexed Job (JOB_COMPLETION_INDEX=$JOB_COMPLETION_INDEX); write it into the manifest" \
        JAX_COORDINATOR_ADDRESS PODS_IN_JOB
    without "Kubernetes numbers the pods" JAX_PROCESS_ID JAX_PROCESS_COUNT JAX_LOCAL_DEVICE_IDS
    local JOBS=${JOBS:-1} JOB_INDEX=${JOB_INDEX:-0}
    local PROCESSES_PER_POD=${PROCESSES_PER_POD:-$((gpus ? gpus : 1))}
    number PODS_IN_JOB 1 1000000
    number JOB_COMPLETION_INDEX 0 $((PODS_IN_JOB - 1))
    number JOBS 1 10000
    number JOB_INDEX 0 $((JOBS - 1))
    number PROCESSES_PER_POD 1 1000
    ((gpus == 0 || gpus == PROCESSES_PER_POD)) ||
        refuse "PROCESSES_PER_POD=$PROCESSES_PER_POD: this pod sees $gpus GPUs, and a process has one;" \
            "write $gpus, or nothing"
    coordinator_of_environment
    processes=$PROCESSES_PER_POD
    first=$(((JOB_INDEX * PODS_IN_JOB + JOB_COMPLETION_INDEX) * processes))
    count=$((JOBS * PODS_IN_JOB * processes))
    ((gpus == 0)) || device=0
}

by_hand() {
    need "a process is described by JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID and JAX_PROCESS_COUNT; set all or none" \
        JAX_COORDINATOR_ADDRESS JAX_PROCESS_ID JAX_PROCESS_COUNT
    number JAX_PROCESS_COUNT 1 1000000
    number JAX_PROCESS_ID 0 $((JAX_PROCESS_COUNT - 1))
    coordinator_of_environment
    first=$JAX_PROCESS_ID count=$JAX_PROCESS_COUNT processes=1
}

alone() {
    without "every GPU gets a process here; set CUDA_VISIBLE_DEVICES to choose some" JAX_LOCAL_DEVICE_IDS
    first=0 processes=$((gpus ? gpus : 1))
    count=$processes
    coordinator=127.0.0.1:$((DEFAULT_PORT + $$ % 4096)) # two runs on one machine do not meet
    ((gpus == 0)) || device=0
}

(($# > 0)) || refuse "no config; write scripts/launch.sh CONFIG.yml [key=value ...]"
find_program || refuse "maxtext-nvfp4 is neither in $VENV nor on PATH; run scripts/setup.sh"
count_gpus
device=
if [[ -v SLURM_PROCID || -v SLURM_NTASKS || -v SLURM_JOB_ID ]]; then
    from_slurm
elif [[ -v JOB_COMPLETION_INDEX ]]; then
    from_kubernetes
else
    without "Kubernetes sets JOB_COMPLETION_INDEX too, with completionMode: Indexed" PODS_IN_JOB PROCESSES_PER_POD
    if [[ -v JAX_COORDINATOR_ADDRESS || -v JAX_PROCESS_ID || -v JAX_PROCESS_COUNT ]]; then
        by_hand
    else
        alone
    fi
fi

if ((gpus)); then
    . "$ROOT/scripts/env/gb200.sh"
fi

# The processes run beside this script, so that it can watch all of them and tell SIGTERM from a complete run.
pids=() terminated=
trap 'terminated=1; kill -TERM "${pids[@]}" 2>/dev/null || true' TERM
trap 'kill -KILL "${pids[@]}" 2>/dev/null || true' EXIT

export JAX_COORDINATOR_ADDRESS=$coordinator JAX_PROCESS_COUNT=$count MAXTEXT_NVFP4_STOPPED_STATUS=$STOPPED
for ((local = 0; local < processes; local++)); do
    identity=(JAX_PROCESS_ID=$((first + local)))
    [[ -z $device ]] || identity+=(JAX_LOCAL_DEVICE_IDS=$((device + local)))
    env "${identity[@]}" "$PROGRAM" train "$@" &
    pids+=($!)
    [[ -z $terminated ]] || kill -TERM $! # the signal came between the two lines
done

running=$processes
while ((running)); do
    status=0
    wait -n -p ended "${pids[@]}" || status=$?
    [[ -n ${ended:-} ]] || continue # a signal came, no process ended
    ((running -= 1)) || true
    for index in "${!pids[@]}"; do
        [[ ${pids[index]} != "$ended" ]] || unset "pids[index]"
    done
    case $status in
        0) ;;
        "$STOPPED") terminated=1 ;;
        *) exit "$status" ;;
    esac
done
[[ -z $terminated ]] || exit 143
