submit_shares() { timeout 300 qsub -terse ${ACCOUNT:+-g "$ACCOUNT"} -t "1-$SHARES" "$FOLDER/job.sh" | id_of; }
