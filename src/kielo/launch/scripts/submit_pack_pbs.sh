submit_shares() { qsub -J "1-$SHARES" "$FOLDER/job.sh" | cut -d . -f 1; }
submit_join() { qsub ${1:+-W "depend=afterany:$1"} "$FOLDER/job.sh" | cut -d . -f 1; }
