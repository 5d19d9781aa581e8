"""`kielo run` of several languages around processes that only end: which are begun, and what is told."""

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.artifact.manifest import write_stage
from kielo.cli.main import main
from tests.cli.test_run_languages import write_several

# In place of Python: notes its words, says two lines, and does what is planned for its language.
PROCESS = """#!/bin/bash
cd "{folder}"
echo "$@" >> words
for word in "$@"; do case $word in language=*) code=${{word#*=}};; esac; done
echo "on stdout"
echo "kielo: first of $code" >&2
printf "kielo: last of $code\\nbye" >&2
. ./$code
"""


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The recipe of Finnish and Estonian; `ends(fi, et)` plans how their processes end."""
    process = tmp_path / "process"
    process.write_text(PROCESS.format(folder=tmp_path), encoding="utf-8")
    process.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(process))

    def ends(fi: str, et: str) -> None:
        (tmp_path / "fi").write_text(fi)
        (tmp_path / "et").write_text(et)
        (tmp_path / "words").unlink(missing_ok=True)

    return SimpleNamespace(
        recipe=write_several(tmp_path), ends=ends, words=tmp_path / "words", folder=tmp_path
    )


def run(several: SimpleNamespace, *words: str) -> int:
    return main(["run", str(several.recipe), *words])


def test_each_language_has_a_process_with_the_same_flags(several, capfd) -> None:
    several.ends("exit 0", "exit 0")
    words = ["--set", "seed=3", "--from", "corpus", "--to", "pack", "--again", "pack", "--ranks", "2"]
    assert run(several, *words) == 0
    shared = "--from corpus --to pack --again pack --ranks 2"
    assert several.words.read_text().splitlines() == [
        f"-P -m kielo run {several.recipe} --set seed=3 --set language={code} {shared}"
        for code in ("fi", "et")
    ]
    said = capfd.readouterr()
    assert said.out == (
        "════ fi (1 of 2)\non stdout\n════ et (2 of 2)\non stdout\nlanguage\trun\ttext kept\tscore\ttime\n"
        "fi\tdone\t–\t–\t–\net\tdone\t–\t–\t–\n"
    )
    assert said.err.splitlines()[:2] == ["kielo: first of fi", "kielo: last of fi"]
    several.ends("exit 0", "exit 0")
    assert run(several, "--only", "pack", "--share", "1/2") == 0
    assert several.words.read_text().splitlines()[1].endswith("--only pack --share 1/2 --ranks 1")


@pytest.mark.parametrize(("fi", "et", "code", "states"), [
    ("exit 1", "exit 0", 1, ["failed", "done"]),
    ("exit 0", "exit 3", 1, ["done", "failed"]),
    ("exit 75", "exit 0", 75, ["stopped", "not begun"]),
    ("exit 0", "exit 75", 75, ["done", "stopped"]),
    ("exit 1", "exit 75", 75, ["failed", "stopped"]),
    ("exit 130", "exit 0", 130, ["stopped", "not begun"]),
    ("kill -9 $$", "exit 0", 1, ["failed", "done"]),
])  # fmt: skip
def test_a_failure_does_not_keep_others_from_being_made_and_a_stop_does(
    fi, et, code, states, several, capfd
) -> None:
    several.ends(fi, et)
    assert run(several) == code
    out = capfd.readouterr().out
    assert [line.split("\t")[1] for line in out.splitlines() if line.count("\t") == 4][1:] == states
    told = [line for line in out.splitlines() if line.startswith(("fi: ", "et: "))]
    ended = dict(zip(("fi", "et"), states))
    assert told == [f"{one}: last of {one}" for one, state in ended.items() if state in ("failed", "stopped")]
    assert out.endswith("\nThe same command makes the missing runs.\n")
    assert len(several.words.read_text().splitlines()) == 2 - states.count("not begun")


def test_the_scores_of_a_run_that_failed_are_not_shown(several, capfd, monkeypatch) -> None:
    """They are those of an earlier one."""
    monkeypatch.setattr("kielo.cli.run_languages.read_json", lambda folder, kind: folder.name)
    monkeypatch.setattr("kielo.cli.run_languages.language_row", lambda of: (of, "", ""))
    several.ends("exit 1", "exit 0")
    assert run(several) == 1
    assert "\nfi\tfailed\t\t\t\net\tdone\trun_et\t\t\n" in capfd.readouterr().out


def test_json_alone_is_on_stdout(several, capfd, monkeypatch) -> None:
    """A summary only of a run that ended well: that of an earlier one says nothing of this."""
    summary = SimpleNamespace(content=lambda: {"of": "a run"})
    monkeypatch.setattr("kielo.cli.run_languages.read_json", lambda folder, kind: summary)
    several.ends("exit 1", "exit 0")
    assert run(several, "--json") == 1
    said = capfd.readouterr()
    assert json.loads(said.out)["languages"] == {
        "fi": {"state": "failed", "exit_code": 1, "said": "last of fi", "folder": f"{several.folder}/run_fi",
               "summary": None},
        "et": {"state": "done", "exit_code": 0, "said": None, "folder": f"{several.folder}/run_et",
               "summary": {"of": "a run"}},
    }  # fmt: skip
    assert said.err.count("on stdout") == 2 and "════ et (2 of 2)\n" in said.err


@pytest.mark.parametrize("end", ["exit 75", "exit 0"])
def test_a_signal_goes_to_the_process_at_work(end, several, capfd) -> None:
    """None is begun after it, however that one ends; handlers are as they were."""
    before = signal.getsignal(signal.SIGTERM)
    several.ends(f"trap '{end}' TERM; kill -TERM $PPID; for i in {{1..200}}; do sleep 0.05; done", "exit 0")
    assert run(several) == 75
    assert "\net\tnot begun\t" in capfd.readouterr().out and signal.getsignal(signal.SIGTERM) is before


def test_the_table_at_any_time(several, capsys, monkeypatch) -> None:
    """A run is done if it was exported and summed up; else its last stage, or the steps of a training."""
    rows: dict[str, Any] = {}
    monkeypatch.setattr("kielo.cli.run_languages.read_json", lambda folder, _: rows.get(folder.name))
    monkeypatch.setattr("kielo.cli.run_languages.language_row", lambda of: of or ("", "", ""))

    def state() -> str:
        assert main(["status", str(several.recipe)]) == 0
        table = capsys.readouterr().out.splitlines()
        assert table[0] == "language\trun\ttext kept\tscore\ttime" and table[1].startswith("fi\tnot begun\t")
        return table[2]

    def make(folder: str) -> None:
        with write_stage(several.folder / "run_et" / folder, folder, 1, {}, {}):
            pass

    rows["run_et"] = ("1 MB", "0.5", "1 s")
    make("corpus")
    assert state() == "et\tcorpus done\t1 MB\t0.5\t1 s"
    make("hf")
    assert state() == "et\tdone\t1 MB\t0.5\t1 s"
    del rows["run_et"]
    assert state() == "et\texport done\t\t\t"
    assert main(["status", str(several.recipe), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["languages"]
    assert found["et"] == {
        "state": "export done",
        "folder": f"{several.folder}/run_et",
        "summary": None,
        "jobs": None,
    }
