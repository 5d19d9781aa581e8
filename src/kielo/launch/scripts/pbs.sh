# ---- PBS ---------------------------------------------------------------------------------------------------------------

JOB=${PBS_JOBID:?this script is for qsub}
JOB=${JOB%%.*}
RESTARTS=$((${PBS_RUNCOUNT:-1} - 1))

hosts_of_job() { sort -u "$PBS_NODEFILE"; }
