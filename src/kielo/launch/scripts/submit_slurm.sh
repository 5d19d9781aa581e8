# Options in the environment (sbatch's man page: "input environment variables") take the place of job.sh's, and those of
# an allocation around this shell do not go together with them.
clean_environment() {
    local name
    for name in "${!SBATCH_@}" "${!SRUN_@}" "${!SLURM_@}"; do
        case $name in
            SLURM_CONF | SLURM_CONF_SERVER | SLURM_CLUSTERS | SBATCH_CLUSTERS | SLURM_JWT) ;; # which Slurm it is
            SBATCH_*) left+=("$name=${!name}") && unset "$name" ;;
            *) unset "$name" ;;
        esac
    done
}

submit_one() { timeout 300 sbatch --parsable --export=ALL ${1:+--dependency="afterany:$1"} ${2:+--exclude="$2"} "$FOLDER/job.sh" | id_of; }

# What Slurm made of a job: a line for each fact. Of a partition list it is the list.
facts_of() {
    timeout 60 scontrol --oneliner show job "$1" | tr -s ' ' '\n' | awk -F = '
        $1 == "Account" || $1 == "Partition" || $1 == "QOS" { print tolower($1), $2 }
        $1 == "NumNodes" { split($2, range, "-"); print "nodes", range[1] }
        $1 == "TimeLimit" {
            days = 0; time = $2
            if (time ~ /-/) { split(time, parts, "-"); days = parts[1]; time = parts[2] }
            split(time, clock, ":"); print "seconds", days * 86400 + clock[1] * 3600 + clock[2] * 60 + clock[3]
        }'
}

cancel_job() { timeout 60 scancel "$1"; }
