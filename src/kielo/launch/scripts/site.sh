# ---- What is made ------------------------------------------------------------------------------------------------------
# All in $FOLDER, the folder of this script:
#   image_NAME.sif             the container image, if it is built here
#   venv_TIME[.sqsh]           the environment with Kielo, never changed, because jobs in the queue may use it
#   caches/                    of pip, the container's program and Hugging Face
#   site.json                  names the newest of them for `kielo launch`, and is written last
# Run it again for a newer Kielo. Older images and environments may be removed by hand, once no job needs them.

set -u -o pipefail
umask 022
say() { printf 'kielo site %s: %s\n' "$SITE" "$*"; }
refuse() { say "$*" >&2; exit 1; }

if [ -d "$KIELO" ]; then KIELO=$(cd "$KIELO" && pwd); fi
if [ -n "$WHEELS" ] && ! WHEELS=$(cd "$WHEELS" && pwd); then refuse "WHEELS names no folder"; fi
FOLDER=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit 1
cd "$FOLDER" || exit 1
if [ "$(uname -m)" != "$ARCHITECTURE" ]; then
    refuse "this machine has $(uname -m) processors, and the nodes have $ARCHITECTURE. Fix: run this on a node, in a short job"
fi
if [[ $FOLDER/ == "${HOME:-/root}"/* ]]; then say "note: $FOLDER is in your home. Place of environments: ${STORAGE:-the card does not say}"; fi
if [ -z "$WHEELS" ] && { [ -z "$KIELO" ] || { [[ $KIELO == /* ]] && [ ! -e "$KIELO" ]; }; }; then
    refuse "${KIELO:-the source of Kielo} is not here. Fix: KIELO=FOLDER_OF_KIELO bash $0"
fi

# Caches are here and not in the home, which is small on most sites.
mkdir -p caches/pip caches/huggingface caches/container
export PIP_CACHE_DIR=$FOLDER/caches/pip HF_HOME=$FOLDER/caches/huggingface PIP_DISABLE_PIP_VERSION_CHECK=1
export SINGULARITY_CACHEDIR=$FOLDER/caches/container SINGULARITY_TMPDIR=$FOLDER/caches/container
export APPTAINER_CACHEDIR=$FOLDER/caches/container APPTAINER_TMPDIR=$FOLDER/caches/container

# ---- The image ---------------------------------------------------------------------------------------------------------
if [ -n "$BUILD_FROM" ]; then
    IMAGE=$FOLDER/$IMAGE
    if [ ! -f "$IMAGE" ]; then
        say "building $IMAGE from $BUILD_FROM"
        "${CONTAINER[0]}" build "$IMAGE.part.sif" "$BUILD_FROM" || refuse "the image could not be built"
        mv "$IMAGE.part.sif" "$IMAGE" || exit 1
    fi
elif [ -n "$IMAGE" ] && [ ! -e "$IMAGE" ]; then
    refuse "$IMAGE is not here; is this a login node of $SITE? Fix: kielo site $CARD --container IMAGE"
elif [ -n "$IMAGE" ]; then
    IMAGE=$(readlink -f "$IMAGE") # jobs keep the image that the environment was made in, even if a name such as "latest" changes
fi

# Run a command where ranks will run: in the container, if there is any. Further binds are in $binds.
binds=()
inside() {
    if [ -z "$IMAGE" ]; then "$@"; else "${CONTAINER[@]}" --bind "$(IFS=,; printf '%s' "$FOLDER$SOURCES${binds[*]:+,${binds[*]}}")" "$IMAGE" "$@"; fi
}
SOURCES=
if [[ $KIELO == /* ]] && [ -e "$KIELO" ]; then SOURCES+=,$KIELO; fi
if [ -n "$WHEELS" ]; then SOURCES+=,$WHEELS; fi

# ---- The environment ---------------------------------------------------------------------------------------------------
# The first Python that is new enough and has torch, else the first that is new enough.
version='import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 11))'
python='' torch='' older=()
for name in ${PYTHON:-python python3 python3.13 python3.12 python3.11}; do
    found=$(inside "$name" -c "$version" 2> /dev/null) || { older+=("$name${found:+ is $found}"); continue; }
    torch=$(inside "$name" -c 'import torch; print(torch.__version__)' 2> /dev/null) || torch=
    if [ -z "$python" ] || [ -n "$torch" ]; then python=$name; fi
    if [ -n "$torch" ]; then break; fi
done
if [ -z "$python" ]; then
    refuse "no Python of 3.11 or newer (${older[*]}). Fix: a module that has one (module avail python), then PYTHON=NAME bash $0"
fi

# The site's torch is kept, because it is built for its devices and network.
if [ -n "$torch" ]; then
    say "$python has torch $torch, which is kept"
    printf 'torch==%s\n' "${torch%%+*}" > caches/constraints.txt
else
    say "$python has no torch; torch $TORCH is installed"
    printf 'torch==%s.*\n' "$TORCH" > caches/constraints.txt
fi
options=(--constraint "$FOLDER/caches/constraints.txt")
case $KIELO in
    /*) wanted="${KIELO}[train]" ;;
    *) wanted="kielo[train] @ $KIELO" ;;
esac
if [ -n "$WHEELS" ]; then
    wanted="kielo[train]"
    options+=(--no-index --find-links "$WHEELS")
    if [ -z "$torch" ] && [ -f "$WHEELS/constraints.txt" ]; then options+=(--constraint "$WHEELS/constraints.txt"); fi
fi

name=venv_$(date -u +%Y%m%dT%H%M%SZ)
squash='' made=$FOLDER/$name
if [ -e "$made" ] || [ -e "$made.sqsh" ]; then refuse "$made exists already. Fix: wait a second"; fi
mkdir "$made" || exit 1
# shellcheck disable=SC2317 # trap calls it
clean_up() { rm -rf -- "${FOLDER:?}/$name" "$FOLDER/.$name.sqsh"; }
trap clean_up EXIT
trap 'exit 130' INT TERM HUP
venv=$made
if [ -n "$IMAGE" ] && [ "${#SQUASH[@]}" -gt 0 ]; then
    if ! command -v mksquashfs > /dev/null; then refuse "mksquashfs is not on this machine's PATH, and the card wants the environment in one file"; fi
    venv=$MOUNT # its own path is written into an environment, so it is made where it will be mounted
    binds=("$made:$MOUNT")
    squash=$made.sqsh
fi
say "making the environment"
inside "$python" -m venv ${torch:+--system-site-packages} "$venv" || refuse "no environment could be made"
inside "$venv/bin/python" -m pip install "${options[@]}" "$wanted" || refuse "Kielo could not be installed; what pip says is above"

if [ -n "$squash" ]; then
    say "packing it into $squash: one file in place of tens of thousands"
    mksquashfs "$made" "$FOLDER/.$name.sqsh" "${SQUASH[@]}" -noappend -no-progress || refuse "the environment could not be packed"
    mv "$FOLDER/.$name.sqsh" "$squash" || exit 1
    binds=("$squash:$MOUNT:image-src=/")
fi

# ---- It works, and is written down ---------------------------------------------------------------------------------------
# As ranks will start it. A driver runs wheels of its own CUDA's first number, and older wheels.
check='import sys, torch; cuda = torch.version.cuda or "0"; print(torch.__version__, cuda.split(".")[0])'
told=$(inside "$venv/bin/python" -c "$check") || refuse "torch cannot be imported from the new environment"
read -r torch cuda <<< "$told"
if [ -n "$DRIVER_CUDA" ] && [ "$cuda" -gt "${DRIVER_CUDA%%.*}" ]; then
    if [ -n "$squash" ]; then rm -f -- "$squash"; fi
    refuse "torch $torch is built for CUDA $cuda, and the driver runs $DRIVER_CUDA at most. Fix: PIP_EXTRA_INDEX_URL with an index of torch for CUDA ${DRIVER_CUDA%%.*}, and TORCH=VERSION bash $0"
fi
record='import platform, sys
from datetime import UTC, datetime
from kielo.artifact.launch_files import MadeSite
from kielo.artifact.stage_json import write_json
names = ("cluster", "image", "venv", "squash", "torch")
now = datetime.now(UTC).isoformat(timespec="seconds")
write_json(sys.argv[1], MadeSite(**dict(zip(names, sys.argv[2:])), python=platform.python_version(), made_at=now))'
# Under an empty home, because a colleague's home has other packages.
mkdir -p caches/empty_home
inside env HOME="$FOLDER/caches/empty_home" "$venv/bin/python" -c 'import kielo.train.run' ||
    refuse "kielo.train.run cannot be imported from the new environment, perhaps because a package was only in your home"
inside "$venv/bin/python" -c "$record" "$FOLDER" "$SITE" "$IMAGE" "$venv" "$squash" "$torch" ||
    refuse "Kielo cannot be imported from the new environment"
inside "$venv/bin/python" -m pip list --format freeze > "$FOLDER/packages.txt"
trap - EXIT
if [ -n "$squash" ]; then clean_up; fi
say "done: torch $torch; kielo launch RECIPE --cluster $CARD --site $FOLDER"
