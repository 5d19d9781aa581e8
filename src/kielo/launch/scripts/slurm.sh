# ---- Slurm -------------------------------------------------------------------------------------------------------------

JOB=${SLURM_JOB_ID:?this script is for sbatch}
RESTARTS=${SLURM_RESTART_COUNT:-0} # Slurm leaves it unset before the first requeue

# srun and squeue read options from these: of the shell that submitted, of the site's profiles, of sbatch itself
# (SBATCH_EXPORT=NONE leaves srun an empty environment).
unset SLURM_EXPORT_ENV "${!SRUN_@}" "${!SQUEUE_@}"

# scontrol is not inside of containers, so the hosts are asked for out here
hosts_of_job() { timeout 60 scontrol show hostnames "$SLURM_JOB_NODELIST"; }

# Starts one task a device, or a node, in the background; $step is then the process to signal and to wait for.
# The step ends when any task fails; without that, the others would wait for it, at full price.
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

# Is this job to make room for another one? It was asked to stop, and has the partition's grace time to do so.
is_preempted() { timeout 60 scontrol --oneliner show job "$JOB" | grep -q ' JobState=RUNNING .* PreemptTime=[0-9]'; }

# This job waits again, in its place before those that follow.
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
