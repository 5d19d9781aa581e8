submit_one() { qsub ${1:+-W "depend=afterany:$1"} "$FOLDER/job.sh" | cut -d . -f 1; }
