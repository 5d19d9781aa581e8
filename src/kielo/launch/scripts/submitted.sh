# Cancel a job if a variable, a file of options or a rule of the site changed what job.sh asks for. It would bill another account,
# or end at another time than the ranks believe.
refuse_other_job() {
    local job=$1 fact value wanted other=() known=
    while read -r fact value; do
        known=yes
        case $fact in
            account) wanted=${ACCOUNT,,} value=${value,,} ;; # Slurm keeps accounts in lower case
            partition) wanted=$PARTITION ;;
            qos) # NERSC's Slurm makes gpu_regular of regular
                wanted=$QOS
                if [[ $value == *_"$QOS" ]]; then value=$QOS; fi
                ;;
            nodes) wanted=$JOB_NODES ;;
            seconds) wanted=$WALL_SECONDS ;;
        esac
        if [ -z "$wanted" ] || [ "$value" = "$wanted" ] || [[ $value =~ ^(\(null\)|n/a|N/A|)$ ]]; then continue; fi
        # Schedulers count minutes.
        if [ "$fact" = seconds ] && [ "$value" -ge "$wanted" ] && [ "$value" -lt "$((wanted + 60))" ]; then continue; fi
        other+=("$fact $value in place of $wanted")
    done < <(LC_ALL=C facts_of "$job" 2> /dev/null)
    if [ -z "$known" ]; then echo "note: job $job could not be read back; is it in the project and partition that you asked for?" >&2; fi
    if [ "${#other[@]}" -eq 0 ]; then return 0; fi
    cancel_job "$job"
    echo "job $job was cancelled, because it had $(IFS=';'; printf '%s' "${other[*]}" | sed 's/;/, /g'): something here replaces what job.sh asks for" >&2
    return 1
}

# The id in a scheduler's answer: ID;CLUSTER (Slurm), ID.SERVER or ID[].SERVER (PBS), ID.1-9:1 (Grid Engine). Some sites print
# lines of their own around it.
id_of() {
    local said id
    said=$(cat)
    id=$(sed -n 's/^ *\([0-9][0-9]*\(\[]\)\{0,1\}\)\([.;].*\)\{0,1\}$/\1/p' <<< "$said" | tail -n 1)
    if [ -n "$id" ]; then echo "$id"; return 0; fi
    echo "the scheduler named no job${said:+ (it said: ${said:0:200})}; look whether it has one before you submit again" >&2
    return 1
}

left=()
clean_environment
if [ "${#left[@]}" -gt 0 ]; then echo "note: left out of the environment, because these would replace what job.sh asks for: ${left[*]}" >&2; fi
