"""Each line that a launch writes before the shared scripts, on sites made by hand: whole, and no other line.

On shipped cards: test_script.py. A line that one site must have is absent on the next, which must not.
"""

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kielo.launch.job_plan import Wishes
from kielo.launch.schedulers import (
    SCHEDULERS,
    SCRIPTS,
    Scheduler,
    clock,
    end_jobs,
    ends,
    hides_jobs,
    states,
)
from kielo.launch.script import (
    environment_script,
    job_script,
    ladder_script,
    share_script,
    submit_script,
    submit_shares_script,
)
from tests.launch.hand_made import made, plan, recipe, site

JOB = Path("/jobs/0001")
ABOUT = [
    "# mine on 3 nodes of A site, written by `kielo launch`.",
    "# Network: a wire. Card: a page, 2026-11.",
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KIELO_PREFETCHED", raising=False)
    return tmp_path


def shared_text(name: str) -> str:
    scheduler = name.removeprefix("submit_")
    if scheduler not in ("slurm", "pbs", "grid_engine"):
        return (SCRIPTS / f"{name}.sh").read_text(encoding="utf-8")
    parts = (SCRIPTS / f"{scheduler}.sh").read_text(encoding="utf-8").split("\n# ---- Submission\n")
    return parts[scheduler != name]


def head(text: str, *shared: str) -> list[str]:
    """Returns the lines before the shared scripts, which must follow as they are, one after the other.

    A scheduler's script has the part of job.sh, and that of submit.sh, whose name is submit_SCHEDULER here.
    """
    tail = "\n".join(map(shared_text, shared))
    assert text.endswith("\n" + tail)
    return text.removesuffix("\n" + tail).splitlines()


SETTINGS = [
    "SITE=here", "WORKING_FOLDER={here}", "RUN={here}/runs/mine", "FOLDER=/jobs/0001",
    "WORK=train", "NODES=3", "SPARES=0",
    "DEVICES_PER_NODE=4", "CORES_PER_DEVICE=7", "WALL_SECONDS=7384",
    "GRACE_SECONDS=300 # the ranks are asked to save this long before the end",
    "SILENCE_SECONDS=4000 # without a line in the log, the attempt counts as dead",
    "MOST_WITHOUT_NEW=3 # attempts in a row without a new checkpoint",
    "TORCHRUN=no # in place of one task a device",
    "PREFLIGHT=no # the nodes are checked before they train",
    "ARCHITECTURE=x86_64", "CPU_BIND=cores", "HOST_SUFFIX=", 'NODE_FOLDER="/tmp"', "IMAGE=", "CONTAINER=()",
    "NETWORK_LOG=", "STRIPE=()",
]  # fmt: skip


def settings(here: Path, **changed: str) -> list[str]:
    """Returns the settings of a plain site, with other values of these."""
    lines = [line.format(here=here) for line in SETTINGS]
    for name, value in changed.items():
        (number,) = [number for number, line in enumerate(lines) if line.startswith(f"{name}=")]
        before, remark, after = lines[number].partition(" # ")
        lines[number] = f"{name}={value}{remark}{after}"
    return lines


def test_a_plain_job_of_slurm(here) -> None:
    """A card that says no more than it must: no account, no QOS, no further option."""
    assert head(job_script(plan(site()), JOB), "slurm", "left_out", "body") == [
        "#!/bin/bash -l", *ABOUT, "# partitions: of partitions", "#",
        "#SBATCH --job-name=mine", "#SBATCH --partition=usual", "#SBATCH --nodes=3", "#SBATCH --exclusive",
        "#SBATCH --ntasks-per-node=4", "#SBATCH --cpus-per-task=7", "#SBATCH --time=02:03:04",
        "#SBATCH --signal=USR1@300", "#SBATCH --requeue", "#SBATCH --open-mode=append",
        "#SBATCH --output=/jobs/0001/logs/job_%j.log",
        "", *settings(here),
    ]  # fmt: skip


FULL = {
    "partitions": [{"name": "usual", "qos": "normal"}], "devices": "--gpus=4",
    "options": ["--mem=1G", "--gres=a"], "account": "p.*",
    "architecture": "aarch64", "setup": ["module load a", "module load b"],
    "container": ["singularity", "exec"], "image": "/images/a,b.sif", "cpu_bind": "mask_cpu:0x1,0x2",
    "host_suffix": "-ib", "node_folder": "${TMPDIR:-/tmp}", "network_log": "a|b",
    "stripe": "lfs setstripe -c 4", "storage": "a disk", "squash": ["-a"],
}  # fmt: skip


def test_a_job_of_slurm_with_all_that_a_card_may_say(here) -> None:
    """Spare nodes are asked for and not counted; each value has its source beside it."""
    wishes = Wishes(
        account="p1", spares=2, is_torchrun=True, is_preflight=True, venv="the venv", image="/images/c.sif"
    )
    asked = plan(site(jobs=FULL, notes="Ask for nodes."), wishes, bound=(Path("/text"),))
    bound = f"/text,{here}"
    assert head(job_script(asked, JOB), "slurm", "left_out", "body") == [
        "#!/bin/bash -l", *ABOUT, "# Ask for nodes.", "# partitions: of partitions", "# devices: of devices",
        "# options: of options", "# account: of account", "#",
        "#SBATCH --job-name=mine", "#SBATCH --partition=usual", "#SBATCH --qos=normal",
        "#SBATCH --account=p1", "#SBATCH --nodes=5", "#SBATCH --gpus=4", "#SBATCH --exclusive",
        "#SBATCH --ntasks-per-node=4", "#SBATCH --cpus-per-task=7",
        "#SBATCH --mem=1G", "#SBATCH --gres=a", "#SBATCH --time=02:03:04",
        "#SBATCH --signal=USR1@300", "#SBATCH --requeue", "#SBATCH --open-mode=append",
        "#SBATCH --output=/jobs/0001/logs/job_%j.log", "",
        *settings(here, SPARES="2", TORCHRUN="yes", PREFLIGHT="yes")[:15],
        "# architecture: of architecture", "# cpu_bind: of cpu_bind", "# host_suffix: of host_suffix",
        "# node_folder: of node_folder", "ARCHITECTURE=aarch64", "CPU_BIND='mask_cpu:0x1,0x2'",
        "HOST_SUFFIX=-ib", 'NODE_FOLDER="${TMPDIR:-/tmp}"', "# container: of container", "# image: of image",
        "# network_log: of network_log", "# stripe: of stripe", "IMAGE=/images/c.sif",
        f"CONTAINER=(singularity exec --bind '{bound}' --bind \"$NODE_FOLDER\" /images/c.sif)",
        "NETWORK_LOG='a|b'", "STRIPE=(lfs setstripe -c 4)", "", "unset PYTHONPATH PYTHONHOME PYTHONUSERBASE",
        "# setup: of setup", "module load a", "module load b",
    ]  # fmt: skip


def test_a_job_of_pbs(here) -> None:
    """With a project and without; no signal, which the script sends by itself."""
    request = [
        "#PBS -N mine", "#PBS -q usual", "#PBS -P p1", "#PBS -l select=5", "#PBS -l walltime=02:03:04",
        "#PBS -l x=1", "#PBS -r y", "#PBS -j oe", "#PBS -o /jobs/0001/logs/", "",
    ]  # fmt: skip
    for account in ("p1", None):
        asked = plan(site("pbs", {"options": ["-l x=1"]}), Wishes(account=account, spares=2))
        assert head(job_script(asked, JOB), "pbs", "mpirun", "left_out", "body") == [
            "#!/bin/bash -l", *ABOUT, "# partitions: of partitions", "# options: of options", "#",
            *(line for line in request if account or "-P" not in line), *settings(here, SPARES="2"),
        ]  # fmt: skip


def test_a_job_of_grid_engine(here) -> None:
    """Its queue is a type of node, and its account is on the command line."""
    asked = plan(site("grid_engine", {"options": ["-l x=1"]}), Wishes(account="p1", spares=1))
    assert head(job_script(asked, JOB), "grid_engine", "mpirun", "left_out", "body") == [
        "#!/bin/bash -l", *ABOUT, "# partitions: of partitions", "# options: of options", "#",
        "#$ -N mine", "#$ -l usual=4", "#$ -l h_rt=02:03:04", "#$ -l x=1", "#$ -r y", "#$ -j y",
        "#$ -S /bin/bash", "#$ -o /jobs/0001/logs/", "", *settings(here, SPARES="1"),
    ]  # fmt: skip
    assert head(submit_script(asked, JOB), "left_out", "submit_grid_engine", "submitted", "submit") == [
        "#!/bin/bash", f"WORKING_FOLDER={here}", "FOLDER=/jobs/0001", f"RUN={here}/runs/mine", "JOBS=5",
        *asked_for("p1", nodes=4),
    ]  # fmt: skip


def asked_for(account: str = "", qos: str = "", nodes: int = 3) -> list[str]:
    """Returns the lines by which a submission knows what job.sh asks for."""
    return [
        "# what job.sh asks for", f"ACCOUNT={account}", "PARTITION=usual", f"QOS={qos}", f"JOB_NODES={nodes}",
        "WALL_SECONDS=7384",
    ]  # fmt: skip


def test_slurm_chooses_the_queue_by_qos_or_constraint(here) -> None:
    """Then none is asked for, and the submission does not compare it; nor a QOS, if the card names none."""
    for queue, lines in (
        ({"qos": "regular", "constraint": "gpu&fat"}, ["--qos=regular", "--constraint=gpu&fat"]),
        ({"constraint": "a100"}, ["--constraint=a100"]),
        ({"name": "all", "constraint": "a100"}, ["--partition=all", "--constraint=a100"]),
    ):
        asked = plan(site(jobs={"partitions": [queue]}))
        written = [line for line in job_script(asked, JOB).splitlines() if line.startswith("#SBATCH")]
        first = ["--job-name=mine", *lines, "--nodes=3"]
        assert written[: len(first)] == [f"#SBATCH {line}" for line in first]
        submission = submit_script(asked, JOB).splitlines()
        assert {f"PARTITION={queue.get('name', '')}", f"QOS={queue.get('qos', '')}"} <= set(submission)


QOS = """
QOS={asked} ACCOUNT= PARTITION= JOB_NODES=1 WALL_SECONDS=60
clean_environment() {{ :; }}
facts_of() {{ echo "qos {shown}"; echo "partition gpu_ss11"; }}
cancel_job() {{ echo "cancelled $1"; }}
"""


@pytest.mark.parametrize(
    ("asked", "shown", "is_kept"),
    (
        ("regular", "gpu_regular", True), ("regular", "regular", True), ("regular", "gpu_debug", False),
        ("regular", "irregular", False), ("debug", "normal", False), ("''", "normal", True),
    ),
)  # fmt: skip
def test_a_qos_that_the_site_renames_is_the_one_asked_for(asked, shown, is_kept) -> None:
    """NERSC shows gpu_regular of a job that asked for regular; another QOS is another job."""
    script = QOS.format(asked=asked, shown=shown) + (SCRIPTS / "submitted.sh").read_text()
    done = subprocess.run(["bash", "-c", script + "\nrefuse_other_job 7"], capture_output=True, text=True)
    assert (done.returncode == 0) is is_kept and ("cancelled 7" in done.stdout) is not is_kept
    assert is_kept or f"qos {shown} in place of {asked}" in done.stderr


@pytest.mark.parametrize("scheduler", ("slurm", "pbs", "grid_engine"))
def test_a_submission_knows_what_its_job_asks_for(scheduler, here) -> None:
    """So that it can read the job back; of a site that says no more than it must, and of one that does."""
    wishes = Wishes(account="p1", spares=2, image="none")
    qos = "normal" if scheduler == "slurm" else ""
    full = FULL | {"partitions": [{"name": "usual", "qos": qos}]}
    for asked, facts in (
        (plan(site(scheduler)), asked_for()),
        (plan(site(scheduler, full), wishes), asked_for("p1", qos, 5)),
    ):
        common = ["#!/bin/bash", f"WORKING_FOLDER={here}", "FOLDER=/jobs/0001"]
        own = f"submit_{scheduler}"
        assert head(submit_script(asked, JOB), "left_out", own, "submitted", "submit") == [
            *common, f"RUN={here}/runs/mine", "JOBS=5", *facts,
        ]  # fmt: skip
        shares = head(submit_shares_script(asked, JOB, 6), own, "submitted", "submit_shares")
        assert shares == [*common, "SHARES=6", "ARRAYS=5", *facts]


def test_jobs_that_pack(here) -> None:
    """One process on all cores of a node, with no signal and no wait for jobs of its name."""
    asked = plan(site(jobs={"setup": ["module load a"], "image": "/i.sif", "container": ["c"]}), nodes=1)
    asked = replace(asked, work="pack")
    assert head(share_script(asked, JOB, 6), "share_job") == [
        "#!/bin/bash -l", ABOUT[0].replace("3 nodes", "1 nodes"), ABOUT[1],
        "# partitions: of partitions", "#", "#SBATCH --job-name=mine_pack", "#SBATCH --partition=usual",
        "#SBATCH --nodes=1", "#SBATCH --exclusive",
        "#SBATCH --ntasks-per-node=1", "#SBATCH --cpus-per-task=30", "#SBATCH --time=02:03:04",
        "#SBATCH --requeue", "#SBATCH --open-mode=append", "#SBATCH --output=/jobs/0001/logs/job_%j.log", "",
        f"WORKING_FOLDER={here}", "FOLDER=/jobs/0001", "SHARES=6", "STAGE=pack", "# container: of container",
        "# image: of image", f"CONTAINER=(c --bind {here} /i.sif)", "",
        "unset PYTHONPATH PYTHONHOME PYTHONUSERBASE", "# setup: of setup", "module load a",
    ]  # fmt: skip


def test_the_job_of_a_ladder(here) -> None:
    """Its rungs, each with its own limit, in their order."""
    rungs = [(Path("/a b/0001"), 60), (Path("/c/0001"), 120)]
    assert head(ladder_script(plan(site()), JOB, rungs), "ladder")[-4:] == [
        "", f"WORKING_FOLDER={here}", "RUNGS=('/a b/0001' /c/0001)", "LIMITS=(60 120)",
    ]  # fmt: skip


def test_the_folders_that_a_container_sees(here, monkeypatch, tmp_path_factory) -> None:
    """By site.sh: a folder is bound, a file is mounted; what was brought is bound; without an image none."""
    brought = tmp_path_factory.mktemp("brought")
    (brought / "prefetched.json").touch()
    monkeypatch.setenv("KIELO_PREFETCHED", str(brought))
    of, folder = site(jobs={"container": ["c", "exec"], "image": "/i.sif"}), Path("/site")
    always = f"/site,{here},{brought}:{brought}:ro"
    for squash, last in (("", ""), ("/site/v.sqsh", ",/site/v.sqsh:/user-software:image-src=/")):
        asked = plan(of, site_folder=folder, made=made(folder, squash))
        (line,) = [one for one in job_script(asked, JOB).splitlines() if one.startswith("CONTAINER=")]
        bound = f"--bind '{always}{last}' --bind \"$NODE_FOLDER\""
        assert line == f"CONTAINER=(c exec {bound} /site/image.sif)"
        assert asked.image == "/site/image.sif" and asked.venv == (
            "/user-software" if squash else "/site/venv"
        )
    none = plan(of, Wishes(image="none"))
    assert (none.image, none.venv) == ("", "") and "CONTAINER=()\n" in job_script(none, JOB)


PLAIN = [
    "# Environment of every rank on here; rank.sh reads it.",
    "# shellcheck shell=bash disable=SC2034,SC2154 # variables of rank.sh",
    "export OMP_NUM_THREADS=7", "export PYTHONUNBUFFERED=1", "export PYTHONSAFEPATH=1",
    "ulimit -c 0 # cores of thousands of ranks fill a quota",
]  # fmt: skip


def commands(python: str, venv: str = "", flags: str = "") -> list[str]:
    return [
        f"VENV={venv}", f"PYTHON=({python})", f"KIELO=({python} -m kielo)",
        f"TORCHRUN=({python} -m torch.distributed.run)", f"DECIDE=({python} -m kielo.launch.decide)",
        f'COMMAND=(train "$FOLDER/recipe.toml"{flags}) # of kielo, on each rank',
    ]  # fmt: skip


def test_the_environment_of_a_plain_site() -> None:
    """Ranks start in the Python of the launch; nothing is said of networks, folders or the hub."""
    assert environment_script(plan(site())).splitlines() == [*PLAIN, *commands(shlex.quote(sys.executable))]


OFFLINE = [
    "# here's compute nodes reach no network outside.",
    "export HF_HUB_OFFLINE=1", "export HF_DATASETS_OFFLINE=1", "export TRANSFORMERS_OFFLINE=1",
    "export WANDB_MODE=offline",
]  # fmt: skip
VARIABLES = {"environment": {"A": "1 2"}, "environment_between_nodes": {"B": "3"}}


@pytest.mark.parametrize("nodes", (1, 2))
@pytest.mark.parametrize("has_internet", (True, False))
def test_the_environment_of_a_site(nodes, has_internet, here, monkeypatch) -> None:
    """Variables between nodes from two nodes on; offline only where the nodes reach no network."""
    (here / "brought").mkdir()
    (here / "brought" / "prefetched.json").touch()
    monkeypatch.setenv("KIELO_PREFETCHED", str(here / "brought"))
    of = site(jobs=VARIABLES, internet_on_compute_nodes=has_internet)
    asked = plan(of, nodes=nodes, site_folder=Path("/site"), made=made("/site"), measured_steps=10)
    between = ["# environment_between_nodes: of environment_between_nodes", "export B=3"]
    assert environment_script(asked).splitlines() == [
        *PLAIN[:5], "export PYTHONNOUSERSITE=1", *PLAIN[5:],
        "# environment: of environment", "export A='1 2'",
        *(between if nodes > 1 else []),
        *([] if has_internet else OFFLINE), f"export KIELO_PREFETCHED={here}/brought",
        "# weights of the hub go beside the environment, not into the home",
        'export HF_HOME="${HF_HOME:-/site/caches/huggingface}"',
        *commands("python", "/site/venv", " --measure 10"),
    ]  # fmt: skip


def test_the_python_of_an_image_or_an_environment(here) -> None:
    """`python`, which is theirs; a venv that is given comes before that of the site."""
    of = site(jobs={"image": "/i.sif", "container": ["c"]})
    for wishes, venv in (
        (Wishes(), ""), (Wishes(venv="mine"), f"{here}/mine"),
        (Wishes(venv="mine", image="none"), f"{here}/mine"),
    ):  # fmt: skip
        assert environment_script(plan(of, wishes)).splitlines()[-6:] == commands("python", venv)
    both = plan(of, Wishes(venv="mine"), made=made("/site"), site_folder=Path("/site"))
    assert both.venv == f"{here}/mine" and both.image == "/site/image.sif"
    assert plan(of, Wishes(image="/c.sif"), made=made("/site")).image == "/c.sif"


def test_a_clock_of_a_scheduler() -> None:
    """Hours may be more than two digits."""
    times = {0: "00:00:00", 59: "00:00:59", 60: "00:01:00", 3599: "00:59:59", 3600: "01:00:00"}
    times |= {7384: "02:03:04", 172_800: "48:00:00", 604_799: "167:59:59"}
    assert {seconds: clock(seconds) for seconds in times} == times


def test_one_core_at_least_and_devices_of_all_nodes() -> None:
    """A node with fewer cores than devices starts its ranks nevertheless."""
    small = plan(site(cpu_cores_per_node=3))
    assert (small.cores_per_device, small.devices) == (1, 12) and plan(site()).cores_per_device == 7
    assert plan(site(), recipe=recipe(name="other")).recipe.name == "other"


FOURTH = """
JOB=$FOURTH_JOB

# ---- Submission
submit_one() { timeout 300 put "$FOLDER/job.sh" | id_of; }
"""


def test_a_scheduler_is_an_entry_and_a_script(here, tmp_path, monkeypatch) -> None:
    """A made-up fourth: its lines, both parts of its script, and how its jobs are listed and ended."""
    (tmp_path / "fourth.sh").write_text(FOURTH)
    entry = Scheduler(
        submit="put", script=tmp_path / "fourth.sh", starter=SCRIPTS / "mpirun.sh", prefix="#4",
        request=lambda plan, folder: [f"name {plan.recipe.name}", f"log {folder}"],
        listing=("printf", "12 waits\\n13 runs\\n"), takes_ids=False,
        states=lambda told: dict(line.split() for line in told.splitlines()),
        waiting="waits", end=("touch", f"{tmp_path}/ended"),
    )  # fmt: skip
    monkeypatch.setitem(SCHEDULERS, "fourth", entry)
    asked = plan(site().model_copy(update={"scheduler": "fourth"}))
    job, submission = job_script(asked, JOB), submit_script(asked, JOB)
    assert [line for line in job.splitlines() if line.startswith("#4")] == [
        "#4 name mine",
        "#4 log /jobs/0001",
    ]
    assert "JOB=$FOURTH_JOB" in job and "mpirun -np" in job and "timeout 300 put" not in job
    assert "timeout 300 put" in submission and "FOURTH_JOB" not in submission
    assert states("fourth", ["13", "11"]) == {"13": "runs"} and ends("fourth", ["13"]) == {}
    monkeypatch.chdir(tmp_path)
    end_jobs("fourth", {"12": "waits", "13": "runs"}, at_once=False)
    assert (tmp_path / "12").exists() and not (tmp_path / "13").exists() and not hides_jobs("fourth")
