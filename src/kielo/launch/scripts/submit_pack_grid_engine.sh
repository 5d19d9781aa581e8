submit_shares() { qsub -terse ${ACCOUNT:+-g "$ACCOUNT"} -t "1-$SHARES" "$FOLDER/job.sh" | cut -d . -f 1; }
