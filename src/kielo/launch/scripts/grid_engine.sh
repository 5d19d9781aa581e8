# ---- Grid Engine -------------------------------------------------------------------------------------------------------

JOB=${JOB_ID:?this script is for qsub}
RESTARTS=${RESTARTED:-0}

hosts_of_job() { awk '{ print $1 }' "$PE_HOSTFILE"; }

# ---- Submission
# Grid Engine adds the options in a person's own files to those of job.sh; no variable holds options.
clean_environment() {
    local file
    for file in .sge_request "${HOME:-/}/.sge_request"; do
        if grep -qs '^ *-' "$file"; then echo "note: $file adds options to each job: $(grep '^ *-' "$file" | tr -s '\n' ' ')" >&2; fi
    done
}

submit_one() { timeout 300 qsub -terse ${ACCOUNT:+-g "$ACCOUNT"} ${1:+-hold_jid "$1"} "$FOLDER/job.sh" | id_of; }

# What Grid Engine made of a job: a line for each fact, with the resources that job.sh asks for.
facts_of() {
    timeout 60 qstat -j "$1" | awk -v queue="$PARTITION" '
        /^hard[ _]resource_list:/ {
            count = split($NF, resources, ",")
            for (number = 1; number <= count; number++) {
                split(resources[number], one, "=")
                if (one[1] == queue) print "nodes", one[2]
                if (one[1] == "h_rt") print "seconds", one[2]
            }
        }'
}

cancel_job() { timeout 60 qdel "$1"; }

submit_shares() { timeout 300 qsub -terse ${ACCOUNT:+-g "$ACCOUNT"} ${1:+-hold_jid "$1"} -t "1-$SHARES" "$FOLDER/job.sh" | id_of; }
