submit_shares() { sbatch --parsable --export=ALL --array="1-$SHARES" "$FOLDER/job.sh" | id_of; }
