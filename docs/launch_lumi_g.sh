#!/bin/bash -l
# poro_34b on 64 nodes of LUMI-G (CSC, Finland): 4 MI250X a node, each two devices, written by `kielo launch`.
# Network: 4 × 200 Gb/s Slingshot-11, dragonfly, 24 groups of 124 nodes. Card: https://github.com/Lumi-supercomputer/lumi-userguide 6c3a26c, 2024-10, https://github.com/Lumi-supercomputer/LUMI-AI-Guide a7e3387, 2026-05, https://github.com/Lumi-supercomputer/LUMI-training-materials d64bc58, 2026-06, 2026-11.
# Ask for whole nodes with --gpus-per-node=8 and --account=project_<id>; never --gpus-per-task. A job that asks for 64 cores is never scheduled.
# partitions: https://github.com/Lumi-supercomputer/lumi-userguide 6c3a26c, 2024-10
# devices: https://github.com/Lumi-supercomputer/lumi-userguide 6c3a26c, 2024-10, https://github.com/Lumi-supercomputer/LUMI-training-materials d64bc58, 2026-06
# options: https://github.com/Lumi-supercomputer/LUMI-AI-Guide a7e3387, 2026-05
# account: https://github.com/Lumi-supercomputer/lumi-userguide 6c3a26c, 2024-10
#
#SBATCH --job-name=poro_34b
#SBATCH --partition=standard-g
#SBATCH --account=project_462000000
#SBATCH --nodes=64
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --mem=480G
#SBATCH --time=48:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/scratch/project_462000000/kielo/runs/poro_34b/launch/0001/logs/job_%j.log

SITE=lumi_g
WORKING_FOLDER=/scratch/project_462000000/kielo
RUN=/scratch/project_462000000/kielo/runs/poro_34b
FOLDER=/scratch/project_462000000/kielo/runs/poro_34b/launch/0001
WORK=train
NODES=64
SPARES=0
DEVICES_PER_NODE=8
CORES_PER_DEVICE=7
WALL_SECONDS=172800
GRACE_SECONDS=300 # the ranks are asked to save this long before the end
SILENCE_SECONDS=5878 # without a line in the log, the attempt counts as dead
MOST_WITHOUT_NEW=3 # attempts in a row without a new checkpoint
TORCHRUN=no # in place of one task a device
PREFLIGHT=no # the nodes are checked before they train
# cpu_bind: https://github.com/Lumi-supercomputer/LUMI-AI-Guide a7e3387, 2026-05, https://github.com/Lumi-supercomputer/lumi-userguide 6c3a26c, 2024-10, https://github.com/Lumi-supercomputer/lumi-reframe-tests a6d7984, 2026-03: all agree
ARCHITECTURE=x86_64
CPU_BIND='mask_cpu:0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,0xfe,0xfe00,0xfe00000000,0xfe0000000000'
HOST_SUFFIX=
NODE_FOLDER="/tmp"
# container: https://github.com/Lumi-supercomputer/LUMI-AI-Guide a7e3387, 2026-05
# image: https://github.com/CSCfi/csc-user-guide dff081f, 2026-08
# network_log: https://github.com/HewlettPackard/shs-ccl-docs 438fcce, 2026-04, https://github.com/Lumi-supercomputer/lumi-userguide 6c3a26c, 2024-10
# stripe: https://wiki.lustre.org/Lustre_Striping_Best_Practices, 2026-08: files of one client up to 1 GiB have 1 to 4
IMAGE=/appl/local/laifs/containers/lumi-multitorch-latest.sif
CONTAINER=(singularity exec --bind /scratch/project_462000000/kielo --bind "$NODE_FOLDER" /appl/local/laifs/containers/lumi-multitorch-latest.sif)
NETWORK_LOG='Selected [Pp]rovider is cxi|Loaded net plugin AWS Libfabric'
STRIPE=(lfs setstripe -c 2 -S 4M)

unset PYTHONPATH PYTHONHOME PYTHONUSERBASE
# setup: https://github.com/Lumi-supercomputer/LUMI-AI-Guide a7e3387, 2026-05
module use /appl/local/laifs/modules
module load lumi-aif-singularity-bindings
# ---- Slurm -------------------------------------------------------------------------------------------------------------

JOB=${SLURM_JOB_ID:?this script is for sbatch}
RESTARTS=${SLURM_RESTART_COUNT:-0} # Slurm leaves it unset before the first requeue

# Options of srun and squeue from the submitting shell, the site's profiles and sbatch itself (SBATCH_EXPORT=NONE leaves srun
# an empty environment).
unset SLURM_EXPORT_ENV "${!SRUN_@}" "${!SQUEUE_@}"

# containers have no scontrol, so it runs out here
hosts_of_job() { timeout 60 scontrol show hostnames "$SLURM_JOB_NODELIST"; }

# Start one task a device, or a node, in the background. $step is the process to signal and to wait for. The step ends when any
# task fails, because the others would wait for it, at full price.
start_tasks() {
    local tasks_per_node=$1 cores=$2 bind=$3
    shift 3
    srun --export=ALL --nodes="$NODES" --ntasks="$((NODES * tasks_per_node))" --ntasks-per-node="$tasks_per_node" \
        --nodelist="$(joined "${hosts[@]}")" --cpus-per-task="$cores" --cpu-bind="verbose,$bind" \
        --kill-on-bad-exit=1 --label "$@" &
    step=$!
}

# One short task on each node, beside a step that may hang.
on_each_node() {
    srun --export=ALL --overlap --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 --nodelist="$(joined "${hosts[@]}")" \
        --time=3 --label "$@"
}

# True if this job must make room for another job: it was asked to stop, within the partition's grace time.
is_preempted() { timeout 60 scontrol --oneliner show job "$JOB" | grep -q ' JobState=RUNNING .* PreemptTime=[0-9]'; }

# This job waits again, in its place before later jobs.
come_again() { timeout 60 scontrol requeue "$JOB"; }

cancel_jobs() { timeout 60 scancel --quiet --state=PENDING "$@"; }

# A waiting job was submitted when fewer nodes were known to be bad.
leave_out_of_waiting_jobs() {
    local job
    for job in "${waiting[@]}"; do
        timeout 60 scontrol update "JobId=$job" "ExcNodeList=$1" || say "job $job could still get a node that is left out"
    done
}

describe_nodes() { timeout 60 sinfo -N -o '%N %t %E' --nodes="$(joined "${hosts[@]}")"; }

# Nodes that are left out, by $RUN/launch/left_out_nodes. An entry is valid for 7 days, because nodes are repaired.
left_out() {
    if [ ! -f "$RUN/launch/left_out_nodes" ]; then return 0; fi
    awk -v oldest="$(date -u -d '7 days ago' +%F)" '$2 >= oldest { print $1 }' "$RUN/launch/left_out_nodes" | sort -u
}

# ---- The attempt -------------------------------------------------------------------------------------------------------
# Files of a chain of jobs, all in $FOLDER/chain:
#   jobs                    the ids of the chain's jobs, in order, as submit.sh wrote them
#   attempts                a line for each start (with the newest result) and each end (how, why):
#                           start|end, job, restart, nodes, seconds since 1970, newest|how, why
#   stopped                 why no job of this chain works any more; remove it, and submit.sh continues the chain
#   failed_nodes            nodes on which a rank hung, a line for each time
# and in $RUN/launch/left_out_nodes, for all chains of the run: node, day, reason.
# $WORK is train, evaluate or watch. Kielo decides in the container what follows an attempt (launch/decide.py, and
# launch/decide_evaluation.py), and writes $ATTEMPT/decision.

cd "$WORKING_FOLDER" || exit 1
CHAIN=$FOLDER/chain
ATTEMPT=$FOLDER/logs/$JOB.$RESTARTS
mkdir -p "$CHAIN" "$ATTEMPT"

say() { printf '%s kielo job %s: %s\n' "$(date -u +%FT%TZ)" "$JOB" "$*"; }
joined() { local IFS=,; printf '%s' "$*"; }
note() { printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$1" "$JOB" "$RESTARTS" "$NODES" "$(date +%s)" "$2" "$3" >> "$CHAIN/attempts"; }

# The later jobs of the chain.
mapfile -t waiting < <(awk -v own="$JOB" 'found; $1 == own { found = 1 }' "$CHAIN/jobs" 2>/dev/null)

# No job of the chain works any more: waiting jobs are cancelled, and a job that starts nevertheless ends at once.
stop_chain() {
    printf '%s\n' "$1" > "$CHAIN/stopped"
    say "the chain ends here: $1"
    if [ "${#waiting[@]}" -gt 0 ]; then cancel_jobs "${waiting[@]}"; fi
}

if [ -f "$CHAIN/stopped" ]; then
    stop_chain "$(cat "$CHAIN/stopped")"
    exit 0
fi
if [ "$(uname -m)" != "$ARCHITECTURE" ]; then
    stop_chain "$(hostname) has $(uname -m) processors, and the card of $SITE says $ARCHITECTURE"
    exit 1
fi

# The newest result: the last checkpoint with a manifest, or the number of results of an evaluation.
newest_result() {
    local found
    if [ "$WORK" = train ]; then
        found=$(cd "$RUN/train/checkpoints" 2> /dev/null && printf '%s\n' step_*/manifest.json | grep -xE 'step_[0-9]+/manifest.json' | tail -n 1)
        printf '%s' "${found%/*}"
    else
        found=$({ find "$RUN"/evaluate_tasks/*/*/manifest.json; cat "$RUN/watch/history.jsonl"; } 2> /dev/null | wc -l)
        printf '%s results' "$found"
    fi
}

# A chain without progress stops, even if Kielo cannot start to decide it. A watch whose time ended had perhaps nothing to score.
count_attempt() {
    local without=0 last=
    newest=$(newest_result)
    if [ -f "$CHAIN/attempts" ]; then
        IFS=$'\t' read -r without last < <(awk -F '\t' -v newest="$newest" -v work="$WORK" '
            $1 == "start" { n = ($6 == newest) ? n + 1 : 0 }
            $1 == "end" { why = $7; if (work == "watch" && $6 == "requeue" && n > 0) n-- }
            END { printf "%d\t%s\n", n, why }' "$CHAIN/attempts")
    fi
    if [ "$without" -ge "$MOST_WITHOUT_NEW" ]; then
        stop_chain "$without attempts in a row made nothing after ${newest:-the start}; the last: $last"
        exit 1
    fi
}
count_attempt

# Of $NODES + $SPARES nodes, the first that are not left out. Nodes that were blamed in this job are taken last.
lines() { printf '%s\n' "$@"; }
suspects=()
pick_hosts() {
    local good=() order=()
    mapfile -t good < <(hosts_of_job | grep -vxF -f <(left_out))
    mapfile -t order < <(lines "${good[@]}" | grep -vxF -f <(lines "${suspects[@]}"); lines "${good[@]}" | grep -xF -f <(lines "${suspects[@]}"))
    # Task 0 runs on the first node in the scheduler's order, because srun sorts its list.
    mapfile -t hosts < <(lines "${good[@]}" | grep -xF -f <(lines "${order[@]:0:NODES}") | grep .)
    if [ "${#hosts[@]}" -eq "$NODES" ]; then return 0; fi
    say "of this job's $((NODES + SPARES)) nodes only ${#hosts[@]} are not left out, and $NODES are needed"
    return 1
}

# A node's own folder, for caches of compilers. --bind gives it to the container, and separates paths by these two signs.
if [[ $NODE_FOLDER != /* ]] || { [ "${#CONTAINER[@]}" -gt 0 ] && [[ $NODE_FOLDER = *[,:]* ]]; }; then
    stop_chain "node_folder of the card of $SITE is '$NODE_FOLDER' here, which is no path from /, or one with , or : in it"
    exit 1
fi
OWN_FOLDER=$NODE_FOLDER/kielo_$(id -un)_$JOB

# Before a container starts on the nodes, its folders must exist.
prepare_nodes() {
    # Leftovers of killed jobs in /dev/shm take memory. The nodes are this job's alone.
    # shellcheck disable=SC2016 # each node expands it
    local reason prepare='find /dev/shm -maxdepth 1 -user "$(id -un)" -name "nccl-*" -delete
        why=$(mkdir -p -- "$1" 2>&1) && [ -w "$1" ] || echo "node_folder: $(hostname) cannot write to $1: $why"'
    on_each_node bash -c "$prepare" prepare "$OWN_FOLDER" > "$ATTEMPT/prepare.txt" 2>&1
    reason=$(grep -m 1 -o 'node_folder: .*' "$ATTEMPT/prepare.txt" | tr '\t' ' ')
    if [ -z "$reason" ]; then return 0; fi
    say "$reason"
    note start "$newest" "" && note end failed "$reason"
    return 1
}

# The ranks meet on the first node, at a port of this job, attempt and step.
choose_meeting() {
    MASTER_ADDR=${hosts[0]}$HOST_SUFFIX
    MASTER_PORT=$((12000 + (${JOB//[!0-9]/} + 101 * RESTARTS + $1) % 20000))
    printf 'export MASTER_ADDR=%q MASTER_PORT=%q NODES=%q DEVICES_PER_NODE=%q CACHES=%q\n' "$MASTER_ADDR" "$MASTER_PORT" \
        "$NODES" "$DEVICES_PER_NODE" "$OWN_FOLDER" > "$ATTEMPT/meeting.sh"
}

if ! pick_hosts; then
    note start "$newest" "" && note end "no nodes" "too few nodes that are not left out"
    exit 1
fi
choose_meeting 0
prepare_nodes || exit 1

# The attempt's nodes and software: a change of them explains many a change of results.
{
    echo "job $JOB, restart $RESTARTS, $(date -u +%FT%TZ), ${#hosts[@]} nodes, ranks meet at $MASTER_ADDR:$MASTER_PORT"
    describe_nodes
    uname -srm
    for tool in nvidia-smi rocm-smi; do if command -v "$tool" > /dev/null; then timeout 60 "$tool"; fi; done
    if [ "${#CONTAINER[@]}" -gt 0 ]; then stat --format 'image %n: %s bytes, changed %y' "$IMAGE"; fi
    "${CONTAINER[@]}" bash "$FOLDER/rank.sh" "$FOLDER" "$ATTEMPT" --versions
} > "$ATTEMPT/software.txt" 2>&1

# The files of checkpoints are spread over the file system, if the site has a command for it.
if [ "${#STRIPE[@]}" -gt 0 ] && [ ! -d "$RUN/train/checkpoints" ] && mkdir -p "$RUN/train/checkpoints"; then
    "${STRIPE[@]}" "$RUN/train/checkpoints" || say "checkpoints are not spread: ${STRIPE[*]} failed"
fi

# Without a sign of life (a line of the log, a question of a task, a checkpoint, the start), dump each rank's stack and end the step.
watch_for_life() {
    local stack_of network=unknown
    # shellcheck disable=SC2016 # each node expands it
    stack_of='for pid in $(pgrep -u "$(id -u)" -f "kielo train"); do py-spy dump --pid "$pid"; done'
    while sleep 30; do
        if [ "$network" = unknown ] && [ "$RUN/train/metrics.jsonl" -nt "$ATTEMPT/meeting.sh" ]; then
            network=checked
            if [ -n "$NETWORK_LOG" ] && [ "$NODES" -gt 1 ] && ! grep -qE "$NETWORK_LOG" "$ATTEMPT"/*.00000.log; then
                say "warning: rank 0 does not say that it uses the fast network (no line with: $NETWORK_LOG)"
            fi
        fi
        touch -d "$SILENCE_SECONDS seconds ago" "$ATTEMPT/oldest_sign"
        if find "$ATTEMPT/meeting.sh" "$RUN"/train/{metrics.jsonl,asking} "$RUN"/train/checkpoints/step_* -maxdepth 0 \
            -newer "$ATTEMPT/oldest_sign" 2> /dev/null | grep -q .; then continue; fi
        say "no line in the log for $SILENCE_SECONDS s; the ranks' stacks are in $ATTEMPT/stacks.txt"
        on_each_node "${CONTAINER[@]}" bash -c "$stack_of" > "$ATTEMPT/stacks.txt" 2>&1
        echo "no sign of life for $SILENCE_SECONDS s" > "$ATTEMPT/silent"
        kill -TERM "$step"
        sleep 60
        kill -KILL "$step"
    done
}

# Run rank.sh on every device, or node, with its exit code in $code. A signal ends `wait` early, so wait until the step is gone.
step=
run_step() {
    local watcher='' tasks=("$DEVICES_PER_NODE" "$CORES_PER_DEVICE" "$CPU_BIND")
    if [ "$1" = --torchrun ]; then tasks=(1 "$((CORES_PER_DEVICE * DEVICES_PER_NODE))" none); fi
    start_tasks "${tasks[@]}" "${CONTAINER[@]}" bash "$FOLDER/rank.sh" "$FOLDER" "$ATTEMPT" "$1" "$GRACE_SECONDS" 2>> "$ATTEMPT/step.txt"
    if [ "$1" != --preflight ] && [ "$WORK" = train ]; then watch_for_life & watcher=$!; fi
    while kill -0 "$step" 2> /dev/null; do wait "$step"; done
    wait "$step"
    code=$?
    if [ -n "$watcher" ]; then kill "$watcher" 2> /dev/null; fi
}

# Check the nodes. Spare nodes take the place of refused nodes. $refusal: why the job cannot train, or empty.
check_nodes() {
    local bad=()
    run_step --preflight
    if [ "$code" -eq 0 ]; then return; fi
    if [ -f "$RUN/bad_nodes.txt" ]; then mapfile -t bad < "$RUN/bad_nodes.txt"; fi
    refusal="preflight refused the job; $RUN/preflight.json says why"
    if [ "${#bad[@]}" -eq 0 ] || [ "${#bad[@]}" -eq "$NODES" ]; then return; fi
    printf "%s $(date -u +%F) refused by preflight in job $JOB\n" "${bad[@]}" >> "$RUN/launch/left_out_nodes"
    leave_out_of_waiting_jobs "$(left_out | paste -sd ,)"
    if pick_hosts; then
        say "$(joined "${bad[@]}") refused by preflight; spare nodes take their place"
        choose_meeting 7
        refusal=
    else
        refusal="preflight refused $(joined "${bad[@]}"), and there are no spare nodes; later jobs leave them out"
    fi
}

# Slurm's warning goes to the ranks. Other signals, and other schedulers', come to this script, which passes them on.
asked=no
trap 'asked=yes; touch "$ATTEMPT/asked"; if [ -n "$step" ]; then kill -USR1 "$step" 2> /dev/null; fi' USR1 TERM INT
timer=
if declare -F watch_the_time > /dev/null; then watch_the_time & timer=$!; fi
# Caches, and copies of the state in memory (checkpoint/node_memory.py), are removed with the job.
run_hash=$(printf %s "$(realpath -m "$RUN/train/checkpoints")" | sha256sum | cut -c 1-16)
trap 'if [ -n "$timer" ]; then kill "$timer" 2> /dev/null; fi
    on_each_node rm -rf -- "$OWN_FOLDER" "/dev/shm/kielo_$(id -u)/$run_hash"' EXIT

# Ask Kielo what follows (`Decision` in launch/decide.py), and set the variables of its answer.
decide() {
    outcome=failed ends='' again=no blamed_nodes='' left_out_nodes=''
    reason=${1:-the ranks ended with exit code $code; the first error is in $ATTEMPT}
    # A rank that fails ends the others with the same signal as a scheduler that makes room.
    if [ "$WORK" != train ] && declare -F is_preempted > /dev/null && is_preempted; then touch "$ATTEMPT/asked"; fi
    timeout 300 "${CONTAINER[@]}" bash "$FOLDER/rank.sh" "$FOLDER" "$ATTEMPT" --decide "$code" "$1" > "$ATTEMPT/decide.txt" 2>&1
    # shellcheck source=/dev/null
    if [ -f "$ATTEMPT/decision" ]; then . "$ATTEMPT/decision"; else say "Kielo could not decide what follows; $ATTEMPT/decide.txt says why"; fi
}

# One attempt: the ranks work, and `decide` returns the outcome and what follows.
run_attempt() {
    note start "$newest" ""
    say "attempt from ${newest:-the start} on $(joined "${hosts[@]}"); logs of each node and rank in $ATTEMPT"
    if [ "$PREFLIGHT" = yes ] && [ "$attempts" -eq 0 ]; then check_nodes; fi
    if [ "$asked" = yes ] || [ -f "$CHAIN/stopped" ]; then
        outcome=requeue reason="asked to stop before it began" ends='' blamed_nodes='' left_out_nodes=''
    else
        if [ -z "$refusal" ]; then run_step "$([ "$TORCHRUN" = yes ] && echo --torchrun || echo --rank)"; fi
        decide "$refusal"
    fi
    note end "$outcome" "$reason"
    say "$outcome${reason:+: $reason}"
}

# End the job, unless another attempt follows in it.
judge() {
    if [ -n "$blamed_nodes" ]; then
        say "blamed: $blamed_nodes"
        mapfile -t -O "${#suspects[@]}" suspects < <(tr , '\n' <<< "$blamed_nodes")
    fi
    if [ -n "$left_out_nodes" ]; then leave_out_of_waiting_jobs "$(left_out | paste -sd ,)"; fi
    if [ -n "$ends" ]; then stop_chain "$ends"; fi
    if [ "$outcome" = requeue ] && [ -z "$ends" ] && [ ! -f "$CHAIN/stopped" ] &&
        declare -F is_preempted > /dev/null && is_preempted && come_again; then
        say "made room for another job: this job waits again, and no job of the chain is spent"
        exit 0
    fi
    # A start takes minutes of many nodes: another start in this job must be worth it.
    if [ -n "$ends" ] || [ "$again" != yes ] || [ "$asked" = yes ] ||
        [ "$((WALL_SECONDS - SECONDS))" -le "$((3 * GRACE_SECONDS))" ]; then
        if [ "${#waiting[@]}" -eq 0 ] && [ ! -f "$CHAIN/stopped" ]; then say "no job is left in the chain; bash $FOLDER/submit.sh submits more"; fi
        if [ "$outcome" = finished ] || [ "$outcome" = requeue ]; then exit 0; fi
        exit 1
    fi
}

code=0
attempts=0
refusal=
while true; do
    run_attempt
    judge
    attempts=$((attempts + 1))
    count_attempt
    pick_hosts || exit 1
    ATTEMPT=$FOLDER/logs/$JOB.$RESTARTS.$attempts
    mkdir -p "$ATTEMPT"
    choose_meeting "$((13 * attempts))"
    say "again in the same job, $SECONDS s after its start"
done
