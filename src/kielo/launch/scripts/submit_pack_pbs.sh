submit_shares() { timeout 300 qsub -J "1-$SHARES" "$FOLDER/job.sh" | id_of; }
