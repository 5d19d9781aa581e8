set -o pipefail
# Submit the jobs of the chain. Each waits until the jobs before it are over, and does nothing if the run is finished.
# bash submit.sh [JOBS]
cd "$WORKING_FOLDER" || exit 1
mkdir -p "$FOLDER/chain" "$FOLDER/logs"
left_out=$(left_out | paste -sd ,)
previous=$(tail -n 1 "$FOLDER/chain/jobs" 2> /dev/null)
for ((number = 1; number <= ${1:-$JOBS}; number++)); do
    if ! job=$(submit_one "$previous" "$left_out") || ! refuse_other_job "$job"; then
        echo "job $number was refused; submitted: $((number - 1))" >&2
        if [ "$number" -eq 1 ]; then exit 1; fi
        exit 0
    fi
    echo "$job" | tee -a "$FOLDER/chain/jobs"
    previous=$job
done
