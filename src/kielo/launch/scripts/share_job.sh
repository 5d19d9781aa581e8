# ---- A shared stage ------------------------------------------------------------------------------------------------------
# Each job of an array makes its share of SHARES of the stage's parts. One more job, after all of them, makes the missing
# parts, and joins all. Finished parts are never made again.

cd "$WORKING_FOLDER" || exit 1
index=${SLURM_ARRAY_TASK_ID:-${PBS_ARRAY_INDEX:-${SGE_TASK_ID:-}}}
share=
# Grid Engine gives a job without an array the index "undefined".
if [[ $index =~ ^[0-9]+$ ]]; then share=$index/$SHARES; fi
printf '%s kielo %s: %s on %s\n' "$(date -u +%FT%TZ)" "$STAGE" "${share:-the rest, and the join}" "$(hostname)"
# In place of this shell, so that a signal reaches Python.
exec "${CONTAINER[@]}" bash "$FOLDER/$STAGE.sh" "$FOLDER" "$share"
