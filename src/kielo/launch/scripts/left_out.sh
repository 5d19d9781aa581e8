# Nodes that are left out, by $RUN/launch/left_out_nodes. An entry is valid for 7 days, because nodes are repaired.
left_out() {
    if [ ! -f "$RUN/launch/left_out_nodes" ]; then return 0; fi
    awk -v oldest="$(date -u -d '7 days ago' +%F)" '$2 >= oldest { print $1 }' "$RUN/launch/left_out_nodes" | sort -u
}
