# Nodes that are left out, by $RUN/launch/left_out_nodes; an entry holds for 7 days, for nodes are repaired.
left_out() {
    local oldest
    oldest=$(date -u -d '7 days ago' +%F)
    if [ -f "$RUN/launch/left_out_nodes" ]; then awk -v oldest="$oldest" '$2 >= oldest { print $1 }' "$RUN/launch/left_out_nodes" | sort -u; fi
}
