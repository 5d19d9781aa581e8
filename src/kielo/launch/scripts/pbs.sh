# ---- PBS ---------------------------------------------------------------------------------------------------------------

JOB=${PBS_JOBID:?this script is for qsub}
JOB=${JOB%%.*}
RESTARTS=$((${PBS_RUNCOUNT:-1} - 1))

hosts_of_job() { sort -u "$PBS_NODEFILE"; }

# ---- Submission
# PBS_DEFAULT names another server, and PBS_DPREFIX other lines than #PBS. Other variables belong to a job around this shell.
clean_environment() {
    local name
    for name in "${!PBS_@}"; do
        case $name in
            PBS_CONF_FILE | PBS_EXEC | PBS_HOME | PBS_SERVER) ;; # which PBS it is
            PBS_DEFAULT | PBS_DPREFIX) left+=("$name=${!name}") && unset "$name" ;;
            *) unset "$name" ;;
        esac
    done
}

submit_one() { timeout 300 qsub ${1:+-W "depend=afterany:$1"} "$FOLDER/job.sh" | id_of; }

# What PBS made of a job: a line for each fact. A line end and a tab continue a line of qstat.
facts_of() {
    timeout 60 qstat -f "$1" | sed -e ':a' -e 'N' -e '$!ba' -e 's/\n\t//g' | awk -F ' = ' '
        { sub(/^ +/, "", $1) }
        $1 == "project" { print "account", $2 }
        $1 == "queue" { print "partition", $2 }
        $1 == "Resource_List.nodect" { print "nodes", $2 }
        $1 == "Resource_List.walltime" { split($2, clock, ":"); print "seconds", clock[1] * 3600 + clock[2] * 60 + clock[3] }'
}

cancel_job() { timeout 60 qdel "$1"; }

submit_shares() { timeout 300 qsub ${1:+-W "depend=afterany:$1"} -J "1-$SHARES" "$FOLDER/job.sh" | id_of; }
