# ---- Grid Engine -------------------------------------------------------------------------------------------------------

JOB=${JOB_ID:?this script is for qsub}
RESTARTS=${RESTARTED:-0}

hosts_of_job() { awk '{ print $1 }' "$PE_HOSTFILE"; }
