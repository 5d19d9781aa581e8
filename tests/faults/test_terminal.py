"""Output that fails, odd files beside a run, and unexpected errors: the work continues, or the reason is
reported.
"""

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kielo.artifact.metrics import read_metrics
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.cli import show as show_verb
from kielo.cli.main import main
from kielo.train.start_ranks import read_outcome
from tests.alerts import alerts
from tests.faults.trial import belongings, refused, rest_marked_full, start, went_well

LAST = "step_00000020"


def weights(run: Path, step: str = LAST) -> dict[str, torch.Tensor]:
    return read_tensors(run / "train" / "checkpoints" / step)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- Output
# -----------------------------------------------------------------------------------------------------------

VERBS = {
    "show": ["show", "tiny.toml"],
    "show as JSON": ["show", "tiny.toml", "--json"],
    "recipes": ["recipes"],
    "languages": ["languages"],
    "languages as JSON": ["languages", "--json"],
    "clusters": ["clusters"],
    "schema": ["schema"],
    "plan": ["plan", "tiny.toml", "--nodes", "1", "--cluster", "lumi_g", "--set", 'train.precision="bf16"'],
    "checkpoint list": ["checkpoint", "list", "run"],
    "checkpoint show": ["checkpoint", "show", "run", "--tensors"],
    "data": ["data", "tiny.toml", "--step", "3"],
    "tokenizer measure": ["tokenizer", "measure", "run/tokenizer", "--text", "text.txt"],
    "help": ["--help"],
    "help of a verb": ["run", "--help"],
    "no verb": [],
    "version": ["--version"],
    "a report again": ["run", "tiny.toml", "--only", "report"],
}  # fmt: skip


def with_output(stream: io.TextIOWrapper, monkeypatch, workplace: Path, arguments: list[str]) -> int:
    """The verb in this process with `stream` as its stdout; its exit code."""
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(sys, "stdout", stream)
    return main(arguments)


@pytest.fixture
def full(monkeypatch):
    with open("/dev/full", "w", encoding="utf-8") as stream:
        yield stream


@pytest.fixture
def left_pipe():
    """A pipe whose reader has gone, as after `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as stream:
        yield stream


@pytest.mark.parametrize("verb", VERBS)
def test_a_terminal_without_unicode_gets_escapes(verb, finished, monkeypatch, capfd):
    """`PYTHONIOENCODING=ascii`: no verb fails of a letter, and JSON stays JSON."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert with_output(stream, monkeypatch, finished, VERBS[verb]) == (2 if verb == "no verb" else 0), (
        capfd.readouterr().err
    )
    told = stream.buffer.getvalue().decode("ascii")
    assert told and "Traceback" not in told
    if "JSON" in verb:
        json.loads(told)


@pytest.mark.parametrize("verb", VERBS)
def test_a_full_output_is_said(verb, finished, monkeypatch, capfd, full):
    """Exit code 1 and a sentence on stderr, for the answer is lost; a run's exit code is that of its work."""
    code = with_output(full, monkeypatch, finished, VERBS[verb])
    assert code == (0 if "again" in verb else 2 if verb == "no verb" else 1)
    assert "No space left on device" in capfd.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_a_reader_that_has_left_is_no_error(verb, finished, monkeypatch, capfd, left_pipe):
    """`kielo … | head`: quiet."""
    assert with_output(left_pipe, monkeypatch, finished, VERBS[verb]) == (2 if verb == "no verb" else 0)
    assert not capfd.readouterr().err


@pytest.mark.parametrize("closed", rest_marked_full([">&-", "2>&-", "<&-", ">&- 2>&- <&-"], [">&- 2>&- <&-"]))
def test_closed_streams_lead_nowhere(closed, packed):
    """No file of the run takes their number, which libraries print to."""
    command = f'exec "{sys.executable}" -m kielo train tiny.toml {closed}'
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    assert subprocess.run(["sh", "-c", command], cwd=packed, env=environment, timeout=120).returncode == 0
    assert weights(packed / "run")


@pytest.mark.parametrize("kind", ["full", "left_pipe"])
def test_training_goes_on_without_its_terminal(kind, packed, _trained, monkeypatch, request):
    """The run ends with bitwise the weights of an undisturbed one, and one alert."""
    stream = request.getfixturevalue(kind)
    assert with_output(stream, monkeypatch, packed, ["train", "tiny.toml"]) == 0
    assert same(weights(packed / "run"), weights(_trained / "run"))
    (alert,) = alerts(packed / "run" / "train")
    assert "the terminal takes no more output" in alert["message"]


@pytest.mark.parametrize("step", rest_marked_full([0, 5], [5]))
def test_a_reader_that_leaves_in_the_middle(step, packed):
    """`kielo train | head -N`: the run goes on to its end."""
    process = start(packed, "train", "tiny.toml", "--set", "train.log_every_steps=1")
    lines = [process.stdout.readline() for _ in range(step)]
    process.stdout.close()
    assert process.wait(timeout=120) == 0, process.stderr.read()
    assert len(lines) == step and weights(packed / "run")
    assert len(read_metrics(packed / "run" / "train" / "metrics.jsonl")) >= 20
    process.stderr.close()


@pytest.mark.parametrize("kind", rest_marked_full(["full", "left_pipe"], ["left_pipe"]))
def test_two_ranks_go_on_without_their_terminal(kind, packed, request):
    """stdout and stderr of the parent and of both ranks."""
    stream = request.getfixturevalue(kind)
    command = [sys.executable, "-m", "kielo", "train", "tiny.toml", "--ranks", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    assert (
        subprocess.run(
            command, cwd=packed, env=environment, stdout=stream, stderr=stream, timeout=120
        ).returncode
        == 0
    )
    assert weights(packed / "run") and len(alerts(packed / "run" / "train")) == 1


def test_a_run_whose_first_line_nobody_reads_still_trains(packed, monkeypatch, left_pipe):
    """`kielo run | head -0`: what is printed between the stages ends nothing either."""
    assert with_output(left_pipe, monkeypatch, packed, ["run", "tiny.toml", "--to", "train"]) == 0
    assert weights(packed / "run")


def test_a_bar_on_a_terminal_that_was_closed(packed, monkeypatch):
    """A pseudo-terminal whose other end is gone fails with EIO; the bar is drawn by a thread as well."""
    master, slave = os.openpty()
    with open(slave, "w", encoding="utf-8") as stream:
        assert stream.isatty()
        os.close(master)
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
        assert with_output(stream, monkeypatch, packed, ["train", "tiny.toml"]) == 0
    assert weights(packed / "run") and len(alerts(packed / "run" / "train")) == 1


def test_alerts_that_cannot_be_written_end_nothing(packed, monkeypatch, full):
    """A folder stands where alerts.jsonl should be."""
    (packed / "run" / "train" / "alerts.jsonl").mkdir(parents=True)
    assert with_output(full, monkeypatch, packed, ["train", "tiny.toml"]) == 0


# --- Odd files beside a run
# -------------------------------------------------------------------------------------------

ODD_ROWS = {
    "bytes": b"\xff\xfe\x00garbage",
    "a number": b"17",
    "a text": b'"a note of mine"',
    "a list": b"[1, 2, 3]",
    "nothing": b"null",
    "a note": "# siin läks õppimismäär üles".encode(),
    "no step": b'{"loss": 2.5}',
    "a step in words": b'{"step": "three", "loss": 2.5}',
    "a step that is true": b'{"step": true, "loss": 2.5}',
    "a loss in words": b'{"step": 3, "loss": "low", "tokens_per_second": 1, "seconds": 1, "skipped": 0}',
    "a loss alone": b'{"step": 3, "loss": 2.5}',
    "held-out loss in words": b'{"step": 3, "heldout_loss": {}}',
    "a precision that is a number": b'{"step": 3, "precision": 16}',
    "nested without end": b"[" * 100_000,
    "zeros": b"\x00" * 64,
    "UTF-16": '{"step": 3}'.encode("utf-16"),
}


def cut_back(workplace: Path) -> Path:
    """The trained run without its last checkpoint: it goes on from step 15."""
    folder = workplace / "run" / "train"
    shutil.rmtree(folder / "checkpoints" / LAST)
    (folder / "manifest.json").unlink()
    return folder / "metrics.jsonl"


# What is no text, no JSON, no object, no row, and a row of other values; the rest is read by the same lines.
ODD_ROWS_KEPT = ("bytes", "a note", "a number", "no step", "a loss in words", "nested without end")


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        *(
            pytest.param(kind, "in the middle", marks=[] if kind in ODD_ROWS_KEPT else [pytest.mark.full])
            for kind in ODD_ROWS
        ),
        ("bytes", "at the end"),
        pytest.param("a note", "at the end", marks=pytest.mark.full),
    ],
)
def test_odd_rows_do_not_block_a_run_and_are_kept(kind, place, trained, here, caplog):
    """The run goes on to bitwise the same weights, the lines are moved aside with a warning,
    and our rows are as before.
    """
    good, before = weights(trained / "run"), read_metrics(trained / "run" / "train" / "metrics.jsonl")
    metrics = cut_back(trained)
    lines = metrics.read_bytes().splitlines()
    lines.insert(3 if place == "in the middle" else len(lines), ODD_ROWS[kind])
    metrics.write_bytes(b"\n".join(lines) + b"\n")
    went_well(here(trained, "train", "tiny.toml"))
    assert same(weights(trained / "run"), good)
    assert metrics.with_name("metrics.jsonl.odd").read_bytes() == ODD_ROWS[kind] + b"\n"
    number = 4 if place == "in the middle" else len(lines)
    assert f"1 line is no row of a run (number {number}). Moved to metrics.jsonl.odd" in caplog.text
    now = read_metrics(metrics)
    assert [(row.step, getattr(row, "loss", None)) for row in now] == [
        (row.step, getattr(row, "loss", None)) for row in before
    ]


@pytest.mark.parametrize("half", ['{"step": 17, "lo', '{"st', "{"])
def test_a_row_that_was_cut_is_dropped_quietly(half, trained, here):
    """The half row that a killed attempt leaves is ours; nothing is moved aside."""
    metrics = cut_back(trained)
    metrics.write_text(metrics.read_text(encoding="utf-8") + half, encoding="utf-8")
    went_well(here(trained, "train", "tiny.toml"))
    assert not metrics.with_name("metrics.jsonl.odd").exists()


def test_a_folder_in_place_of_the_metrics_is_named(trained, here):
    metrics = cut_back(trained)
    metrics.unlink()
    metrics.mkdir()
    refused(here(trained, "train", "tiny.toml"), "a folder is where a file is needed", "metrics.jsonl")


ODD_JSON = {
    "not JSON": "{ half",
    "bytes": b"\xff\xfe\x00",
    "a list": "[]",
    "a number": "7",
    "empty": "",
    "other keys": '{"a": 1}',
}
STAGE_FILES = ["corpus/funnel.json", "tokenizer/measure.json", "verify/parity.json", "evaluate/scores.json"]


@pytest.mark.parametrize("name", STAGE_FILES)
@pytest.mark.parametrize("content", ODD_JSON)
def test_a_report_names_a_file_that_is_not_as_it_was_written(name, content, finished, here):
    """The report of before stays."""
    path, text = finished / "run" / name, ODD_JSON[content]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    page = (finished / "run" / "report.html").read_bytes()
    refused(here(finished, "run", "tiny.toml", "--only", "report"), "not as Kielo writes it", path.name)
    assert (finished / "run" / "report.html").read_bytes() == page


@pytest.mark.parametrize("stage", ["corpus", "tokenizer", "train", "verify", "evaluate", "hf"])
def test_a_report_of_a_manifest_with_other_counts(stage, finished, here):
    """`counts` that are a list: refused by the file's name and the key, not a traceback."""
    path = finished / "run" / stage / "manifest.json"
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"counts": [1]}), encoding="utf-8"
    )
    outcome = here(finished, "run", "tiny.toml", "--only", "report")
    told = "not a readable manifest of Kielo's (counts: Input should be an object)"
    refused(outcome, told, f"run/{stage}/manifest.json")
    assert "Traceback" not in outcome.told


def test_a_summary_that_somebody_broke_is_written_anew(finished, here):
    """Once it was moved away: it may be a person's."""
    (finished / "run" / "summary.json").write_text("[", encoding="utf-8")
    refused(
        here(finished, "run", "tiny.toml", "--only", "report"),
        "exists, and Kielo did not write it",
        "summary.json",
        "move it away",
    )
    (finished / "run" / "summary.json").rename(finished / "mine.json")
    went_well(here(finished, "run", "tiny.toml", "--only", "report"))
    assert json.loads((finished / "run" / "summary.json").read_text(encoding="utf-8"))["bits_per_byte"]


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"", b"identity = 3", b"[identity", b"[identity]\nname = 1"]
)
def test_an_odd_resolved_run_is_named_and_training_writes_it_again(content, trained, here):
    """`verify parity` reads it, `train` does not.
    It may be a person's, and is written once that was moved away.
    """
    path = trained / "run" / "resolved.toml"
    path.write_bytes(content)
    is_toml = content in (b"", b"identity = 3", b"[identity]\nname = 1")
    told = "is of format version 0" if is_toml else "not valid TOML"
    refused(here(trained, "verify", "parity", "tiny.toml"), told, "resolved.toml")
    refused(
        here(trained, "train", "tiny.toml"),
        "exists, and Kielo did not write it",
        "resolved.toml",
        "move it away",
    )
    path.rename(trained / "mine.toml")
    went_well(here(trained, "train", "tiny.toml"))
    assert b"learning_rates" in path.read_bytes()


MODELS = {
    "pickle that is none": {"config.json": '{"model_type": "gpt2"}', "pytorch_model.bin": "garbage"},
    "an empty pickle": {"config.json": '{"model_type": "gpt2"}', "pytorch_model.bin": ""},
    "garbled safetensors": {"config.json": '{"model_type": "gpt2"}', "model.safetensors": "garbage" * 9},
    "empty safetensors": {"config.json": '{"model_type": "gpt2"}', "model.safetensors": ""},
    "no weights": {"config.json": '{"model_type": "gpt2"}'},
    "a kind nobody knows": {"config.json": '{"model_type": "abacus"}', "model.safetensors": ""},
    "a configuration that is none": {"config.json": "{", "model.safetensors": ""},
    "a configuration that is a list": {"config.json": "[]", "model.safetensors": ""},
    "an index of nothing": {"config.json": '{"model_type": "gpt2"}', "model.safetensors.index.json": "[]"},
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_cannot_be_read_is_named(kind, finished, here):
    """`kielo evaluate FOLDER RECIPE`; FOLDER stays as it is."""
    bad = finished / "bad_model"
    shutil.copytree(finished / "run" / "tokenizer", bad)
    for name, text in MODELS[kind].items():
        (bad / name).write_text(text, encoding="utf-8")
    before = belongings(bad)
    refused(
        here(finished, "evaluate", "bad_model", "tiny.toml"),
        "not a causal language model that transformers can load",
        "bad_model",
    )
    assert belongings(bad) == before


@pytest.mark.parametrize("step", ["0", "-1", "21", "99999999999999999999"])
def test_a_step_that_the_run_does_not_have(step, packed, here):
    refused(here(packed, "data", "tiny.toml", f"--step={step}"), "the run has steps 1 to 20", step)


def test_the_documents_of_a_step_before_there_are_any(workplace, here):
    refused(here(workplace, "data", "tiny.toml", "--step", "1"), "the pack stage is not finished", "run")


OUTCOMES = {
    "not JSON": "half of it {", "a list": "[1]", "a number": "3",
    "no code": '{"outcome": "finished", "message": ""}',
    "a code in words": '{"exit_code": "none", "message": ""}', "no message": '{"exit_code": 0}',
    "nothing": "",
}  # fmt: skip


@pytest.mark.parametrize("content", OUTCOMES)
def test_an_odd_outcome_is_a_failure_that_names_it(content, tmp_path):
    """An outcome that the ranks left and that cannot be read is no success."""
    file = tmp_path / "outcome.json"
    file.write_text(OUTCOMES[content], encoding="utf-8")
    outcome = read_outcome(tmp_path, None, "rank 1 ended with SIGKILL", is_stopping=False)
    assert outcome.exit_code == 1 and "rank 1" in outcome.message and str(file) in outcome.message


# --- Errors
# -----------------------------------------------------------------------------------------------------------


class OutOfMemoryError(RuntimeError):
    """Named as torch's is."""


class DistBackendError(RuntimeError):
    """Named as torch's is."""


EXPECTED = {
    "a full disk": (OSError(errno.ENOSPC, "No space left on device", "run/tokens.bin"),
        ["No space left on device; free some space", "run/tokens.bin"]),
    "a write to a full disk":
        (OSError(errno.ENOSPC, "No space left on device"),
        ["No space left on device; free some space", "a file or device"]),
    "a quota": (OSError(errno.EDQUOT, "Disk quota exceeded", "a"), ["your quota is used up", "a: "]),
    "a file size limit": (OSError(errno.EFBIG, "File too large", "a.bin"),
        ["files cannot be that large here", "a.bin", "ulimit -f"]),
    "no permission":
        (PermissionError(errno.EACCES, "Permission denied", "run"),
        ["Permission denied; check the permissions", "run"]),
    "a disk that can only be read": (OSError(errno.EROFS, "Read-only file system", "run"),
        ["the disk is read-only", "run", "folder"]),
    "a folder that vanished":
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a", None, "b"),
        ["was it moved or removed?", "a → b"]),
    "a file that is a folder": (IsADirectoryError(errno.EISDIR, "Is a directory", "x.json"),
        ["a folder is where a file is needed", "x.json"]),
    "a folder that is a file": (NotADirectoryError(errno.ENOTDIR, "Not a directory", "run/x"),
        ["a file is where a folder is needed", "run/x"]),
    "links in a ring": (OSError(errno.ELOOP, "Too many levels of symbolic links", "x"),
        ["a link there leads to itself", "x: "]),
    "too many files": (OSError(errno.EMFILE, "Too many open files", "x"),
        ["too many files are open: raise", "ulimit -n"]),
    "a stale handle": (OSError(errno.ESTALE, "Stale file handle", "x"),
        ["the file system lost the file", "x: ", "try again"]),
    "a failing disk": (OSError(errno.EIO, "Input/output error", "x"),
        ["the disk or its network failed", "x: ", "dmesg"]),
    "an error without advice": (OSError(errno.ETXTBSY, "Text file busy", "x"), ["x: Text file busy"]),
    "memory": (MemoryError(), ["out of memory (of the CPU)"]),
    "memory of a processor": (
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"
        ),
        ["out of memory", "you tried"],
    ),
    "memory of a GPU": (OutOfMemoryError("CUDA out of memory. Tried 2 GiB"), ["out of memory", "2 GiB"]),
    "depth": (RecursionError("maximum recursion depth exceeded"), ["a file is nested too deeply"]),
    "bytes": (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        ["a file has wrong content", "invalid start byte"]),
    "JSON": (json.JSONDecodeError("Expecting value", "x", 0),
        ["a file has wrong content", "Expecting value"]),
    "lost ranks": (DistBackendError("connection reset"), ["the ranks lost each other", "connection reset"]),
    "a package": (ModuleNotFoundError("no torch", name="torch.nn"), ["this verb needs torch", "pip install"]),
}  # fmt: skip


def planted(error: BaseException, monkeypatch) -> None:
    def show(options):
        raise error

    monkeypatch.setattr(show_verb, "show", show)


@pytest.mark.parametrize("kind", EXPECTED)
def test_an_error_of_an_expected_kind_is_a_sentence(kind, workplace, here, monkeypatch):
    """One place for all verbs; nothing is written."""
    error, (reason, *named) = EXPECTED[kind]
    planted(error, monkeypatch)
    before = belongings(workplace)
    refused(here(workplace, "show", "tiny.toml"), reason, *named)
    assert belongings(workplace) == before


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError("division by zero"), KeyError("step"), AssertionError(), ValueError("õ\udc80")],
)
def test_an_unexpected_error_leaves_its_traceback_in_a_file(error, workplace, here, monkeypatch):
    """The file is in the current folder; the message names it and says what to do with it."""
    planted(error, monkeypatch)
    message = refused(
        here(workplace, "show", "tiny.toml"), "a bug of Kielo", type(error).__name__, "report it"
    )
    (log,) = workplace.glob("kielo-error-*.log")
    assert log.name in message
    text = log.read_text(encoding="utf-8")
    assert "Traceback (most recent call last)" in text and "tiny.toml" in text or "show" in text


def test_where_nothing_can_be_written_the_temporary_folder_is_used(workplace, here, monkeypatch, tmp_path):
    planted(ZeroDivisionError("x"), monkeypatch)
    monkeypatch.setattr(Path, "cwd", lambda: Path("/proc"))
    monkeypatch.setattr("kielo.cli.main.gettempdir", lambda: str(tmp_path))
    assert str(tmp_path) in refused(
        here(workplace, "show", "tiny.toml"),
        "a bug of Kielo (ZeroDivisionError: x). Fix: report it with the traceback in",
    )
    assert len(list(tmp_path.glob("kielo-error-*.log"))) == 1


def test_a_folder_that_is_gone_is_no_second_error(workplace, here, monkeypatch):
    """The error is reported from a current folder that was removed, and no temporary one can be written."""
    planted(ZeroDivisionError("x"), monkeypatch)
    monkeypatch.setattr(Path, "cwd", lambda: Path("/proc"))
    monkeypatch.setattr("kielo.cli.main.gettempdir", lambda: "/proc")
    refused(here(workplace, "show", "tiny.toml"), "no file for the traceback", "KIELO_TRACEBACK=1")


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), OSError(errno.ENOSPC, "full", "x")])
def test_a_switch_shows_the_traceback(error, workplace, here, monkeypatch):
    planted(error, monkeypatch)
    monkeypatch.setenv("KIELO_TRACEBACK", "1")
    outcome = here(workplace, "show", "tiny.toml")
    assert (
        outcome.code == 1 and "Traceback (most recent call last)" in outcome.err and "kielo: " in outcome.err
    )


def test_a_rank_says_which_it_is(workplace, here, monkeypatch):
    planted(DistBackendError("reset"), monkeypatch)
    monkeypatch.setenv("RANK", "3")
    refused(here(workplace, "show", "tiny.toml"), "the ranks lost each other")


def test_an_interrupt_between_stages_is_130(workplace, here, monkeypatch):
    """Data stages keep what was finished."""
    planted(KeyboardInterrupt(), monkeypatch)
    outcome = here(workplace, "show", "tiny.toml")
    assert outcome.code == 130 and "the same command" in outcome.err
