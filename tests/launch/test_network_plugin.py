"""A card that names a network of NCCL loads its plugin: without it NCCL ends a job on several nodes."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from kielo.launch.launch_folder import write_launch
from kielo.recipe.cards import cluster, clusters
from tests.launch.hand_made import plan
from tests.launch.stand_in import Site

PLUGIN = "AWS Libfabric"


def names_a_network(name: str) -> bool:
    jobs = cluster(name).jobs
    return jobs is not None and "NCCL_NET" in jobs.environment | jobs.environment_between_nodes


# A site's modules; what its page says that they load. uenv is an option of the job, of which Slurm makes it.
SITE = f"""
load_plugin() {{ export HAS_PLUGIN='{PLUGIN}'; }}
export -f load_plugin
module() {{
    case "$*" in
        "load brics/nccl" | "load NCCL/"* | "load lumi-aif-singularity-bindings") load_plugin ;;
    esac
}}
export -f module
if grep -q '^#SBATCH --uenv=prgenv-gnu$' "$1" && grep -q '^#SBATCH --view=default$' "$1"; then load_plugin; fi
exec bash "$1"
"""
# NCCL on a rank: it ends if the network that it is told to use is of no plugin that it finds.
RANK = """#!/bin/bash
case "$*" in *"rank.sh"*"--rank"*) ;; *) exit 0 ;; esac
. "$KIELO_TEST_FOLDER/environment.sh"
if [ -n "$NCCL_NET" ] && [ "$NCCL_NET" != "$HAS_PLUGIN" ]; then
    echo "net.cc:626 NCCL WARN Error: network $NCCL_NET not found." >&2
    exit 3
fi
echo "trains by $NCCL_NET" > "$KIELO_TEST_FOLDER/trained"
"""


def trained(name: str, folder: Path, is_set_up: bool = True) -> bool:
    """Writes a job of two nodes for the card, and runs it on the stand-in."""
    launch = write_launch(plan(cluster(name), nodes=2))
    with open(launch / "environment.sh", "a") as variables:
        variables.write("PYTHON=(true) KIELO=(true)\n")  # no list of versions, which takes a second
    job = launch / "job.sh"
    if not is_set_up:
        lines = [
            line for line in job.read_text().splitlines() if not re.match(r"module load|#SBATCH --uenv", line)
        ]
        job.write_text("\n".join(lines) + "\n")
    site = Site.make(folder / "bin")
    (site.folder / "srun").write_text(RANK)
    for command in ("singularity", "apptainer", "lfs"):
        (site.folder / command).write_text("#!/bin/bash\n")
        (site.folder / command).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{site.folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "2",
        "KIELO_TEST_FOLDER": str(launch), "HOME": str(folder),
    }  # fmt: skip
    text = job.read_text().replace(
        f"ARCHITECTURE={cluster(name).jobs.architecture}", "ARCHITECTURE=$(uname -m)"
    )
    job.write_text(text)
    with open(folder / "log", "ab") as log:
        words = ["bash", "-c", SITE, "slurm", str(job)]
        subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=60)
    return (launch / "trained").exists()


@pytest.mark.parametrize("name", [name for name in clusters() if names_a_network(name)])
def test_its_job_loads_the_plugin(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without what the card says, the job ends, as the report said of Isambard-AI."""
    for is_set_up in (True, False):
        place = tmp_path / str(is_set_up)
        place.mkdir()
        monkeypatch.chdir(place)
        assert trained(name, place, is_set_up) is is_set_up, (place / "log").read_text()


def test_there_are_cards_that_name_a_network() -> None:
    assert {"isambard_ai", "alps_clariden", "olivia", "lumi_g"} <= set(filter(names_a_network, clusters()))
