set -o pipefail
# Submits a job for each share, and one after all of them, which makes what is missing and joins the parts.
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
