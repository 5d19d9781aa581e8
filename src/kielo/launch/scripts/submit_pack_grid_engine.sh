submit_shares() { qsub -terse ${ACCOUNT:+-g "$ACCOUNT"} -t "1-$SHARES" "$FOLDER/job.sh" | cut -d . -f 1; }
submit_join() { qsub -terse ${ACCOUNT:+-g "$ACCOUNT"} ${1:+-hold_jid "$1"} "$FOLDER/job.sh"; }
