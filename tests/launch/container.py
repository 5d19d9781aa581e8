"""A stand-in for Singularity: what it starts sees, below one folder, only what `--bind` names.

`make_container` writes a program that is called as Singularity is: `PROGRAM exec --bind PATH:PATH:ro,… IMAGE
COMMAND`. The rest of the machine, with its Python, is the image.
"""

import subprocess
from pathlib import Path

_PROGRAM = """#!/bin/bash
# {program} exec --bind ... IMAGE COMMAND
if [ -z "$IN_CONTAINER" ]; then
    IN_CONTAINER=yes exec unshare --mount --map-root-user "$0" "$@"
fi
unset IN_CONTAINER
set -e
hidden='{hidden}' aside='{hidden}.aside'
[ "$1" = exec ] || {{ echo "container: '$1' is no command" >&2; exit 255; }}
shift
binds=()
while [[ $1 = --* ]]; do
    if [ "$1" = --bind ]; then
        IFS=, read -ra these <<< "$2"
        binds+=("${{these[@]}}")
        shift
    fi
    shift
done
[ -e "$1" ] || {{ echo "container: could not open image $1" >&2; exit 255; }}
shift
here=$PWD
sources=()
for bind in "${{binds[@]}}"; do
    named=${{bind%%:*}}
    sources+=("$(realpath -e -- "$named")") || {{ echo "container: $named doesn't exist" >&2; exit 255; }}
done
mount --rbind "$hidden" "$aside"
mount -t tmpfs none "$hidden"
for number in "${{!binds[@]}}"; do
    source=${{sources[number]}}
    IFS=: read -r named target mode <<< "${{binds[number]}}"
    target=${{target:-$named}}
    [[ $target = "$hidden"/* ]] || continue
    source=$aside${{source#"$hidden"}}
    mkdir -p "$(dirname "$target")"
    if [ -d "$source" ]; then mkdir -p "$target"; else touch "$target"; fi
    mount --rbind "$source" "$target"
    if [ "$mode" = ro ]; then mount -o remount,bind,ro "$target"; fi
done
mount -t tmpfs none "$aside"
cd "$here" 2> /dev/null || cd /
exec "$@"
"""


def why_no_container() -> str:
    """Why nothing can be hidden on this machine; empty: it can."""
    tried = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True
    )
    return "" if tried.returncode == 0 else "no namespace of mounts can be made here"


def make_container(program: Path, hidden: Path) -> Path:
    """Writes the program; `hidden` is the folder below which nothing is seen that is not bound."""
    program.parent.mkdir(parents=True, exist_ok=True)
    hidden.with_name(hidden.name + ".aside").mkdir(exist_ok=True)
    program.write_text(_PROGRAM.format(program=program, hidden=hidden))
    program.chmod(0o755)
    return program
