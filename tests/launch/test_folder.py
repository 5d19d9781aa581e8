"""The folder of a launch and what is read from it, by hand: its number, its papers, its status, its rungs."""

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kielo.artifact.launch_files import Launch
from kielo.artifact.metrics import TrainingStep
from kielo.artifact.stage_json import read_json, write_json
from kielo.launch import forecast as forecasting
from kielo.launch import ladder, launch_folder, prefetch
from kielo.launch import ladder as ladders
from kielo.launch import status as statuses
from kielo.launch.decide import Attempt, attempts
from kielo.launch.forecast import forecast_of
from kielo.launch.job_plan import Wishes
from kielo.launch.launch_folder import (
    launch_of,
    one_launch_at_a_time,
    recipe_text,
    refuse_second_chain,
    refuse_without_scheduler,
    submit,
    write_ladder_job,
    write_launch,
    write_share_jobs,
)
from kielo.launch.prefetch import missing, own_files
from kielo.launch.status import Status, newest_launch, status
from kielo.recipe.errors import KieloError
from tests.launch.hand_made import forecast, plan, recipe, site

LAUNCHES = Path("runs/mine/launch")
FILES = ["environment.sh", "job.sh", "recipe.toml", "submit.sh"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KIELO_PREFETCHED", raising=False)
    return tmp_path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_folders_have_the_next_number_and_all_their_files(here) -> None:
    """After the highest of their own kind, whatever else is there; nothing is left beside them."""
    for name in ("0007", "0003", "pack_0004", "notes", "x_0099"):
        (LAUNCHES / name).mkdir(parents=True)
    assert write_launch(plan(site())) == here / LAUNCHES / "0008"
    assert names_in(LAUNCHES / "0008") == sorted([*FILES, "chain", "launch.json", "logs", "rank.sh"])
    assert write_share_jobs(plan(site(), work="pack"), 3) == here / LAUNCHES / "pack_0005"
    assert names_in(LAUNCHES / "pack_0005") == sorted([*FILES, "chain", "logs", "pack.sh"])
    assert write_ladder_job(plan(site()), here / "ladder", [(here, 60)]) == here / "ladder" / "job_0001"
    assert names_in(here / "ladder" / "job_0001") == ["chain", "job.sh", "logs", "submit.sh"]
    left = ["0003", "0007", "0008", "notes", "pack_0004", "pack_0005", "x_0099"]
    assert names_in(LAUNCHES) == left
    scripts = Path(launch_folder.SCRIPTS)
    for name, written in (("rank.sh", "0008/rank.sh"), ("share.sh", "pack_0005/pack.sh")):
        assert (LAUNCHES / written).read_bytes() == (scripts / name).read_bytes()


def test_a_launch_that_fails_leaves_no_folder(here, monkeypatch) -> None:
    monkeypatch.setattr(launch_folder, "launch_of", lambda plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_launch(plan(site()))
    assert names_in(LAUNCHES) == []


def test_the_papers_of_a_launch(here, monkeypatch) -> None:
    """launch.json is what was asked for; the recipe has an absolute folder, and the card as it is named."""
    monkeypatch.setattr(launch_folder, "states", None)
    (here / "bin").mkdir()
    (here / "bin" / "sbatch").write_text("#!/bin/bash\necho slurm 1.2\n")
    (here / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(here / "bin"), prepend=":")
    asked = plan(
        site(jobs={"partitions": [{"name": "usual", "qos": "q"}]}), Wishes(spares=2), forecast=forecast(),
        no_forecast="",
    )  # fmt: skip
    found = launch_of(asked).model_dump()
    versions = found.pop("versions")
    assert found.pop("created_at").endswith("+00:00")
    assert found == {
        "cluster": "laptop", "scheduler": "slurm", "job_name": "mine", "nodes": 3, "spares": 2, "devices": 12,
        "partition": "q", "wall_seconds": 7384, "grace_seconds": 300, "jobs": 5,
        "forecast": forecast().model_dump(), "no_forecast": "", "work": "train",
    }  # fmt: skip
    assert versions["card"] == "here, 2026-11" and versions["sbatch"] == "slurm 1.2"
    assert {"kielo", "python"} < set(versions)
    assert "sbatch" not in launch_of(plan(site("pbs"))).versions
    assert launch_of(plan(site())).partition == "usual"
    own = plan(site(), recipe=recipe(cluster="my.toml", train={"tokens": 1000}))
    assert recipe_text(own) == (
        f"# The recipe of this launch, for the jobs of this folder, which start in {here}.\n"
        f'name = "mine"\nlanguage = "et"\nfolder = "{here}/runs/mine"\ncluster = "{here}/my.toml"\n\n'
        '[corpus]\n\n[[corpus.sources]]\nname = "a"\npath = "a.txt"\n\n[train]\ntokens = 1000\n'
    )
    assert launch_of(own).cluster == f"{here}/my.toml"


ROW = "{}\t{}\t0\t3\t1764000000\t{}\t\n"


def test_a_chain_of_another_person_is_known_where_the_scheduler_hides_it(here, monkeypatch) -> None:
    """By what it noted: an end of each job, or that it stopped. A job that waits again has no end."""
    asked = plan(site())
    folder = write_launch(asked)
    chain = folder / "chain"
    (chain / "jobs").write_text("7\n8\n")
    hidden = [True]
    monkeypatch.setattr(launch_folder, "states", lambda scheduler, ids: {})
    monkeypatch.setattr(launch_folder, "hides_jobs", lambda scheduler: hidden[0])
    refuse_second_chain(asked)  # its jobs are one's own, and would be shown
    monkeypatch.setattr(os, "getuid", lambda: (chain / "jobs").stat().st_uid + 1)
    owner = (chain / "jobs").owner()

    def refusal() -> str:
        with pytest.raises(KieloError) as refused:
            refuse_second_chain(asked)
        return str(refused.value)

    assert refusal() == (
        f"{folder}: its chain is {owner}'s, the scheduler shows you no jobs of other persons, and no end of "
        f"7, 8 is noted. Fix: `kielo cancel` by that person, or if the jobs are over `echo over > "
        f"{chain}/stopped`"
    )
    (chain / "attempts").write_text(ROW.format("start", 7, "") + ROW.format("end", 7, "ok"))
    assert "no end of 8 is noted" in refusal()
    (chain / "attempts").write_text(ROW.format("end", 7, "ok") + ROW.format("end", 8, "requeue") + "start\t7")
    assert "no end of 8 is noted" in refusal()
    hidden[0] = False
    refuse_second_chain(asked)
    hidden[0] = True
    (chain / "stopped").write_text("finished\n")
    refuse_second_chain(asked)
    (chain / "stopped").unlink()
    (chain / "attempts").write_text(ROW.format("end", 7, "ok") + ROW.format("end", 8, "ok"))
    refuse_second_chain(asked)


def test_a_second_chain_is_refused_only_beside_jobs_in_the_queue(here, monkeypatch) -> None:
    """Of any launch of the run on this site; not of another site, or of jobs that are over."""
    asked = plan(site())
    first, second = write_launch(asked), write_launch(asked)
    refuse_second_chain(asked)
    queue = {"1": "RUNNING None", "2": "PENDING Priority"}
    monkeypatch.setattr(
        launch_folder, "states", lambda scheduler, ids: {job: queue[job] for job in ids if job in queue}
    )
    (second / "chain" / "jobs").write_text("9\n")
    refuse_second_chain(asked)
    (second / "chain" / "jobs").write_text("1\n9\n2\n")
    with pytest.raises(KieloError) as refused:
        refuse_second_chain(asked)
    assert str(refused.value) == (
        f"{second}: jobs of this run are in the queue already (1 RUNNING, 2 PENDING). Fix: `bash "
        f"{second}/submit.sh 5` adds five jobs to their chain, or `kielo cancel runs/mine` and launch again "
        "when they are over"
    )
    refuse_second_chain(replace(asked, recipe=recipe(cluster="lumi_g")))
    (second / "launch.json").unlink()
    refuse_second_chain(asked)
    assert first.exists()


def test_submission(here, monkeypatch) -> None:
    """Ids and what the scheduler said beside them; a refusal leaves the folder."""
    folder = here / "launch"
    folder.mkdir()
    (folder / "submit.sh").write_text("echo 1; echo 2; echo 'job  3 was' >&2; echo refused >&2\n")
    assert submit(folder, "slurm") == (["1", "2"], "job 3 was refused")
    (folder / "submit.sh").write_text("echo no >&2; exit 1\n")
    with pytest.raises(KieloError) as refused:
        submit(folder, "pbs")
    assert str(refused.value) == (
        f"qsub refused the job, and nothing is queued: no. Fix: change {folder}, which stays, and submit it "
        f"by `bash {folder}/submit.sh`, or launch again"
    )
    for scheduler, command in (("slurm", "sbatch"), ("grid_engine", "qsub")):
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(
            KieloError, match=f"{command} is not on this machine's PATH, and here takes jobs by it"
        ):
            refuse_without_scheduler(plan(site(scheduler)))
        (here / command).touch(0o755)
        monkeypatch.setenv("PATH", str(here))
        refuse_without_scheduler(plan(site(scheduler)))


LINES = [
    "start\t11\t0\t3\t1000\t\t", "end\t11\t0\t3\t4600\trequeue\tstopped", "end\t10\t0\t3\t4700\tfailed\tx",
    "start\t12\t0\tx\t5000\t\t", "start\t12\t0\t2\ty\t\t", "start\t12\t0\t2\t8200\t",
    "start\t12\t0\t2\t8200\t\t", "", "start\t12\t1\t2\t11800\t\t", "end\t12\t1\t2\t13600\tfailed\ta\tb",
]  # fmt: skip
ATTEMPTS = [
    Attempt("11", 3, 1000, 4600, "requeue", "stopped"),
    Attempt("12", 2, 8200),
    Attempt("12", 2, 11800),
]


def a_status(of: Path, jobs: dict[str, str] | None, noted: list[Attempt]) -> Status:
    return Status(of, launch_of(plan(site())), [], jobs, noted, None, None, "", [], {})


def test_attempts_are_read(here) -> None:
    """Whole lines with numbers alone; an end is of the last attempt, if that is of its job."""
    (here / "attempts").write_text("\n".join(LINES))
    found = attempts(here / "attempts")
    assert found[:1] == ATTEMPTS[:1] and found == [ATTEMPTS[0], *ATTEMPTS[1:]]
    assert attempts(here / "gone") == [] == attempts(here / "attempts" / "below")
    (here / "attempts").write_text("end\t12\t1\t2\t13600\tfailed\tx\n")
    assert attempts(here / "attempts") == []


def test_device_hours(here, monkeypatch) -> None:
    """An hour of 12 devices, one of 8 until the next start, and what the last attempt is seen to have run."""
    folder = here / LAUNCHES / "0001"
    log = here / "runs/mine/train/metrics.jsonl"
    log.parent.mkdir(parents=True)
    monkeypatch.setattr(time, "time", lambda: 11800 + 7200.9)
    assert a_status(folder, {}, ATTEMPTS[:1]).device_hours == 12
    assert a_status(folder, {}, ATTEMPTS).device_hours == 12 + 8  # no log: the last one is not seen
    log.touch()
    os.utime(log, (11800 + 1800, 11800 + 1800))
    for jobs in (None, {}, {"1": "PENDING None"}, {"1": "Q"}, {"1": "hqw"}):
        assert a_status(folder, jobs, ATTEMPTS).device_hours == 12 + 8 + 4
    for state in ("RUNNING None", "R", "r"):
        found = a_status(folder, {"1": "PENDING", "2": state}, ATTEMPTS)
        assert found.is_running and found.device_hours == 12 + 8 + 16
    os.utime(log, (1, 1))
    assert a_status(folder, {}, ATTEMPTS).device_hours == 12 + 8


def test_the_status_of_the_newest_launch(here, monkeypatch) -> None:
    """All that its files say; a launch is a folder of a number."""
    run = here / "runs/mine"
    with pytest.raises(KieloError, match="runs/mine: was never launched. Fix: kielo launch RECIPE"):
        newest_launch(run)
    (run / "launch" / "pack_0009").mkdir(parents=True)
    (run / "launch" / "0001").mkdir()
    folder = write_launch(plan(site()))
    assert newest_launch(Path("runs/mine")) == folder == here / LAUNCHES / "0002"
    seen = []
    monkeypatch.setattr(statuses, "states_or_reason", lambda *asked: seen.append(asked) or ({"2": "R"}, ""))
    found = status(run)
    assert found == Status(folder, read_json(folder, Launch), [], {"2": "R"}, [], None, None, "", [], {})
    (folder / "chain" / "jobs").write_text("1\n\n2\n")
    (folder / "chain" / "attempts").write_text(LINES[0])
    (folder / "chain" / "stopped").write_text("finished\n\nlast\n")
    (run / "launch" / "left_out_nodes").write_text("b 1 x\na 2 y\nb 3 z\n")
    (run / "train").mkdir()
    rows = [TrainingStep(step=step, loss=1.0, tokens_per_second=1.0, seconds=1.0) for step in (1, 2, 3)]
    (run / "train" / "metrics.jsonl").write_text("".join(row.model_dump_json() + "\n" for row in rows))
    found = status(run)
    assert (found.ids, found.attempts, found.stopped) == (
        ["1", "2"],
        [Attempt("11", 3, 1000)],
        "finished\nlast",
    )
    assert (found.left_out, found.last_step.step, seen[1:]) == (["a", "b"], 3, [("slurm", ["1", "2"])])
    (folder / "launch.json").unlink()
    with pytest.raises(KieloError, match="0002: has no launch.json. Fix: launch the run again"):
        status(run)


def test_the_state_of_a_rung(here, monkeypatch) -> None:
    """Its last attempt's end, where nothing was measured."""
    monkeypatch.setattr(ladder, "has_measured", lambda folder: folder.name == "measured")
    run = here / "runs/mine"
    assert ladder.state(here / "measured") == "measured" and ladder.state(run) == "not run yet"
    folder = write_launch(plan(site()))
    assert ladder.state(run) == "not run yet"
    end = "end\t11\t0\t3\t4600\t"
    for text, state in (
        ("", "runs, or was ended from outside"), (f"{end}failed\tmemory: full", "failed: memory: full"),
        (f"{end}failed\t", "failed"),
    ):  # fmt: skip
        (folder / "chain" / "attempts").write_text(f"{LINES[0]}\n{text}\n")
        assert ladder.state(run) == state
    asked = plan(site(), recipe=recipe(folder=str(run), train={"tokens": 9000}))
    folder = write_launch(asked)
    assert not ladder.is_measured(asked)
    monkeypatch.setattr(ladder, "has_measured", lambda folder: True)
    assert ladder.is_measured(asked)
    assert ladder.is_measured(
        replace(
            asked,
            recipe=recipe(folder=str(run), train={"tokens": 9000, "micro_batch_sequences": 2}, nodes=[2]),
        )
    )
    for section, key in (("train", "tokens"), ("model", "hidden_size"), ("dataset", "sequence_length")):
        train = {"train": {"tokens": 9000}} | {section: {key: 640}}
        other = replace(asked, recipe=recipe(folder=str(run), **train))
        with pytest.raises(
            KieloError, match=rf"was measured with another \[{section}\].*. Fix: move {here} away"
        ):
            ladder.is_measured(other)


def test_a_forecast_is_the_planners_numbers(monkeypatch) -> None:
    """In hours, 10^9 bytes and the site's own units: a whole node costs 6 of them an hour."""
    its_cost = SimpleNamespace(
        wall_seconds=7200.0,
        device_hours=80.0,
        jobs=3,
        checkpoint_bytes=5e9,
        checkpoint_seconds=7.0,
        stop_seconds=0.5,
    )
    asked = []
    monkeypatch.setattr(forecasting, "cost", lambda *what: asked.append(what) or its_cost)
    run = SimpleNamespace(site=site(billed_per_node_hour=6, billing_unit="units"), usable_bytes=70e9)
    planned = SimpleNamespace(
        run=run, name="dp12", tokens_per_second=1e5, step_seconds=10.0, low_seconds=9.0, high_seconds=12.0,
        peak_bytes=60e9, safe_share=1.5,
    )  # fmt: skip
    assert forecast_of(planned, 24).model_dump() == {
        "layout": "dp12", "tokens_per_second": 1e5, "step_seconds": 10.0, "interval_seconds": [9.0, 12.0],
        "peak_gigabytes": 60.0, "usable_gigabytes": 70.0, "wall_hours": 2.0, "device_hours": 80.0,
        "safe_device_hours": 120.0, "billed": 120.0, "billing_unit": "units", "jobs": 3,
        "checkpoint_gigabytes": 5.0, "checkpoint_seconds": 7.0, "save_stop_seconds": 0.5,
    }  # fmt: skip
    assert asked == [(planned, 24)]
    run.site = site()
    assert forecast_of(planned, 24).billed is None

    def refuse(planned, hours):
        raise KieloError("too short; --wall-hours 3 or more")

    monkeypatch.setattr(forecasting, "cost", refuse)
    with pytest.raises(KieloError, match="^too short; --hours 3 or more$"):
        forecast_of(planned, 1)


ALL = {
    "corpus": {"sources": [
        {"name": "a", "path": "a.txt"}, {"name": "b", "tokens": "b"},
        {"name": "c", "huggingface_dataset": "o/c"}, {"name": "d", "debian_package": "bible"},
        {"name": "e", "path": "a.txt"},
    ]},
    "evaluate": {
        "texts": [{"name": "t", "path": "t.txt"}], "minimal_pairs": "pairs.tsv",
        "part_of_speech": {"train": "train.conllu", "dev": "dev.conllu"},
    },
}  # fmt: skip


def test_a_persons_own_files_are_listed(here) -> None:
    """Each path once: text, token files, evaluation texts and measures, vectors, a tokenizer and weights."""
    own = ["a.txt", "b", "t.txt", "pairs.tsv", "train.conllu", "dev.conllu"]
    assert own_files(recipe(**ALL)) == own
    (here / "tokenizer").mkdir()
    (here / "tokenizer" / "tokenizer.json").touch()
    local = recipe(
        tokenizer={"path": str(here / "tokenizer")},
        model={"weights": f"hf:{here}/weights"},
        corpus=ALL["corpus"],
    )
    assert own_files(local) == ["a.txt", "b", str(here / "tokenizer"), f"{here}/weights"]
    vectors = {"weights": "hf:org/one", "transplant": "focus", "transplant_vectors": "v.vec"}
    assert own_files(recipe(model=vectors)) == ["a.txt", "v.vec"]
    assert own_files(recipe(model={"weights": "hf:org/one"}, tokenizer={"path": "hf:org/one"})) == ["a.txt"]


def test_downloads_that_are_not_here_yet(here, monkeypatch) -> None:
    """Text until it has become tokens; weights and tokenizer of the hub until they are on this machine."""
    asked = []
    monkeypatch.setattr(
        prefetch, "is_fetched", lambda source, *where: asked.append(where) or source.name == "d"
    )
    monkeypatch.setattr(prefetch, "weights_here", lambda reference: None)
    monkeypatch.setattr(prefetch, "tokenizer_here", lambda reference: None)
    hub = {"model": {"weights": "hf:org/one"}, "tokenizer": {"path": "hf:org/two"}}
    lacking = ["the weights hf:org/one", "the tokenizer hf:org/two"]
    assert missing(recipe(**ALL, **hub)) == ["the text of c", *lacking]
    assert asked == [(Path("runs/mine/raw"), None)] * 2
    tokens = here / "runs/mine/tokens"
    tokens.mkdir(parents=True)
    assert missing(recipe(**ALL)) == ["the text of c"]
    (tokens / "manifest.json").touch()
    assert missing(recipe(**ALL, **hub)) == lacking
    monkeypatch.setattr(prefetch, "weights_here", lambda reference: here)
    assert missing(recipe(**ALL, **hub)) == lacking[1:]
    monkeypatch.setattr(prefetch, "tokenizer_here", lambda reference: here)
    assert missing(recipe(**ALL, **hub)) == []


def test_the_time_of_a_rung_and_of_the_job_of_rungs(here, monkeypatch) -> None:
    """Ten steps at twice the slow end, in whole minutes after the start; 300 s for the job besides."""
    of = site(max_wall_hours=2)
    monkeypatch.setattr(ladders, "check_request", lambda *what: (of, of.jobs, of.jobs.partitions[0], 3, 2.0))
    monkeypatch.setattr(ladders, "cluster", lambda name: of)
    monkeypatch.setattr(ladders, "plan_jobs", lambda recipe, wishes, one: plan(of, wishes))
    monkeypatch.setattr(ladders, "rung_recipe", lambda plan, planned, folder: plan.recipe)
    monkeypatch.setattr(ladders, "is_measured", lambda plan: False)
    layouts = [SimpleNamespace(name="a/b", high_seconds=3.05), SimpleNamespace(name="c", high_seconds=3.0)]
    monkeypatch.setattr(ladders, "best_layouts", lambda run, nodes: layouts)
    monkeypatch.setattr(ladders.RunToPlan, "of_recipe", lambda recipe: object())
    (found,) = ladders.plan_ladder(recipe(), Wishes(), [3])
    above = here / LAUNCHES / "ladder_here" / "3_nodes"
    assert [ladder.folder for ladder in found.rungs] == [
        above / "a_b",
        above / "c",
    ] and found.to_run == found.rungs
    first, second = (ladder.plan for ladder in found.rungs)
    assert (first.wall_seconds, second.wall_seconds) == (720, 660)  # 600 + 61 s, and 600 + 60 s
    assert {
        (one.grace_seconds, one.chain_length, one.measured_steps, one.bound) for one in (first, second)
    } == {(60, 1, 10, (here / "runs/mine",))}
    job = found.job
    assert (job.wall_seconds, job.measured_steps, job.recipe.name) == (720 + 660 + 300, 0, "mine_3_nodes")
    assert job.recipe.folder == str(here / "runs/mine")
    monkeypatch.setattr(ladders, "is_measured", lambda plan: plan.wall_seconds == 720)
    (found,) = ladders.plan_ladder(recipe(), Wishes(), [3])
    assert [ladder.layout for ladder in found.to_run] == ["c"] and found.job.wall_seconds == 660 + 300
    monkeypatch.setattr(ladders, "is_measured", lambda plan: True)
    (found,) = ladders.plan_ladder(recipe(), Wishes(hours=1680 / 3600), [3])
    assert found.to_run == [] and found.job.wall_seconds == 1680
    with pytest.raises(
        KieloError, match="^2 layouts on 3 nodes may take 0.5 hours, and --hours gives 0.46. Fix: more"
    ):
        ladders.plan_ladder(recipe(), Wishes(hours=0.46), [3])
    of = site(max_wall_hours=0.4)
    with pytest.raises(KieloError, match="and usual gives 0.4. Fix: another --partition"):
        ladders.plan_ladder(recipe(), Wishes(), [3])


def test_pack_jobs_beside_others_are_written_once(here) -> None:
    """launch.json is of a chain alone."""
    folder = write_share_jobs(plan(site(), work="pack"), 3)
    assert read_json(folder, Launch) is None
    write_json(folder, launch_of(plan(site())))
    assert read_json(folder, Launch).nodes == 3


@pytest.mark.parametrize(("first", "skipped"), [(1, ()), (11, ((1, 10),)), (12, ((1, 11),))])
def test_the_recipe_of_a_rung(first, skipped, monkeypatch) -> None:
    """The steps of the phase with most tokens, each logged; earlier ones are skipped, and nothing is kept."""
    small = SimpleNamespace(first_step=1, last_step=first - 1, steps=first - 1, tokens_per_step=10)
    main = SimpleNamespace(first_step=first, last_step=40, steps=41 - first, tokens_per_step=10)
    resolved = SimpleNamespace(identity=SimpleNamespace(phases=[small, main]))
    monkeypatch.setattr(ladders, "resolved_of_plan", lambda plan: resolved)
    of = recipe(train={"precision": "bf16", "tensorboard": True, "wandb": "project"})
    made_of = ladders.rung_recipe(plan(site(), recipe=of), None, Path("/rung"))
    train = made_of.train
    assert (made_of.folder, train.log_every_steps, train.heldout_every_steps) == ("/rung", 1, 41)
    assert (train.tensorboard, train.wandb, train.skip_steps) == (False, "", skipped)
    assert (train.precision, train.precision_changes) == ("bf16", ())
    main.steps = 10
    ladders.rung_recipe(plan(site(), recipe=of), None, Path("/rung"))
    main.steps, small.steps = 9, 0
    with pytest.raises(
        KieloError, match="the run has 9 steps of 10 tokens, and a ladder takes 10. Fix: more train"
    ):
        ladders.rung_recipe(plan(site(), recipe=of), None, Path("/rung"))


def test_a_second_launch_is_refused_while_the_first_one_submits(tmp_path, monkeypatch) -> None:
    """The queue knows its jobs only when sbatch has answered, which may take a while."""
    monkeypatch.chdir(tmp_path)
    jobs = plan(site())
    with one_launch_at_a_time(jobs):  # the run is not there, so nothing of it can wait
        assert not Path("runs").exists()
    Path("runs/mine").mkdir(parents=True)
    holder = f"process {os.getpid()} on "
    with one_launch_at_a_time(jobs), pytest.raises(KieloError, match=holder), one_launch_at_a_time(jobs):
        pass
    with one_launch_at_a_time(jobs):
        pass
    assert list(Path("runs/mine/launch").iterdir()) == []
