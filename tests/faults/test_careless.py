"""Careless uses: the wrong folder, the wrong order, numbers out of range, a recipe changed during a run, a
run folder moved, copied or renamed, and an unusual machine environment. Each ends well with the right result,
or is refused in one message; what a person had is still there.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from tests.faults.trial import belongings, kielo, refused, start, went_well

ON_LUMI = ["tiny.toml", "--cluster", "lumi_g", "--set", "train.precision=bf16"]
REFUSED = {
    "show: no such recipe": (["show", "nobody"], "nobody", "no such recipe file"),
    "show: a folder": (["show", "run/corpus"], "recipe.toml", "a folder without recipe.toml"),
    "show: a text": (["show", "text.txt"], "text.txt", "not valid TOML"),
    "recipes: a path": (["recipes", "--copy", "../tiny"], "tiny", "no shipped recipe"),
    "run: no ranks": (["run", "tiny.toml", "--ranks", "-1"], "--ranks", "give 1 or more"),
    "run: ranks in words": (["run", "tiny.toml", "--ranks", "two"], "--ranks", "give a whole number"),
    "run: an unknown stage": (["run", "tiny.toml", "--only", "bake"], "bake", "invalid choice: 'bake'"),
    "run: from after to":
        (["run", "tiny.toml", "--from", "export", "--to", "pack"], "export", "comes after --to pack"),
    "run: only and to":
        (["run", "tiny.toml", "--only", "pack", "--to", "pack"], "--only", "excludes --from and --to"),
    "run: a source that is gone": (
        ["run", "tiny.toml", "--set", "corpus.sources=gone.txt", "--set", "folder=new"],
        "gone.txt", "no such file or folder",
    ),
    "run: a pattern that fits nothing": (
        ["run", "tiny.toml", "--set", "corpus.sources=*.nope", "--set", "folder=new"],
        "*.nope", "no such file or folder, or no match",
    ),
    "train: before pack":
        (["train", "tiny.toml", "--set", "folder=new"], "new/tokens", "the pack stage is not finished"),
    "train: no ranks": (["train", "tiny.toml", "--ranks", "0"], "--ranks", "give 1 or more"),
    "train: more ranks than sequences": (
        ["train", "tiny.toml", "--ranks", "16", "--set", "train.tokens=2561"],
        "16 data-parallel ranks", "is 8 sequences of",
    ),
    "train: a profile of nothing":
        (["train", "tiny.toml", "--profile", "0"], "--profile", "give 1 or more"),
    "plan: nothing": (["plan"], "a recipe", "no recipe and no size"),
    "plan: no nodes": (["plan", *ON_LUMI, "--nodes", "0"], "--nodes", "has 1 to 2978 nodes"),
    "plan: nodes in words": (["plan", *ON_LUMI, "--nodes", "many"], "--nodes", "not understood. Fix"),
    "plan: nodes backwards": (["plan", *ON_LUMI, "--nodes", "8..2"], "--nodes", "begin with the smaller"),
    "plan: more nodes than there are":
        (["plan", *ON_LUMI, "--nodes", "10000000"], "--nodes", "has 1 to 2978 nodes"),
    "plan: too many dots": (["plan", *ON_LUMI, "--nodes", "1..2..3"], "--nodes", "not understood. Fix"),
    "plan: an empty list of nodes": (["plan", *ON_LUMI, "--nodes", ","], "--nodes", "not understood. Fix"),
    "plan: an unknown cluster": (["plan", "tiny.toml", "--cluster", "nowhere"], "nowhere", "has no card"),
    "plan: a cluster that is a path":
        (["plan", "tiny.toml", "--cluster", "../../x"], "cluster", "has no card"),
    "plan: a cluster with a quote": (["plan", "tiny.toml", "--cluster", 'x"y'], "cluster", "has no card"),
    "plan: an unknown layout":
        (["plan", "explain", *ON_LUMI, "xx9", "--nodes", "1"], "xx9", "is not a term of a layout's name"),
    "plan: layouts of nothing":
        (["plan", "compare", *ON_LUMI, ",", "--nodes", "1"], "layout", "has no term of"),
    "plan: no ranks": (["plan", "resolve", "tiny.toml", "--ranks", "0"], "--ranks", "Fix: 1 to 1,000,000"),
    "plan: negative ranks":
        (["plan", "resolve", "tiny.toml", "--ranks", "-4"], "--ranks", "Fix: 1 to 1,000,000"),
    "plan: a billion billion ranks":
        (["plan", "resolve", "tiny.toml", "--ranks", "1000000000000000000"], "rank", "Fix: 1 to 1,000,000"),
    "plan: ranks without resolve":
        (["plan", "tiny.toml", "--ranks", "2"], "--ranks", "unrecognized arguments:"),
    "plan: top of none":
        (["plan", *ON_LUMI, "--nodes", "1", "--top", "-3"], "--top", "give 1 or more"),
    "plan: negative hours":
        (["plan", "tiny.toml", "--wall-hours", "-1"], "--wall-hours", "give a number above 0"),
    "plan: no hours": (["plan", "tiny.toml", "--wall-hours", "0"], "--wall-hours", "give a number above 0"),
    "plan: hours that are none":
        (["plan", "tiny.toml", "--wall-hours", "nan"], "--wall-hours", "give a number above 0"),
    "plan: a machine that is gone":
        (["plan", "tiny.toml", "--machine", "gone.toml"], "gone.toml", "cannot be read (No such file"),
    "plan: a machine that is a recipe":
        (["plan", "tiny.toml", "--machine", "tiny.toml"], "tiny.toml", "not the card of a machine"),
    "plan: measured on nothing":
        (["plan", "calibrate", "gone.jsonl", "--to", "card.toml"], "gone.jsonl", "no such file"),
    "plan: measured on a text": (
        ["plan", "calibrate", "text.txt", "--to", "card.toml"],
        "text.txt", "the shape of this run is not known",
    ),
    "plan: measured without a place": (["plan", "calibrate", "text.txt"], "--to", "arguments are required"),
    "rehearse: no nodes": (["rehearse", "tiny.toml", "--nodes", "0"], "--nodes", "has 1 to 1 nodes"),
    "rehearse: no ranks": (["rehearse", "tiny.toml", "--ranks", "0"], "--ranks", "Fix: 1 to 1,000,000"),
    "rehearse: negative ranks":
        (["rehearse", "tiny.toml", "--ranks", "-2"], "--ranks", "Fix: 1 to 1,000,000"),
    "rehearse: a rank beyond":
        (["rehearse", "tiny.toml", "--ranks", "2", "--rank", "2"], "rank 2", "the job has ranks 0 to 1"),
    "rehearse: a negative rank":
        (["rehearse", "tiny.toml", "--ranks", "2", "--rank", "-1"], "rank -1", "the job has ranks 0 to 1"),
    "rehearse: a stage beyond":
        (["rehearse", "tiny.toml", "--stage", "3"], "--stage", "the layout has stages 0 to 0"),
    "data: step 0": (["data", "tiny.toml", "--step", "0"], "--step", "the run has steps 1 to 20"),
    "data: a step beyond": (["data", "tiny.toml", "--step", "21"], "--step", "the run has steps 1 to 20"),
    "data: a step of 31 digits":
        (["data", "tiny.toml", "--step", "1" + 30 * "0"], "--step", "the run has steps 1 to 20"),
    "data: a step in words": (["data", "tiny.toml", "--step", "last"], "--step", "give a whole number"),
    "tokenizer: an empty text":
        (["tokenizer", "measure", "run/tokenizer", "--text", "empty.txt"], "empty.txt", "no text in it"),
    "tokenizer: bytes that are no text": (
        ["tokenizer", "measure", "run/tokenizer", "--text", "bytes.txt"],
        "bytes.txt", "byte 128 is not UTF-8",
    ),
    "tokenizer: a folder as text":
        (["tokenizer", "measure", "run/tokenizer", "--text", "run"], "--text", "no such file"),
    "tokenizer: a run folder":
        (["tokenizer", "measure", "run", "--text", "text.txt"], "run", "a run folder. Fix: "),
    "tokenizer: a file": (
        ["tokenizer", "measure", "text.txt", "--text", "text.txt"],
        "text.txt", "tokenizer.json: no such file",
    ),
    "checkpoint list: a workplace": (["checkpoint", "list", "."], "run folder", "no checkpoints there"),
    "checkpoint list: nowhere": (["checkpoint", "list", "gone"], "gone", "no checkpoints there"),
    "checkpoint list: a file": (["checkpoint", "list", "text.txt"], "text.txt", "no checkpoints there"),
    "checkpoint show: the tokens":
        (["checkpoint", "show", "run/tokens"], "run/tokens", "neither a checkpoint nor a run folder"),
    "checkpoint verify: the tokenizer":
        (["checkpoint", "verify", "run/tokenizer"], "run/tokenizer", "neither a checkpoint nor a run folder"),
    "checkpoint average: one": (
        ["checkpoint", "average", "run/train/checkpoints/step_00000020", "--to", "mean"],
        "two", "needs at least two checkpoints",
    ),
    "checkpoint average: a run":
        (["checkpoint", "average", "run", "run", "--to", "mean"], "run", "not the folder of a checkpoint"),
    "checkpoint average: into the run's own": (
        ["checkpoint", "average", "run/train/checkpoints/step_00000015",
         "run/train/checkpoints/step_00000020",
         "--to", "run/train/checkpoints/step_00000020"],
        "step_00000020", "exists already",
    ),
    "checkpoint average: one twice": (
        ["checkpoint", "average", "run/train/checkpoints/step_00000015",
         "run/train/checkpoints/step_00000015",
         "--to", "mean"],
        "given twice", "would count twice",
    ),
    "checkpoint average: into here": (
        ["checkpoint", "average", "run/train/checkpoints/step_00000015",
         "run/train/checkpoints/step_00000020",
         "--to", "."],
        "--to", "no name of a folder",
    ),
    "export: no recipe": (["export", "tinny.toml", "--to", "out"], "tinny.toml", "checkpoint or recipe"),
    "export: the tokens": (["export", "run/tokens", "--to", "out"], "run/tokens", "no checkpoint (no "),
    "export: into itself": (
        ["export", "run", "--to", "run/train/checkpoints/step_00000020"],
        "step_00000020", "of a checkpoint stage, which",
    ),
    "export: into the tokenizer":
        (["export", "run", "--to", "run/tokenizer"], "run/tokenizer", "of a tokenizer stage, which"),
    "export: into here": (["export", "run", "--to", "."], "--to", "no name of a folder"),
    "export: onto a file":
        (["export", "run", "--to", "text.txt"], "text.txt", "a file, but the export stage makes a folder"),
    "export: below a file": (["export", "run", "--to", "text.txt/out"], "text.txt", "Not a directory"),
    "export: files of nothing":
        (["export", "run", "--to", "out", "--max-shard-gb", "0"], "--max-shard-gb", "give a number above 0"),
    "export: files of no number": (
        ["export", "run", "--to", "out", "--max-shard-gb", "nan"],
        "--max-shard-gb", "give a number above 0",
    ),
    "export: infinite files": (
        ["export", "run", "--to", "out", "--max-shard-gb", "inf"],
        "--max-shard-gb", "give a number above 0",
    ),
    "export: an unknown dtype":
        (["export", "run", "--to", "out", "--dtype", "int8"], "--dtype", "invalid choice: 'int8'"),
    "export: no tokenizer there":
        (["export", "run", "--to", "out", "--tokenizer", "gone"], "gone", "there is no tokenizer.json in"),
    "evaluate: nowhere": (["evaluate", "gone", "tiny.toml"], "gone", "no such folder"),
    "evaluate: the tokens": (["evaluate", "run/tokens", "tiny.toml"], "run/tokens", "neither a checkpoint"),
    "evaluate: a workplace": (["evaluate", ".", "tiny.toml"], ".", "neither a checkpoint"),
    "verify parity: before training": (
        ["verify", "parity", "tiny.toml", "--set", "folder=new"],
        "resolved.toml", "has no resolved.toml yet",
    ),
    "verify parity: no steps":
        (["verify", "parity", "tiny.toml", "--steps", "0"], "--steps", "give 1 or more"),
    "verify parity: negative steps":
        (["verify", "parity", "tiny.toml", "--steps", "-1"], "--steps", "give 1 or more"),
    "verify layouts: no steps":
        (["verify", "layouts", "tiny.toml", "--steps", "0"], "--steps", "give 1 or more"),
    "verify round-trip: nowhere": (["verify", "round-trip", "gone"], "gone", "no such folder"),
    "verify round-trip: the tokens":
        (["verify", "round-trip", "run/tokens"], "run/tokens", "no config.json there"),
    "an unknown verb": (["fly"], "fly", "invalid choice: 'fly'"),
    "an unknown option": (["show", "tiny.toml", "--fast"], "--fast", "unrecognized arguments:"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(here, trained, what):
    """One message that names the mistake; no file was made, changed or lost."""
    arguments, named, reason = REFUSED[what]
    (trained / "empty.txt").write_bytes(b"")
    (trained / "bytes.txt").write_bytes(bytes(range(256)))
    before = belongings(trained)
    refused(here(trained, *arguments), reason, named)
    assert belongings(trained) == before


HARMLESS = {
    "show": ["show", "tiny.toml"], "show as JSON": ["show", "tiny.toml", "--json"], "recipes": ["recipes"],
    "schema": ["schema"],
    "clusters": ["clusters"], "languages": ["languages"], "plan": ["plan", *ON_LUMI, "--nodes", "1"],
    "data": ["data", "tiny.toml", "--step", "20"], "checkpoint list": ["checkpoint", "list", "run"],
    "checkpoint show": ["checkpoint", "show", "run"], "checkpoint verify": ["checkpoint", "verify", "run"],
    "checkpoint tensors": ["checkpoint", "show", "run", "--tensors", "--json"],
    "tokenizer measure": ["tokenizer", "measure", "run/tokenizer", "run/tokenizer", "--text", "text.txt"],
}  # fmt: skip


@pytest.mark.parametrize("what", HARMLESS)
def test_a_look_changes_nothing(here, trained, what):
    """Twice the same answer, and not a byte of the run is other than before."""
    before = belongings(trained)
    first, second = (went_well(here(trained, *HARMLESS[what])).out for _ in range(2))
    assert first == second and belongings(trained) == before


def _moved(run):
    run.rename(run.with_name("elsewhere"))
    return "elsewhere"


def _copied(run):
    shutil.copytree(run, run.with_name("copy"), symlinks=True)
    shutil.rmtree(run)
    return "copy"


def _dereferenced(run):
    shutil.copytree(run, run.with_name("flat"))  # `newest` becomes a folder of its own, as cp -rL makes it
    shutil.rmtree(run)
    return "flat"


def _linked(run):
    run.rename(run.with_name("disk"))
    run.symlink_to("disk")
    return "run"


def _odd(run):
    run.rename(run.with_name("run with spaces, 'quotes' & õ"))
    return "run with spaces, 'quotes' & õ"


def _absolute(run):
    return str(run.resolve())


@pytest.mark.parametrize("way", [_moved, _copied, _dereferenced, _linked, _odd, _absolute])
def test_a_run_that_lies_elsewhere(here, trained, way):
    """Moved, copied, behind a link, under an odd name:
    the finished training is found there, and its newest is exported.
    """
    folder = way(trained / "run")
    done = went_well(here(trained, "run", "tiny.toml", "--set", f"folder={folder}", "--to", "train"))
    assert done.out.count("nothing to do") == 4
    went_well(here(trained, "export", folder, "--to", "out"))
    assert json.loads((trained / "out" / "manifest.json").read_text())["inputs"]


def test_a_run_called_from_another_folder(here, trained):
    """A relative run folder is of the folder that kielo is started in:
    elsewhere there is none, and none is made.
    """
    elsewhere = trained / "elsewhere"
    elsewhere.mkdir()
    refused(
        here(elsewhere, "data", "../tiny.toml", "--step", "1"), "the pack stage is not finished", "run/tokens"
    )
    assert not any(elsewhere.iterdir())


EDITS = {
    "a text": lambda path: path.write_text("not = [TOML"),
    "nothing": lambda path: path.write_bytes(b""),
    "another seed": lambda path: path.write_text(path.read_text().replace("seed = 1", "seed = 2")),
    "more ranks": lambda path: path.write_text(path.read_text().replace("world_size = 1", "world_size = 64")),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edited_resolved_toml(here, trained, what):
    """It is written anew from the recipe, so what was edited there decides nothing; what is no plan of
    Kielo's is not replaced.
    """
    path = trained / "run" / "resolved.toml"
    before, checkpoints = path.read_text(), belongings(trained / "run" / "train" / "checkpoints")
    EDITS[what](path)
    outcome = here(trained, "run", "tiny.toml", "--only", "train")
    if what in ("a text", "nothing"):  # may be a person's
        refused(outcome, "exists, and Kielo did not write it", "resolved.toml", "move it away")
        path.unlink()
        outcome = here(trained, "run", "tiny.toml", "--only", "train")
    went_well(outcome)
    assert path.read_text() == before and belongings(trained / "run" / "train" / "checkpoints") == checkpoints


CHANGED = {
    "train.learning_rate": "0.5", "train.tokens": "5120", "train.tokens_per_step": "256", "seed": "2",
    "name": "other",
    "model.hidden_size": "32", "model.num_hidden_layers": "3", "model.model_type": "qwen3",
    "train.precision": "fp32",
    "train.z_loss": "0.1", "dataset.mask_documents": "true", "train.schedule": "wsd",
    "train.adam_beta1": "0.5",
}  # fmt: skip


@pytest.mark.parametrize("key", CHANGED)
def test_a_recipe_edited_after_training(here, trained, key):
    """A changed key of what is trained is refused by name, checkpoints untouched;
    an equal value is no change.
    """
    before = belongings(trained / "run" / "train" / "checkpoints")
    outcome = here(trained, "train", "tiny.toml", "--set", f"{key}={CHANGED[key]}")
    if key == "train.precision":
        went_well(outcome)
    else:
        refused(outcome, "training settings differ", "o back to the old values")
    assert belongings(trained / "run" / "train" / "checkpoints") == before


ENVIRONMENTS = {
    "no HOME": {"HOME": ""}, "HOME that is gone": {"HOME": "/nowhere"},
    "HOME that is a file": {"HOME": "/dev/null"},
    "TMPDIR that is gone": {"TMPDIR": "/nowhere"}, "threads of none": {"OMP_NUM_THREADS": "0"},
    "threads in words": {"OMP_NUM_THREADS": "many"},
    "no such devices": {"CUDA_VISIBLE_DEVICES": "99,nonsense"},
    "half of Slurm": {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, "the C locale": {"LC_ALL": "C"},
    "a foreign locale": {"LC_ALL": "tlh_QO.UTF-8"}, "no terminal": {"TERM": ""}, "narrow": {"COLUMNS": "1"},
    "colours": {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"},
    "a proxy that is not there": {"https_proxy": "http://127.0.0.1:9"},
    "optimised": {"PYTHONOPTIMIZE": "2"}, "hash seed": {"PYTHONHASHSEED": "7"},
    "no bytecode": {"PYTHONDONTWRITEBYTECODE": "1"},
    "a time zone of nowhere": {"TZ": "Nowhere/Land"},
}  # fmt: skip


LOOK = ("checkpoint", "list", "run", "--json")


@pytest.fixture(scope="module")
def looked(_trained) -> str:
    """The answer of a verb that looks at the trained run."""
    return went_well(kielo(_trained, *LOOK)).out


@pytest.mark.parametrize("what", ENVIRONMENTS)
def test_surroundings(_trained, looked, what):
    """A verb that looks at the trained run answers what it answers elsewhere."""
    assert went_well(kielo(_trained, *LOOK, **ENVIRONMENTS[what])).out == looked


NOT_SET, NO_NUMBER = "is not set, although others of its launcher are", "must be a whole number, not"
NO_SUCH_RANK = "the rank must be less"
MEETING = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
LAUNCHERS = {
    "a rank in words": ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK", NO_NUMBER),
    "a rank beyond": ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK", NO_SUCH_RANK),
    "a negative rank": ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK", NO_NUMBER),
    "no world": ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE", NO_SUCH_RANK),
    "an empty world": ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE", NOT_SET),
    "no local rank": ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": ""}, "LOCAL_RANK", NOT_SET),
    "no address": ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": ""}, "MASTER_ADDR", NOT_SET),
    "a port in words": ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "http"}, "MASTER_PORT", NO_NUMBER),
    "a task beyond": (
        {"SLURM_PROCID": "4", "SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1",
            "SLURM_LOCALID": "0"},
        "SLURM_PROCID", NO_SUCH_RANK),
    "half of a step": ({"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n1"}, "SLURM_JOB_ID", NOT_SET),
    "a job in words":
        ({"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_JOB_ID": "x"}, "SLURM_JOB_ID", NO_NUMBER),
}  # fmt: skip


@pytest.mark.parametrize("what", LAUNCHERS)
def test_a_launcher_that_tells_nonsense(here, packed, monkeypatch, what):
    """Variables that make no world: refused with the variable's name at once, before anything is trained."""
    variables, named, reason = LAUNCHERS[what]
    for key, value in (MEETING | variables).items():
        monkeypatch.setenv(key, value)
    refused(here(packed, "train", "tiny.toml"), reason, named)
    assert not (packed / "run" / "train" / "checkpoints").exists()


def test_two_trainings_at_once(trained):
    """The second is refused by the folder's lease, or both find the run finished;
    the checkpoints are as they were.
    """
    before = belongings(trained / "run" / "train" / "checkpoints")
    both = [start(trained, "train", "tiny.toml") for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=300)
        assert process.returncode in (0, 1) and "Traceback" not in out + err
    assert belongings(trained / "run" / "train" / "checkpoints") == before


def test_a_stop_before_the_first_step(packed, here):
    """SIGTERM while torch is still being loaded: the same command trains the whole run afterwards."""
    process = start(packed, "train", "tiny.toml")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert "Traceback" not in out + err
    went_well(here(packed, "train", "tiny.toml"))
    assert (packed / "run" / "train" / "checkpoints" / "step_00000020").is_dir()


@pytest.mark.parametrize("limit", ["-n 6", "-v 200000", "-c 0", "-f 0"])
def test_a_small_process(trained, limit):
    """Few file handles, a small address space, no files to write: a look needs none of it."""
    command = f'ulimit {limit}; exec "$0" -m kielo checkpoint list run'
    outcome = subprocess.run(
        ["bash", "-c", command, sys.executable], cwd=trained, capture_output=True, text=True, timeout=120
    )
    assert outcome.returncode == 0 and "complete, newest" in outcome.stdout, outcome.stderr


def test_a_folder_that_is_gone(tmp_path):
    """The current folder was deleted under the shell."""
    gone = tmp_path / "gone"
    gone.mkdir()
    command = 'rmdir "$PWD"; exec "$0" -m kielo show demo_estonian --json'
    outcome = subprocess.run(
        ["bash", "-c", command, sys.executable], cwd=gone, capture_output=True, text=True, timeout=120
    )
    assert outcome.returncode == 0 and json.loads(outcome.stdout)["name"]["value"] == "demo_estonian", (
        outcome.stderr
    )


@pytest.mark.parametrize("mask", [0o077, 0o777])
def test_a_strict_umask(here, packed, mask):
    """Files are written with the owner's rights alone; root and owner can go on from them. Without any rights
    only root can: for others it is a refusal.
    """
    before = os.umask(mask)
    try:
        outcome = here(packed, "plan", "resolve", "tiny.toml")
    finally:
        os.umask(before)
    if mask & 0o700 and os.geteuid():
        refused(outcome, "resolved.toml", "Permission denied")
        return
    went_well(outcome)
    assert (packed / "run" / "resolved.toml").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("seconds", [0, 2**31 - 1, 2**33])
def test_clocks_that_are_wrong(here, trained, seconds):
    """Files of 1970, of 2038 and of 2242: a run is finished by its manifests, not by its times."""
    for path in (trained / "run" / "train").rglob("*"):
        os.utime(path, (seconds, seconds), follow_symlinks=False)
    assert "finished before" in went_well(here(trained, "train", "tiny.toml")).out
    assert "step_00000020" in went_well(here(trained, "checkpoint", "list", "run")).out


def test_a_port_that_is_taken(packed):
    """MASTER_PORT of a program that listens already: refused in time, with the address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        outcome = kielo(
            packed, "train", "tiny.toml", "--set", "train.start_timeout_seconds=3", timeout=300,
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )  # fmt: skip
    assert "Traceback" not in outcome.told and outcome.code in (0, 1)
    assert outcome.code == 0 or port in outcome.err


def test_a_disk_that_is_full(trained):
    """A file system without room is refused with the folder; what was there is there."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode
    ):
        pytest.skip("no file system may be mounted here")
    before = belongings(trained)
    script = (
        "mkdir full && mount -t tmpfs -o size=20k tmpfs full || exit 77; "
        'exec "$0" -m kielo export run --to full/hf'
    )
    outcome = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, sys.executable],
        cwd=trained,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if outcome.returncode == 77:
        pytest.skip("no file system may be mounted here")
    assert outcome.returncode == 1 and "full" in outcome.stderr and "Traceback" not in outcome.stderr, (
        outcome.stderr
    )
    (trained / "full").rmdir()
    assert belongings(trained) == before
