#!/bin/bash
# One job of several that share a stage, pack or corpus, after which this file is named: job.sh starts it on a node, inside the
# container if there is any.
# STAGE.sh FOLDER K/N: that share; STAGE.sh FOLDER "": what is missing, and the join
FOLDER=$1 share=$2
stage=$(basename "$0" .sh)
# shellcheck source=/dev/null
. "$FOLDER/environment.sh"
# shellcheck source=/dev/null
if [ -n "$VENV" ]; then . "$VENV/bin/activate"; fi
exec "${KIELO[@]}" run "$FOLDER/recipe.toml" --only "$stage" ${share:+--share "$share"}
