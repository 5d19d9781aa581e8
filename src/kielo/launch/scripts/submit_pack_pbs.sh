submit_shares() { qsub -J "1-$SHARES" "$FOLDER/job.sh" | cut -d . -f 1; }
