"""Jobs that pack: their scripts for each scheduler, what is refused, and an array of which a job is lost."""

import contextlib
import json
import subprocess
from pathlib import Path

import pytest

from kielo.artifact.manifest import write_stage
from kielo.cli.main import main
from kielo.corpus.corpus_stage import run_corpus
from kielo.dataset.pack import pack
from kielo.recipe.read import read_recipe
from kielo.tokenizer.train import train_tokenizer
from tests.dataset.test_batches import make_documents
from tests.launch.stand_in import Site
from tests.launch.test_ladder import CARD
from tests.launch.test_pbs import complaints
from tests.written_documents import write_documents

SITES = {
    "lumi_g": ["--cluster", "lumi_g", "--account", "project_462000000"],
    "abci3": ["--cluster", "abci3", "--account", "gaa00000"],
    "tsubame4": ["--cluster", "tsubame4", "--account", "tga-group"],
}
MARENOSTRUM = ["--cluster", "marenostrum5_acc", "--account", "ehpc01"]
PERLMUTTER = ["--cluster", "perlmutter_a100_80", "--account", "m0000"]
# What each scheduler is asked for by submit.sh of three shares, whose array has the id that it answers here.
ASKED = {
    "lumi_g": (
        "123;cluster",
        [
            "--parsable --export=ALL --array=1-3 {job}",
            "--parsable --export=ALL --dependency=afterany:123 {job}",
        ],
    ),
    "abci3": ("123[].server", ["-J 1-3 {job}", "-W depend=afterany:123[] {job}"]),
    "tsubame4": (
        "123.1-3:1",
        ["-terse -g tga-group -t 1-3 {job}", "-terse -g tga-group -hold_jid 123 {job}"],
    ),
}
RECIPE = """
name = "tiny"
language = "et"
cluster = "here.toml"
folder = "run"
[corpus]
sources = [{ name = "a", path = "a.txt" }, { name = "b", path = "b.txt" }]
[tokenizer]
vocab_size = 400
[dataset]
heldout_share = 0.2
"""


def stub(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    """Site → the folder of jobs that pack a 7B's text in three shares there."""
    folder, found = tmp_path_factory.mktemp("jobs"), {}
    with contextlib.chdir(folder):
        for number, (site, flags) in enumerate(SITES.items(), start=1):
            assert main(["launch", "norwegian_7b", *flags, "--hours", "5", "--pack", "3", "--dry-run"]) == 0
            found[site] = folder / f"runs/norwegian_7b/launch/pack_{number:04d}"
    return found


@pytest.mark.parametrize("site", SITES)
def test_bash_and_the_scheduler_read_the_scripts(site, written) -> None:
    """A node a job, all its cores, no wait for jobs of the same name, and the request before all commands."""
    folder = written[site]
    for file in sorted(folder.glob("*.sh")):
        subprocess.run(["bash", "-n", file], check=True)
    lines = (folder / "job.sh").read_text().splitlines()
    request = [line for line in lines if line.startswith(("#SBATCH", "#PBS", "#$"))]
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert len(request) >= 6 and not [line for line in lines[first:] if line in request]
    assert complaints(lines) == [] and "singleton" not in "\n".join(request)
    node = {"lumi_g": "#SBATCH --nodes=1", "abci3": "#PBS -l select=1", "tsubame4": "#$ -l node_f=1"}[site]
    assert node in request
    if site == "lumi_g":
        asked = {"--cpus-per-task=128", "--requeue", "--time=05:00:00", "--partition=standard"}
        assert {f"#SBATCH {option}" for option in asked} < set(request)
        assert "gpus" not in "".join(request) and "workers = 128" in (folder / "recipe.toml").read_text()


@pytest.mark.parametrize(
    ("flags", "queue", "bill", "asked_for"),
    [
        # a job on a node of 128 cores, or of 4 modules, for five hours; two shares and a join
        (SITES["lumi_g"], "standard", "at most 1,920 core-hours", ""),
        ([*SITES["lumi_g"], "--partition", "small"], "small", "at most 1,920 core-hours", ""),
        (
            [*SITES["lumi_g"], "--partition", "small-g"],
            "small-g",
            "at most 60 GPU-hours",
            "--gpus-per-node=8",
        ),
        # a queue by its name, and a queue of both kinds of nodes
        ([*MARENOSTRUM, "--partition", "acc"], "acc_ehpc", "", "--gres=gpu:4"),
        ([*MARENOSTRUM, "--partition", "gpp"], "gp_ehpc", "", ""),
        ([*PERLMUTTER, "--partition", "regular"], "regular", "at most 15 node-hours", ""),
    ],
)
def test_packing_is_billed_as_its_nodes_are(flags, queue, bill, asked_for, tmp_path, monkeypatch, capsys):
    """On CPU nodes of the card, unless a queue with devices is asked for, which the table then says."""
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "norwegian_7b", *flags, "--hours", "5", "--pack", "2", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert f"05:00:00 in {queue}\n" in told and bill in told and ("with devices" in told) == bool(asked_for)
    job = next(tmp_path.glob("runs/norwegian_7b/launch/*/job.sh")).read_text()
    assert (f"#SBATCH {asked_for}\n" in job) if asked_for else "#SBATCH --g" not in job


def test_cards_without_cpu_nodes_say_so(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*SITES["tsubame4"], "--hours", "5", "--pack", "2", "--dry-run"]
    assert main(["launch", "norwegian_7b", *words]) == 0
    assert "the card of tsubame4 has no [jobs.cpu]" in capsys.readouterr().out


@pytest.mark.parametrize("site", SITES)
def test_an_array_and_a_job_after_it_are_submitted(site, written, tmp_path, monkeypatch) -> None:
    """Their ids are noted; of one share there is only the job that makes all and joins."""
    answer, asked = ASKED[site]
    folder, command = written[site], "sbatch" if site == "lumi_g" else "qsub"
    stub(tmp_path / "stubs", command, f"#!/bin/bash\necho \"$@\" >> '{tmp_path}/told'\necho '{answer}'\n")
    monkeypatch.setenv("PATH", str(tmp_path / "stubs"), prepend=":")
    (folder / "chain/jobs").unlink(missing_ok=True)
    subprocess.run(["bash", folder / "submit.sh"], check=True, capture_output=True)
    job = folder / "job.sh"
    assert (tmp_path / "told").read_text().splitlines() == [line.format(job=job) for line in asked]
    assert len((folder / "chain/jobs").read_text().split()) == 2
    one = (folder / "submit.sh").read_text().replace("SHARES=3", "SHARES=1")
    subprocess.run(["bash", "-c", one], check=True, capture_output=True)
    (alone,) = (tmp_path / "told").read_text().splitlines()[2:]
    assert "afterany" not in alone and "hold_jid" not in alone and "1-" not in alone


def test_each_job_knows_its_share(written, tmp_path, monkeypatch) -> None:
    """By the index of each scheduler; without an array, and by Grid Engine's word for that, it has none."""
    text = (written["tsubame4"] / "job.sh").read_text().replace('exec "${CONTAINER[@]}" bash', "printf '%s|'")
    for variable, value, share in [
        ("SLURM_ARRAY_TASK_ID", "2", "2/3"), ("PBS_ARRAY_INDEX", "3", "3/3"), ("SGE_TASK_ID", "1", "1/3"),
        ("SGE_TASK_ID", "undefined", ""), ("OTHER", "1", ""),
    ]:  # fmt: skip
        told = subprocess.run(
            ["bash", "-c", text],
            env={"PATH": "/usr/bin:/bin", variable: value},
            capture_output=True,
            text=True,
        )
        assert told.stdout.splitlines()[-1].split("|")[1:] == [str(written["tsubame4"]), share, ""], told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pack", "0"], "--pack 0: give 1 or more"),
        (["--pack", "2", "--nodes", "2"], "--nodes: jobs that pack have one node each"),
        (["--pack", "2", "--ladder", "1"], "--ladder: jobs that pack"),
        (["--pack", "2", "--preflight"], "--preflight: jobs that pack"),
        (["--pack", "2", "--hours", "100"], "gives at most 48 hours"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_written(
    arguments, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "norwegian_7b", *SITES["lumi_g"], "--dry-run", *arguments]) == 1
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_a_corpus_is_made_by_an_array_of_which_a_job_is_lost(tmp_path, monkeypatch, capsys) -> None:
    """The jobs of the array do the tasks of the lost job, the second array finds nothing, and one job joins.

    The corpus is that of one process.
    """
    Site.make(tmp_path / "stubs", runs=True, lost=("2",))
    monkeypatch.setenv("PATH", str(tmp_path / "stubs"), prepend=":")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.toml").write_text(CARD)
    (tmp_path / "tiny.toml").write_text(RECIPE)
    for name in "ab":
        lines = [f"{name if number % 2 else 'x'} {number}: lause number {number}" for number in range(400)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    sets = ["corpus.workers=1"]
    sets.append("corpus.sources=[{name='a',path='a.txt',clean=false},{name='b',path='b.txt',clean=false}]")
    flags = [word for key in sets for word in ("--set", key)]
    command = ["launch", "tiny.toml", "--corpus", "3", "--jobs", "2", *flags]
    assert main([*command, "--pack", "2"]) == 1 and "--pack: jobs that clean" in capsys.readouterr().err
    assert main(command) == 0
    folder = tmp_path / "run/launch/corpus_0001"
    log = (folder / "job.sh.log").read_text()
    assert "all are done. Put the corpus together" in log and "share 2 of 3" not in log
    assert log.count("share 1 of 3") == 2
    capsys.readouterr()
    assert main(["status", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["is_joined"] and shown["submitted"] == ["101", "102", "103"]
    recipe = read_recipe("tiny.toml", sets).recipe
    run_corpus(recipe, Path("alone/corpus"), Path("alone/raw"), progress=False)
    for file in Path("alone/corpus/documents").iterdir():
        assert file.read_bytes() == Path("run/corpus/documents", file.name).read_bytes()
    assert main(command) == 1 and "is finished already" in capsys.readouterr().err


def test_a_lost_job_is_made_up_for(tmp_path, monkeypatch, capsys) -> None:
    """The second of three jobs never runs: the one after them makes its part too, and joins the same bytes.

    Before it nothing is queued for text that is not there; after it there is nothing to do.
    """
    Site.make(tmp_path / "stubs", runs=True, lost=("2",))
    monkeypatch.setenv("PATH", str(tmp_path / "stubs"), prepend=":")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.toml").write_text(CARD)
    (tmp_path / "tiny.toml").write_text(RECIPE)
    command = ["launch", "tiny.toml", "--pack", "3"]
    assert main(command) == 1 and "corpus: not made yet" in capsys.readouterr().err
    recipe, documents = read_recipe("tiny.toml").recipe, make_documents(90)
    with write_stage(Path("run/corpus"), "corpus", 1, {}, {}) as stage:
        for number in range(3):
            file = stage.folder / "documents" / f"{number:05d}.jsonl.zst"
            write_documents(file, documents[30 * number : 30 * number + 30])
        stage.counts.update(documents_kept=90, bytes_kept=9_000)
    train_tokenizer(recipe, Path("run/corpus"), Path("run/tokenizer"))
    assert main(["launch", "tiny.toml", "--pack", "4"]) == 1
    assert "the corpus has 3 files" in capsys.readouterr().err
    assert main(command) == 0
    folder = tmp_path / "run/launch/pack_0001"
    log = (folder / "job.sh.log").read_text()
    assert "share 1 of 3: 1 parts" in log and "share 3 of 3: 1 parts" in log and "share 2" not in log
    capsys.readouterr()
    assert main(["status", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["is_joined"] and shown["parts"] == 3 and shown["submitted"] == ["101", "102"]
    pack(recipe, Path("run/corpus"), Path("run/tokenizer"), Path("here"))
    for file in Path("here").iterdir():
        assert file.name == "manifest.json" or file.read_bytes() == Path("run/tokens", file.name).read_bytes()
    assert main(command) == 1 and "packed already" in capsys.readouterr().err
