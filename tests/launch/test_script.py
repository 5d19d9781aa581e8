"""What a good job script has, line by line, on the scripts that `kielo launch` writes for three schedulers.

The rows are those that runs on clusters learnt from failures; each has what must stand in which file.
"""

import re
import runpy
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from kielo.launch.job_plan import Wishes, plan_jobs
from kielo.launch.script import SCRIPTS, job_script, ladder_script, share_script, submit_shares_script
from kielo.launch.share_jobs import plan_share_jobs
from kielo.recipe.read import read_recipe
from tests.house.checks import ROOT
from tests.launch.conftest import LAUNCHED

LADDER = Wishes(nodes=64, account="project_462000000")
# Row: the folder, the file, and regular expressions of which each must match in it.
ROWS: dict[str, list[tuple[str, str, list[str]]]] = {
    "1 one task a device, which becomes Python": [
        (
            "lumi_g",
            "job.sh",
            [r'tasks=\("\$DEVICES_PER_NODE" ', r"\bsrun --export=ALL --nodes=", r"^TORCHRUN=no"],
        ),
        ("lumi_g", "rank.sh", [r'^exec "\$\{KIELO\[@\]\}" "\$\{COMMAND\[@\]\}"$']),
        ("abci3", "job.sh", [r"\bmpirun -np"]),
    ],
    "2 a warning before the end, to all ranks": [
        ("lumi_g", "job.sh", [r"^#SBATCH --signal=USR1@300$"]),
        ("abci3", "job.sh", [r'-lt "\$\(\(WALL_SECONDS - GRACE_SECONDS\)\)"', r"^    kill -USR1 \$\$$"]),
        ("tsubame4", "job.sh", [r"^GRACE_SECONDS=\d+", r"then watch_the_time & timer="]),
    ],
    "3 torchrun passes signals on and waits for the save": [
        (
            "lumi_g torchrun",
            "job.sh",
            [r"^TORCHRUN=yes", r"= --torchrun \]; then tasks=\(1 ", r'"\$GRACE_SECONDS" 2>>'],
        ),
        (
            "lumi_g torchrun",
            "rank.sh",
            [
                r"--signals-to-handle='SIGTERM,SIGINT,SIGUSR1'",
                r'--shutdown-timeout="\$4"',
                r"--max-restarts=0",
                r"trap '' USR1",
            ],
        ),
    ],
    "4 a signal to the script is passed on, and it waits again": [
        (
            "lumi_g",
            "job.sh",
            [
                r"^trap .*kill -USR1 \"\$step\".* USR1 TERM INT$",
                r'^ *while kill -0 "\$step" .*wait "\$step"; done$',
            ],
        )
    ],
    "5 the step ends when a task fails": [("lumi_g", "job.sh", [r"--kill-on-bad-exit=1"])],
    # That ranks agree on the step is the training's: tests/train/test_train.py.
    "6 every rank is told": [("lumi_g", "job.sh", [r'--ntasks="\$\(\(NODES \* tasks_per_node\)\)"'])],
    "7 what follows is read from a file": [
        ("lumi_g", "job.sh", [r"--decide \"\$code\"", r'\. "\$ATTEMPT/decision"']),
        ("lumi_g", "environment.sh", [r"^DECIDE=\(python -m kielo.launch.decide\)"]),
    ],
    "8 a chain, which ends when the run does": [
        (
            "lumi_g",
            "job.sh",
            [r"stop_chain \"\$ends\"", r"scancel --quiet"],
        ),
        ("lumi_g", "submit.sh", [r"--dependency=\"afterany:\$1"]),
        ("abci3", "submit.sh", [r"depend=afterany:"]),
        ("tsubame4", "submit.sh", [r"-hold_jid"]),
        ("tsubame4", "job.sh", [r"cancel_jobs\(\) \{ timeout 60 qdel"]),
    ],
    "9 requeued with its log": [
        (
            "lumi_g",
            "job.sh",
            [r"^#SBATCH --requeue$", r"^#SBATCH --open-mode=append$", r"SLURM_RESTART_COUNT:-0"],
        ),
        ("abci3", "job.sh", [r"^#PBS -r y$"]),
        ("tsubame4", "job.sh", [r"^#\$ -r y$"]),
    ],
    "10 attempts without a new checkpoint are counted": [
        ("lumi_g", "job.sh", [r"^MOST_WITHOUT_NEW=3", r'"\$without" -ge "\$MOST_WITHOUT_NEW"'])
    ],
    "11 bad nodes are left out for a time": [
        ("lumi_g", "submit.sh", [r"--exclude=", r"7 days ago"]),
        ("lumi_g", "job.sh", [r"left_out_nodes", r"ExcNodeList", r"sinfo -N -o '%N %t %E'"]),
    ],
    "12 spare nodes": [
        ("lumi_g", "job.sh", [r"^#SBATCH --nodes=66$", r"^NODES=64$", r"^SPARES=2$", r"--nodelist="])
    ],
    "13 a log for each node and rank": [
        ("lumi_g", "job.sh", [r"--label"]),
        ("lumi_g", "rank.sh", [r'^exec >> "\$ATTEMPT/.*hostname -s.*\$RANK']),
    ],
    "14 the meeting place, from outside of the container": [
        (
            "lumi_g",
            "job.sh",
            [
                r"^hosts_of_job\(\) \{ timeout 60 scontrol show hostnames",
                r"^ *MASTER_ADDR=.*\$HOST_SUFFIX",
                r"MASTER_PORT=.*JOB",
            ],
        ),
        ("abci3", "job.sh", [r"PBS_NODEFILE"]),
        ("tsubame4", "job.sh", [r"PE_HOSTFILE"]),
    ],
    "15 ranks are numbered inside the step": [
        (
            "lumi_g",
            "rank.sh",
            [r"^RANK=\$\{SLURM_PROCID:-\$\{OMPI_COMM_WORLD_RANK", r"^export RANK LOCAL_RANK WORLD_SIZE"],
        )
    ],
    "16 a step that hangs is looked into and ended": [
        (
            "lumi_g",
            "job.sh",
            [
                r"^SILENCE_SECONDS=\d+",
                r"/train/\{metrics.jsonl,asking\} ",
                r"py-spy dump",
                r"srun --export=ALL --overlap",
                r'kill -KILL "\$step"',
            ],
        )
    ],
    "17 binding and environment of the site, told once": [
        ("lumi_g", "job.sh", [r"^CPU_BIND='mask_cpu:0xfe000000000000,", r"--cpu-bind=\"verbose"]),
        (
            "lumi_g",
            "environment.sh",
            [r"^export NCCL_SOCKET_IFNAME='hsn0,hsn1,hsn2,hsn3'$", r"^export NCCL_NET='AWS Libfabric'$"],
        ),
        ("lumi_g", "rank.sh", [r"Cpus_allowed_list", r"^    env \| grep"]),
    ],
    "18 the nodes are checked, and what dead jobs left is removed": [
        (
            "lumi_g",
            "job.sh",
            [
                r"^PREFLIGHT=yes",
                r"run_step --preflight",
                r'find /dev/shm .*-name "nccl-\*" -delete',
                r"^trap '[^']*on_each_node rm -rf -- \"\$OWN_FOLDER\"[^']*' EXIT",
            ],
        )
    ],
    "19 what it ran on and with": [
        ("lumi_g", "job.sh", [r"software.txt", r"stat --format 'image", r"--versions"]),
        ("lumi_g", "launch.json", [r'"kielo": ', r'"card": "lumi_g']),
    ],
    "20 files that stop it": [("lumi_g", "job.sh", [r"CHAIN/stopped"])],
    # On a real scheduler: tests/slurm. Here, that bash reads each of them: test_bash_reads_every_script.
    "21 it runs as it is": [
        ("lumi_g", "submit.sh", [r"sbatch --parsable"]),
        ("abci3", "submit.sh", [r"qsub"]),
    ],
}


@pytest.mark.parametrize("row", ROWS)
def test_a_good_script_has(row, launched):
    """Each of the 21 rows, in the files of a launch."""
    for name, file, expressions in ROWS[row]:
        text = (launched[name] / file).read_text(encoding="utf-8")
        missing = [one for one in expressions if not re.search(one, text, re.MULTILINE)]
        assert not missing, f"{name}/{file}"


def test_there_are_all_rows():
    """The table has its 21 rows."""
    assert [int(row.split()[0]) for row in ROWS] == list(range(1, 22))


def test_bash_reads_every_script(launched):
    """bash -n on all of them."""
    files = scripts(launched)
    assert len(files) == 4 * len(LAUNCHED)
    for file in files:
        subprocess.run(["bash", "-n", file], check=True)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say(launched):
    """No warning and no error in any of the scripts."""
    told = subprocess.run(
        ["shellcheck", "--severity=warning", *scripts(launched)], capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout


def scripts(launched) -> list[str]:
    return [str(file) for name in LAUNCHED for file in sorted(launched[name].glob("*.sh"))]


def test_the_request_stands_before_the_first_command(launched):
    """Slurm reads no request after the first line that is neither empty nor a comment."""
    lines = (launched["lumi_g"] / "job.sh").read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert [line for line in lines[:first] if line.startswith("#SBATCH")]
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")]


def test_nothing_of_the_shared_scripts_is_left_out(launched):
    """Each file of bash in the package stands in some launch, as it is."""
    text = "".join(
        (folder / file).read_text()
        for folder in launched.values()
        for file in ("job.sh", "submit.sh", "rank.sh")
    )
    text += ladder_script(plan_jobs(read_recipe("poro_34b").recipe, LADDER), Path("/folder"), [])
    job, recipe = Path("/folder"), read_recipe("poro_34b").recipe
    text += (SCRIPTS / "share.sh").read_text()  # tests/launch/test_pack_jobs.py
    for site, account in (("lumi_g", "project_462000000"), ("abci3", "gaa00000"), ("tsubame4", "tga-group")):
        there = recipe.model_copy(update={"cluster": site})
        plan = plan_share_jobs(there, Wishes(nodes=1, account=account), "pack")
        text += share_script(plan, job, 2) + submit_shares_script(plan, job, 2)
    left_out = {
        path.name
        for path in SCRIPTS.glob("*.sh")
        if any(part not in text for part in path.read_text().split("\n# ---- Submission\n"))
    }
    assert left_out == {"site.sh"}  # of `kielo site`: tests/launch/test_site.py


def test_settings_reach_bash_as_they_are(launched):
    """bash reads back from the scripts' own lines what was asked for, blanks and commas included."""
    folder: Path = launched["lumi_g"]
    settings = (folder / "job.sh").read_text().partition("\n# setup:")[0]
    asked = 'printf "%s|" "$NODES" "$CPU_BIND" "$RUN" "${CONTAINER[@]:0:2}" "${#STRIPE[@]}"'
    told = subprocess.run(["bash", "-c", f"{settings}\n{asked}"], capture_output=True, text=True, check=True)
    masks = "mask_cpu:" + ",".join(
        hex(0xFE << first)
        for first in (48, 56, 16, 24, 0, 8, 32, 40)  # GCD 0 to 7: 7 of a group's 8 cores
    )
    assert told.stdout.split("|")[:6] == ["64", masks, str(folder.parents[1]), "singularity", "exec", "6"]
    environment = f'. "{folder}/environment.sh"; printf "%s|" "$NCCL_NET" "$OMP_NUM_THREADS" "${{KIELO[@]}}"'
    told = subprocess.run(["bash", "-c", environment], capture_output=True, text=True, check=True)
    assert told.stdout.split("|")[:-1] == ["AWS Libfabric", "7", "python", "-m", "kielo"]


@pytest.mark.parametrize(
    ("site", "account"), [("lumi_g", "project_462000000"), ("abci3", "gaa00000"), ("tsubame4", "tga-group")]
)
def test_a_log_below_a_folder_with_blanks_is_one_word_of_the_request(site, account):
    """Schedulers read their lines as a shell reads its words."""
    recipe = read_recipe("poro_34b").recipe.model_copy(update={"cluster": site})
    job = job_script(plan_jobs(recipe, Wishes(nodes=16, account=account)), Path("/a folder/of mine"))
    (line,) = [line for line in job.splitlines() if line.startswith("#") and "/a folder" in line]
    assert shlex.split(line)[-1].removeprefix("--output=").startswith("/a folder/of mine/logs/")


def test_the_shown_script_is_current():
    """docs/launch_lumi_g.sh is what `python docs/launch_script.py` writes."""
    shown = runpy.run_path(str(ROOT / "docs" / "launch_script.py"))
    assert (ROOT / "docs" / "launch_lumi_g.sh").read_text(encoding="utf-8") == shown["page"]()


def test_no_command_of_a_scheduler_waits_without_a_limit() -> None:
    """A job's own time is too long a wait; srun and mpirun run the work itself."""
    commands = (
        r"\b(?<!timeout 60 )(?<!timeout 300 )(sbatch|squeue|scontrol|scancel|sinfo|qsub|qstat|qdel) [-\"$\w]"
    )
    unlimited = [
        f"{path.name}: {line.strip()}"
        for path in sorted(SCRIPTS.glob("*.sh"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(commands, line.partition(" #")[0]) and not line.lstrip().startswith("#")
    ]
    assert unlimited == []
    assert "timeout 300 sbatch --parsable" in (SCRIPTS / "slurm.sh").read_text()


def test_a_job_reads_no_message_that_was_written_for_people() -> None:
    """What follows an attempt is in its `decision`: bash finds no node and no outcome in a sentence."""
    body = (SCRIPTS / "body.sh").read_text(encoding="utf-8")
    assert not re.search(r"\b(sed|jq|grep -[a-z]*o)\b", body.replace("grep -m 1 -o 'node_folder: .*'", ""))
    assert "outcome.json" not in body and "srun: error" not in "".join(
        path.read_text(encoding="utf-8") for path in SCRIPTS.glob("*.sh")
    )
