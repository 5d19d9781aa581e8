submit_one() { sbatch --parsable ${2:+--exclude="$2"} "$FOLDER/job.sh" | cut -d ';' -f 1; }
