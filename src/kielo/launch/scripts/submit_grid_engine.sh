submit_one() { qsub -terse ${ACCOUNT:+-g "$ACCOUNT"} ${1:+-hold_jid "$1"} "$FOLDER/job.sh"; }
