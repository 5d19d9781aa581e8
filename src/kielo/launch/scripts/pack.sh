#!/bin/bash
# One job of the packing: job.sh starts it on a node, inside the container if there is any.
# pack.sh FOLDER K/N: that share of the parts; pack.sh FOLDER "": the missing parts, and the join
FOLDER=$1 share=$2
# shellcheck source=/dev/null
. "$FOLDER/environment.sh"
# shellcheck source=/dev/null
if [ -n "$VENV" ]; then . "$VENV/bin/activate"; fi
exec "${KIELO[@]}" run "$FOLDER/recipe.toml" --only pack ${share:+--share "$share"}
