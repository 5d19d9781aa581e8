submit_shares() { timeout 300 sbatch --parsable --export=ALL --array="1-$SHARES" "$FOLDER/job.sh" | id_of; }
