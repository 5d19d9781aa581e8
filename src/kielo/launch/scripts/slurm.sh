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

# ---- Submission
# Options in the environment (sbatch's man page: "input environment variables") replace job.sh's. Options of an allocation
# around this shell conflict with them.
clean_environment() {
    local name
    for name in "${!SBATCH_@}" "${!SRUN_@}" "${!SLURM_@}"; do
        case $name in
            SLURM_CONF | SLURM_CONF_SERVER | SLURM_CLUSTERS | SBATCH_CLUSTERS | SLURM_JWT) ;; # which Slurm it is
            SBATCH_*) left+=("$name=${!name}") && unset "$name" ;;
            *) unset "$name" ;;
        esac
    done
}

submit_one() { timeout 300 sbatch --parsable --export=ALL ${1:+--dependency="afterany:$1"} ${2:+--exclude="$2"} "$FOLDER/job.sh" | id_of; }

# What Slurm made of a job: a line for each fact. A list of partitions is one fact.
facts_of() {
    timeout 60 scontrol --oneliner show job "$1" | tr -s ' ' '\n' | awk -F = '
        $1 == "Account" || $1 == "Partition" || $1 == "QOS" { print tolower($1), $2 }
        $1 == "NumNodes" { split($2, range, "-"); print "nodes", range[1] }
        $1 == "TimeLimit" {
            days = 0; time = $2
            if (time ~ /-/) { split(time, parts, "-"); days = parts[1]; time = parts[2] }
            split(time, clock, ":"); print "seconds", days * 86400 + clock[1] * 3600 + clock[2] * 60 + clock[3]
        }'
}

cancel_job() { timeout 60 scancel "$1"; }

submit_shares() { timeout 300 sbatch --parsable --export=ALL ${1:+--dependency="afterany:$1"} --array="1-$SHARES" "$FOLDER/job.sh" | id_of; }
