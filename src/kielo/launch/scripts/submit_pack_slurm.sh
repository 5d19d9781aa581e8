submit_shares() { sbatch --parsable --array="1-$SHARES" "$FOLDER/job.sh" | cut -d ';' -f 1; }
submit_join() { sbatch --parsable ${1:+--dependency="afterany:$1"} "$FOLDER/job.sh" | cut -d ';' -f 1; }
