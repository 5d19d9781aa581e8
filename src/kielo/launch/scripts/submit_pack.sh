set -o pipefail
# Submit a job for each share, and a job after all of them, which makes missing parts and joins all.
cd "$WORKING_FOLDER" || exit 1
mkdir -p "$FOLDER/chain" "$FOLDER/logs"
shares=
if [ "$SHARES" -gt 1 ]; then
    if ! shares=$(submit_shares) || ! refuse_other_job "$shares"; then exit 1; fi
    echo "$shares" | tee -a "$FOLDER/chain/jobs"
fi
if join=$(submit_one "$shares") && refuse_other_job "$join"; then
    echo "$join" | tee -a "$FOLDER/chain/jobs"
else
    echo "the job that joins the parts was refused; when the others are over: bash $FOLDER/job.sh" >&2
    [ -n "$shares" ]
fi
