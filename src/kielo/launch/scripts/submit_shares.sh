set -o pipefail
# Submit arrays with a job for each share. An array waits until the array before it is over, and does nothing if all is made. A job
# after all of them makes missing parts and joins all.
cd "$WORKING_FOLDER" || exit 1
mkdir -p "$FOLDER/chain" "$FOLDER/logs"
shares=
for ((number = 1; SHARES > 1 && number <= ARRAYS; number++)); do
    if ! job=$(submit_shares "$shares") || ! refuse_other_job "$job"; then
        if [ "$number" -eq 1 ]; then exit 1; fi
        echo "array $number was refused; submitted: $((number - 1))" >&2
        break
    fi
    echo "$job" | tee -a "$FOLDER/chain/jobs"
    shares=$job
done
if join=$(submit_one "$shares") && refuse_other_job "$join"; then
    echo "$join" | tee -a "$FOLDER/chain/jobs"
else
    echo "the job that joins the parts was refused; when the others are over: bash $FOLDER/job.sh" >&2
    [ -n "$shares" ]
fi
