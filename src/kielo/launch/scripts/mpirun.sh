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

leave_out_of_waiting_jobs() { say "jobs that wait cannot be told to leave out $1 here; launch again to do so"; }

describe_nodes() { printf '%s\n' "${hosts[@]}"; }

# PBS and Grid Engine give no warning before the time is over, and Grid Engine has no signal for a job but the one that
# ends it. So this script takes the time itself, and looks whether the chain was ended, which `kielo cancel` does.
watch_the_time() {
    while [ "$SECONDS" -lt "$((WALL_SECONDS - GRACE_SECONDS))" ] && [ ! -f "$CHAIN/stopped" ]; do sleep 2; done
    kill -USR1 $$
}
