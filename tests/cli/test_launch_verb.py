"""`kielo launch`, `status` and `cancel` around a site and jobs that are made by hand: every line of them."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.artifact.metrics import TrainingStep
from kielo.cli.main import main
from kielo.launch.decide import Attempt
from kielo.launch.job_paths import JobPath
from kielo.launch.job_plan import Wishes
from kielo.launch.start_times import Starts
from kielo.launch.status import Status
from kielo.recipe.errors import KieloError
from tests.launch.hand_made import forecast, plan, site

HERE = ["launch", "own_text", "--cluster", "lumi_g"]


class Launching:
    """Stands in for what `kielo launch` plans, writes and submits; `done` has the order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.wishes: list[Wishes] = []
        self.plan = plan(site())
        self.answer: tuple[list[str], str] = (["7", "8"], "two jobs")
        self.note = ""
        self.shares: list[int] = []
        self.refused: list[Path] = []
        self.ladder: list[Any] = []
        self.to_submit: dict[int, Path] = {}
        self.numbers: list[int] = []
        for name, value in {
            "plan_jobs": self._planned(lambda: self.plan),
            "check_ready": self._step("check"),
            "network_needed": lambda of: self.note,
            "job_paths": lambda of: [
                JobPath("/a", "reads", f"packs: {bool(getattr(of, 'shared_stage', None))}")
            ],
            "starts_of": lambda of, sizes: Starts([], "nobody knows"),
            "one_launch_at_a_time": lambda of: nullcontext(),
            "refuse_without_scheduler": self._step("scheduler"),
            "refuse_second_chain": self._step("second chain"),
            "write_launch": self._step("write", Path("runs/mine/launch/0001")),
            "launch_of": lambda of: SimpleNamespace(content=lambda: {"nodes": of.nodes}),
            "submit": self._submit,
            "write_share_jobs": self._write_shares,
            "plan_share_jobs": lambda recipe, wishes, stage: replace(
                self._planned(lambda: self.plan)(recipe, wishes), work=stage
            ),
            "check_shareable": self._step("shareable"),
            "plan_ladder": self._plan_ladder,
            "in_folder_of": lambda rung, recipe: rung,
            "write_ladder": lambda *_: (Path("runs/ladder"), self.to_submit),
            "waiting_job": lambda folder, scheduler: "99",
        }.items():
            monkeypatch.setattr(f"kielo.cli.launch.{name}", value)

    def _step(self, name: str, result: Any = None) -> Any:
        return lambda *_: self.done.append(name) or result

    def _planned(self, made: Any) -> Any:
        return lambda recipe, wishes: self.wishes.append(wishes) or made()

    def _write_shares(self, of: Any, number: int) -> Path:
        self.shares.append(number)
        return Path("runs/mine/launch/pack_0001")

    def _submit(self, folder: Path, scheduler: str) -> tuple[list[str], str]:
        self.done.append(f"submit to {scheduler}")
        if folder in self.refused:
            raise KieloError(f"{folder.name}: too many jobs")
        return self.answer

    def _plan_ladder(self, recipe: Any, wishes: Wishes, numbers: list[int]) -> list[Any]:
        self.numbers = numbers
        return self.ladder


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> Launching:
    return Launching(monkeypatch)


def said(capsys: pytest.CaptureFixture, *words: str) -> str:
    assert main([*words]) == 0
    return capsys.readouterr().out


ROWS = (
    "run\tmine, on 3 nodes of here, 12 ranks\n"
    "jobs\ta chain of 5, at most 02:03:04 each in usual; each saves and stops 300 s before its end\n"
    "forecast\tnone: by hand\n"
    "wrote runs/mine/launch/0001\n"
)


PATHS = "use\tpath\tfor\nreads\t/a\tpacks: {}\n"


def test_a_chain_is_checked_written_and_submitted(launching, capsys) -> None:
    assert said(capsys, *HERE) == ROWS + "submitted 7, 8; two jobs\n"
    assert launching.done == ["scheduler", "second chain", "check", "write", "submit to slurm"]
    launching.answer, launching.note = (["7"], ""), "the nodes have no network"
    assert said(capsys, *HERE) == ROWS + "note: the nodes have no network\nsubmitted 7\n"
    found = json.loads(said(capsys, *HERE, "--json"))
    folder = "runs/mine/launch/0001"
    assert found.pop("paths") == [{"path": "/a", "use": "reads", "reason": "packs: False"}]
    assert found == {"nodes": 3, "folder": folder, "submitted": ["7"], "answer": ""}


def test_a_dry_run_is_written_and_not_submitted(launching, capsys) -> None:
    end = "nothing is submitted; on a login node of here: bash runs/mine/launch/0001/submit.sh\n"
    *rows, wrote = ROWS.splitlines(keepends=True)
    start = "start\tnot known: nobody knows\n"
    assert said(capsys, *HERE, "--dry-run") == "".join(rows) + start + PATHS.format(False) + wrote + end
    assert launching.done == ["write"]
    assert json.loads(said(capsys, *HERE, "--dry-run", "--json"))["submitted"] == []


def test_the_forecast_is_told(launching, capsys) -> None:
    """Days, not hours; the site's units if it bills in any; spare nodes and a queue's own name."""
    partition = site(jobs={"partitions": [{"name": "a", "qos": "fast"}]}).jobs.partitions[0]
    told = forecast(device_hours=1480.0, safe_device_hours=2220.0)
    launching.plan = plan(site(), Wishes(spares=2), forecast=told)
    launching.plan = SimpleNamespace(**vars(launching.plan) | {"partition": partition, "devices": 12})
    rows = said(capsys, *HERE).splitlines()
    assert rows[0] == "run\tmine, on 3 nodes and 2 spare nodes of here, 12 ranks"
    assert " each in fast; " in rows[1]
    assert rows[2:4] == [
        "layout\tdp12, 60.0 of 70.0 GB a device",
        "forecast\t100,000 tokens/s; 1.7 days in 4 jobs, safe 2,220 device-hours, planned 1,480 device-hours",
    ]
    launching.plan.forecast = forecast(billed=0.0, billing_unit="GPU-hours")
    assert said(capsys, *HERE).splitlines()[3].endswith(", planned 480 device-hours (0 GPU-hours)")


def test_flags_are_wishes(launching, capsys) -> None:
    given = {"nodes": 4, "account": "p", "partition": "q", "hours": 1.5, "jobs": 1, "layout": "tp2",
             "spares": 3, "grace": 1, "container": "i", "venv": "v", "site": "s"}  # fmt: skip
    words = [f"--{flag}={value}" for flag, value in given.items()]
    said(capsys, *HERE, *words, "--torchrun", "--preflight", "--dry-run")
    assert launching.wishes == [Wishes(4, "p", "q", 1.5, 1, "tp2", 1, 3, True, True, "i", "v", "s")]
    for flag in ("--jobs", "--grace"):
        assert main([*HERE, flag, "0"]) == 1
        assert capsys.readouterr().err == f"kielo: {flag} 0: give 1 or more\n"


def test_jobs_that_pack_are_submitted(launching, capsys) -> None:
    """Each has one node, whatever the recipe says."""
    workers = launching.plan.recipe.corpus.workers
    text = (
        "text\tof own_text, in 16 shares and a join\n"
        f"jobs\ta node of here each, {workers} workers, at most 02:03:04 in usual\n"
        "nodes\twith devices: the card of here has no [jobs.cpu]\n"
        "wrote runs/mine/launch/pack_0001; kielo status runs/mine/launch/pack_0001 counts the finished "
        "parts\n"
    )
    assert said(capsys, *HERE, "--pack", "16") == text + "submitted 7, 8; two jobs\n"
    assert launching.done == ["scheduler", "shareable", "submit to slurm"]
    assert launching.wishes[0].nodes == 1 and launching.shares == [16]
    launching.answer = (["7"], "")
    assert said(capsys, *HERE, "--pack", "16").endswith("\nsubmitted 7\n")
    launching.done.clear()
    end = "nothing is submitted; to submit: bash runs/mine/launch/pack_0001/submit.sh\n"
    *rows, wrote = text.splitlines(keepends=True)
    dry = "".join(rows) + PATHS.format(True) + wrote + end
    assert said(capsys, *HERE, "--pack", "16", "--dry-run") == dry and launching.done == []
    found = json.loads(said(capsys, *HERE, "--pack", "1", "--json"))
    assert found.pop("paths")[0]["reason"] == "packs: True"
    assert found == {"folder": "runs/mine/launch/pack_0001", "shares": 1, "submitted": ["7"], "answer": ""}


def test_what_jobs_that_pack_do_not_have_is_refused(launching, capsys, tmp_path) -> None:
    own = "--nodes 2", "--layout a", "--jobs 2", "--grace 9", "--ladder 1", "--spares 1"
    for words in (*own, "--torchrun", "--preflight"):
        assert main([*HERE, "--pack", "2", *words.split()]) == 1
        flag = words.split()[0]
        assert capsys.readouterr().err == (
            f"kielo: {flag}: jobs that pack have one node each. Fix: leave it out beside --pack\n"
        )
    for number in ("0", "-1"):
        assert main([*HERE, "--pack", number]) == 1
        assert capsys.readouterr().err == f"kielo: --pack {number}: give 1 or more\n"
    (tmp_path / "tokenizer.json").write_text("{}")
    ready = tmp_path / "ready.toml"
    ready.write_text(
        f'extends = "own_text"\n[corpus]\nsources = [{{name = "a", tokens = "x"}}]\n[tokenizer]\n'
        f'path = "{tmp_path}"\n'
    )
    assert main(["launch", str(ready), "--pack", "2"]) == 1
    assert "--pack: all sources are ready tokens, which are read in place" in capsys.readouterr().err


def on(nodes: int, *layouts: str) -> SimpleNamespace:
    rungs = [SimpleNamespace(layout=layout, plan=None) for layout in layouts]
    return SimpleNamespace(nodes=nodes, to_run=rungs, job=SimpleNamespace(site=site(), wall_seconds=5400))


def test_a_ladder_is_a_job_for_each_number_of_nodes(launching, capsys) -> None:
    """Numbers that are measured or wait have none; one that is refused does not stop the others."""
    launching.ladder = [on(1), on(2, "a"), on(4, "b", "c"), on(8, "d")]
    launching.to_submit = {4: Path("four"), 8: Path("eight")}
    table = (
        "nodes\tlayouts\thours at most\t\n1\tall measured\t\t\n2\ta\t\tjob 99 has not ended\n"
        "4\tb, c\t1.5\t{}\n8\td\t1.5\t{}\n"
        "{}wrote runs/ladder; kielo status runs/ladder shows the measurements\n"
    )
    job = "job 7, 8; two jobs"
    assert said(capsys, *HERE, "--ladder", "8, 4,1,2,4") == table.format(job, job, "")
    assert launching.numbers == [1, 2, 4, 8]
    assert launching.done == ["scheduler", *["check"] * 4, *["submit to slurm"] * 2]
    launching.answer, launching.refused = (["7"], ""), [Path("four")]
    assert main([*HERE, "--ladder", "1,2,4,8"]) == 1
    printed = capsys.readouterr()
    assert printed == (table.format("refused", "job 7", ""), "kielo: four: too many jobs\n")
    launching.done.clear()
    none = "not submitted"
    assert said(capsys, *HERE, "--ladder", "1", "--dry-run") == table.format(none, none, PATHS.format(False))
    assert launching.done == []
    found = json.loads(said(capsys, *HERE, "--ladder", "1", "--dry-run", "--json"))
    assert found["folder"] == "runs/ladder"
    assert found["jobs"][2] == {"nodes": 4, "layouts": "b, c", "hours": "1.5", "job": none}


def test_what_a_ladder_chooses_itself_is_refused(launching, capsys) -> None:
    for flag in ("nodes", "layout", "jobs", "grace"):
        assert main([*HERE, "--ladder", "1,2", f"--{flag}", "1"]) == 1
        said = f"kielo: --{flag}: a ladder chooses it itself. Fix: leave it out beside --ladder\n"
        assert capsys.readouterr().err == said
    for wrong in ("0", "1,0", "a", "1,,2", "-1", "1.5"):
        assert main([*HERE, f"--ladder={wrong}"]) == 1
        said = f"kielo: --ladder {wrong}: not understood. Fix: numbers of nodes such as 1,2,4,8\n"
        assert capsys.readouterr().err == said


# --- status and cancel


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The state of a run that was launched, and none of whose jobs has begun."""
    launch = SimpleNamespace(
        job_name="mine", nodes=3, cluster="here", devices=12, scheduler="slurm", forecast=None, work="train"
    )
    folder = tmp_path / "launch" / "0001"
    (folder / "chain").mkdir(parents=True)
    (folder / "logs").mkdir()
    state = SimpleNamespace(is_=Status(folder, launch, ["7", "8"], {}, [], None, None, "", [], {}), ended=[])
    monkeypatch.setattr("kielo.cli.launched.status_of", lambda run: state.is_)
    monkeypatch.setattr("kielo.cli.launched.end_jobs", lambda *given: state.ended.append(given))
    return state


def with_state(found: SimpleNamespace, **more: Any) -> None:
    found.is_ = Status(**vars(found.is_) | more)


def step(**more: Any) -> TrainingStep:
    values = {"step": 1234, "loss": 2.34567, "tokens_per_second": 85_000.0, "seconds": 1.0}
    return TrainingStep(**values | more)


def rows(capsys: pytest.CaptureFixture) -> dict[str, str]:
    return dict(line.split("\t", 1) for line in said(capsys, "status", "run").splitlines())


def test_a_launch_that_has_not_begun(found, capsys) -> None:
    first = "mine, on 3 nodes of here, 12 ranks"
    spent = "0.0 device-hours in 0 attempts"
    assert rows(capsys) == {"run": first, "jobs": "none left (2 submitted)", "spent": spent}
    with_state(found, ids=[])
    assert rows(capsys)["jobs"] == f"none submitted; bash {found.is_.folder}/submit.sh"
    with_state(found, ids=["7"], jobs=None, no_answer="squeue failed")
    assert rows(capsys)["jobs"] == "1 submitted; squeue failed"
    with_state(found, jobs={"7": "PENDING", "8": "HELD"}, stopped="finished", left_out=["n1", "n2"])
    of = rows(capsys)
    assert of["jobs"] == "7 PENDING; 8 HELD (1 submitted)"
    assert (of["chain"], of["left out"]) == ("ended: finished", "n1, n2")
    said_json = json.loads(said(capsys, "status", "run", "--json"))
    assert said_json["left_out"] == "n1, n2" and said_json["folder"] == str(found.is_.folder)


def test_the_speed_of_a_run_stands_beside_its_plan(found, capsys) -> None:
    """That of the step, else the forecast's. A time when it is ready only while it runs."""
    with_state(found, last_step=step())
    of = rows(capsys)
    assert (of["step"], of["speed"]) == ("1,234, loss 2.3457", "85,000 tokens/s")
    assert "left" not in of
    found.is_.launch.forecast = forecast()
    with_state(found, total_steps=56_789, last_step=step(loss=None, seconds_left=3599.6))
    of = rows(capsys)
    assert of["step"] == "1,234 of 56,789, loss not finite"
    assert of["speed"] == "85,000 tokens/s; planned 100,000, so 85%"
    assert of["left"] == "1:00:00 of training" and of["spent"].endswith(" attempts; forecast 480")
    with_state(found, jobs={"7": "RUNNING"}, last_step=step(planned_tokens_per_second=5e4, seconds_left=9.0))
    of = rows(capsys)
    assert of["speed"] == "85,000 tokens/s; planned 50,000, so 170%"
    assert of["left"].startswith("0:00:09 of training, 2") and of["left"].endswith(" without a wait")


def test_the_last_attempt_that_ended_is_told(found, capsys) -> None:
    """With the hours of all: 12 devices for one hour, and for half of one."""
    attempts = [
        Attempt("7", 3, 0, 3600, "requeue", "saved. "),
        Attempt("8", 3, 3600, 5400, "failed", "no disk."),
    ]
    with_state(found, attempts=attempts)
    of = rows(capsys)
    assert (of["spent"], of["last stop"]) == ("18.0 device-hours in 2 attempts", "job 8: failed. no disk")
    with_state(found, attempts=[*attempts[:1], Attempt("8", 3, 3600)])
    assert rows(capsys)["last stop"] == "job 7: requeue. saved"


def test_jobs_are_cancelled(found, capsys) -> None:
    stopped = found.is_.folder / "chain" / "stopped"
    assert said(capsys, "cancel", "run") == "no job of this run is waiting or running\n"
    assert stopped.read_text() == "cancelled by kielo cancel\n" and found.ended == [("slurm", {}, False)]
    stopped.write_text("finished\n")
    end = f"; to continue the chain, remove {stopped}\n"
    with_state(found, jobs={"7": "PENDING", "8": "PENDING"})
    assert said(capsys, "cancel", "run") == f"cancelled 7, 8{end}"
    with_state(found, jobs={"7": "RUNNING"})
    assert said(capsys, "cancel", "run") == f"cancelled 7; the running job saves and stops{end}"
    assert said(capsys, "cancel", "run", "--now") == f"cancelled 7{end}"
    assert found.ended[-1] == ("slurm", {"7": "RUNNING"}, True) and stopped.read_text() == "finished\n"
    with_state(found, jobs=None, no_answer="squeue failed")
    assert main(["cancel", "run"]) == 1 and len(found.ended) == 4
    assert "nothing is cancelled: squeue failed. Fix: touch " in capsys.readouterr().err


def test_jobs_that_pack_tell_how_far_they_are(capsys, monkeypatch, tmp_path) -> None:
    """`status` says what to do next only if no job is left that could do it."""
    (tmp_path / "pack.sh").touch()
    state = SimpleNamespace(name="mine", site="here", ids=["7", "8"], jobs={"7": "R", "8": "Q"}, no_answer="")

    def progress(finished: int, is_joined: bool) -> None:
        content = {"finished": finished, "parts": 4321, "is_joined": is_joined}
        state.progress = SimpleNamespace(**content, _asdict=lambda: content)

    monkeypatch.setattr("kielo.cli.launched.share_status", lambda folder: state)
    progress(1234, False)
    again = f"next\tbash {tmp_path}/submit.sh makes the missing parts\n"
    assert said(capsys, "status", str(tmp_path)) == (
        "text\tof mine, on here\njobs\t7 R; 8 Q (2 submitted)\nparts\t1,234 of 4,321, not joined yet\n"
    )
    found = json.loads(said(capsys, "status", str(tmp_path), "--json"))
    assert found == {"jobs": {"7": "R", "8": "Q"}, "submitted": ["7", "8"], "finished": 1234, "parts": 4321,
                     "is_joined": False}  # fmt: skip
    state.jobs = {}
    table = said(capsys, "status", str(tmp_path))
    assert "jobs\tnone left (2 submitted)\n" in table and table.endswith(again)
    state.ids = []
    assert "next" not in said(capsys, "status", str(tmp_path))
    state.ids, state.jobs, state.no_answer = ["7"], None, "squeue failed"
    table = said(capsys, "status", str(tmp_path))
    assert "jobs\tsqueue failed (1 submitted)\n" in table
    assert "next" not in table
    state.jobs = {}
    progress(4321, True)
    table = said(capsys, "status", str(tmp_path))
    assert table.endswith("parts\t4,321 of 4,321, joined\n")


def test_a_ladder_is_tabled_and_written(capsys, monkeypatch, tmp_path) -> None:
    from kielo.artifact.launch_files import Ladder

    (tmp_path / Ladder.FILE_NAME).touch()
    ladder = SimpleNamespace(content=lambda: {"rungs": []})
    wrote = []
    monkeypatch.setattr("kielo.cli.launched.read_ladder", lambda folder: ladder)
    write = "kielo.report.ladder_page.write_ladder_report"
    monkeypatch.setattr(write, lambda folder, of: wrote.append((folder, of)) or [folder / "a", folder / "b"])
    monkeypatch.setattr("kielo.report.ladder_page.table", lambda of: (("nodes", "speed"), [(1, 2)]))
    monkeypatch.setattr("kielo.report.ladder_page.notes", lambda of: ["one", "two"])
    told = f"nodes\tspeed\n1\t2\none\ntwo\nwrote {tmp_path}/a, {tmp_path}/b\n"
    assert said(capsys, "status", str(tmp_path)) == told
    assert json.loads(said(capsys, "status", str(tmp_path), "--json")) == {"rungs": []}
    assert wrote == [(tmp_path, ladder)] * 2
