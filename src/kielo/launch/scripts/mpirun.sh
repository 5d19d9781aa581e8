# PBS and Grid Engine start tasks by Open MPI's mpirun, which ends them all when one fails, and passes SIGUSR1 on.
start_tasks() {
    local tasks_per_node=$1 cores=$2
    shift 3
    mpirun -np "$((NODES * tasks_per_node))" --host "$(joined "${hosts[@]/%/:$tasks_per_node}")" \
        --map-by "ppr:$tasks_per_node:node:PE=$cores" --bind-to core --report-bindings --tag-output "$@" &
    step=$!
}

on_each_node() {
    mpirun -np "$NODES" --host "$(joined "${hosts[@]/%/:1}")" --map-by ppr:1:node --bind-to none --tag-output "$@"
}

cancel_jobs() { timeout 60 qdel "$@"; }

leave_out_of_waiting_jobs() { say "waiting jobs cannot leave out $1 here; launch again to do so"; }

describe_nodes() { printf '%s\n' "${hosts[@]}"; }

# PBS and Grid Engine give no warning before the time is over, and Grid Engine's only signal for a job ends it. So this script
# measures the time itself, and looks whether `kielo cancel` ended the chain.
watch_the_time() {
    while [ "$SECONDS" -lt "$((WALL_SECONDS - GRACE_SECONDS))" ] && [ ! -f "$CHAIN/stopped" ]; do sleep 2; done
    kill -USR1 $$
}
