# ---- The rungs of a ladder ---------------------------------------------------------------------------------------------
# Each of RUNGS is a launch of its own, which takes a few steps and saves nothing. A rung that fails, or exceeds its seconds in
# LIMITS, does not stop later rungs. Its outcome is in its launch's chain/attempts and logs/.

cd "$WORKING_FOLDER" || exit 1
failed=0
for number in "${!RUNGS[@]}"; do
    printf '%s kielo ladder: %s\n' "$(date -u +%FT%TZ)" "${RUNGS[number]}"
    # A rung is asked to stop at its limit, and is ended two minutes later.
    timeout --signal=TERM --kill-after=120 "${LIMITS[number]}" bash -l "${RUNGS[number]}/job.sh" || failed=$((failed + 1))
done
printf '%s kielo ladder: %s of %s rungs failed\n' "$(date -u +%FT%TZ)" "$failed" "${#RUNGS[@]}"
[ "$failed" -eq 0 ]
