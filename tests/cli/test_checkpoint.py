"""`kielo checkpoint`: what people and scripts are told of a run's checkpoints, and the average as a model."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kielo.artifact.checkpoint_index import read_plain
from kielo.checkpoint.hugging_face_export import export
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.cli.main import main
from kielo.recipe.sections import CompleteModel
from kielo.train.run import train
from tests.train.tiny_run import resolve, write_tokens


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with checkpoints at 2, 4 and 6."""
    run = tmp_path_factory.mktemp("run")
    write_tokens(run / "tokens")
    torch.set_num_threads(1)
    train(resolve(run, total_steps=6, every_steps=2, keep_newest=3))
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(trained, tmp_path / "run", symlinks=True)


def checkpoint(run: Path, step: int) -> Path:
    return run / "train" / "checkpoints" / f"step_{step:08d}"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)


def ask(capsys: pytest.CaptureFixture, *arguments: str | Path, code: int = 0):
    assert main(["checkpoint", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_list_tells_of_each_and_verify_reads_every_byte(run, capsys):
    """A flipped bit is seen by `--verify` alone; a missing file by both; the newest whole one is marked."""
    flip_a_bit(next(checkpoint(run, 6).glob("rank_*")))
    next(checkpoint(run, 2).glob("rank_*")).unlink()
    rows = ask(capsys, "list", run)
    assert [(row["step"], row["tokens"], row["newest"]) for row in rows] == [
        (6, 768, True),
        (4, 512, False),
        (2, 256, False),
    ]
    assert rows[0]["state"] == rows[1]["state"] == "complete" and rows[2]["state"].startswith(
        "damaged: rank_00000"
    )
    assert all(
        0 < row["loss"] < 10 and row["bytes"] > 10_000 and row["written_at"] > "2026" for row in rows[:2]
    )
    verified = ask(capsys, "list", run / "train", "--verify")
    assert (
        verified[0]["state"].startswith("damaged: rank_00000.safetensors")
        and "block 0" in verified[0]["state"]
    )
    assert [row["state"] for row in verified[1:]] == ["verified", rows[2]["state"]]
    assert [row["newest"] for row in verified] == [False, True, False]
    assert main(["checkpoint", "list", str(run)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split("\t") == ["checkpoint", "step", "tokens", "loss", "size", "written", "state"]
    assert printed[1].startswith("step_00000006\t6\t768\t") and printed[1].endswith("complete, newest")


def test_on_a_terminal_they_are_tables(run, capsys, monkeypatch):
    """A pipe gets lines with tabs; a terminal, which rich takes FORCE_COLOR for,
    gets columns of the same text.
    """
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    for verb in ("list", "show"):
        assert main(["checkpoint", verb, str(run)]) == 0
        shown = capsys.readouterr().out
        assert "\t" not in shown and "step_00000006" in shown and "complete" in shown


def test_verify_ends_with_one_names_each_damage_and_changes_nothing(run, capsys):
    """All damaged files are named, not only the first;
    a run, one checkpoint and the link `newest` can be asked about.
    """
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count("\tverified") == 3
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    flip_a_bit(next(checkpoint(run, 6).glob("rank_*")))
    flip_a_bit(checkpoint(run, 6) / "index.json")
    for name in (run, checkpoint(run, 6), run / "train" / "checkpoints" / "newest"):
        first = ask(capsys, "verify", name, code=1)[0]
        assert first["checkpoint"] == str(checkpoint(run, 6))
        assert [damage.split()[0] for damage in first["damage"]] == ["index.json", "rank_00000.safetensors"]
    assert ask(capsys, "verify", checkpoint(run, 4)) == [
        {"checkpoint": str(checkpoint(run, 4)), "state": "verified", "damage": []}
    ]
    (checkpoint(run, 4) / "manifest.json").unlink()
    assert "manifest.json is missing" in ask(capsys, "verify", checkpoint(run, 4), code=1)[0]["state"]


def test_show_adds_up(run, capsys):
    """A run's newest whole checkpoint is shown; parts and dtypes sum to what the tensors hold; files as they
    are on disk.
    """
    (checkpoint(run, 6) / "manifest.json").unlink()
    shown = ask(capsys, "show", run)
    assert (shown["step"], shown["recipe"], shown["state"]) == (4, "tiny", "complete")
    assert shown["model"]["hidden_size"] == 16 and shown["samples"] == 32 and len(shown["save_id"]) == 16
    tensors = read_tensors(checkpoint(run, 4))
    for part in shown["parts"]:
        held = [tensor for name, tensor in tensors.items() if name.startswith(part["part"] + "/")]
        assert part["bytes"] == sum(tensor.nbytes for tensor in held) and part["tensors"] == len(held)
    assert {part["part"] for part in shown["parts"]} == {"model", "optimiser"}
    assert all((checkpoint(run, 4) / name).stat().st_size == size for name, size in shown["files"].items())
    listed = ask(capsys, "show", checkpoint(run, 4), "--tensors")
    assert {row["name"]: row["shape"] for row in listed} == {
        name: list(tensor.shape) for name, tensor in tensors.items()
    }
    assert main(["checkpoint", "show", str(run), "--tensors"]) == 0
    assert "model/embed.weight\tF32\t70×16\t1" in capsys.readouterr().out
    assert main(["checkpoint", "show", str(run)]) == 0
    assert "llama, 2 layers, hidden 16" in capsys.readouterr().out


def test_an_average_is_exported_like_any_checkpoint(run, capsys):
    """The mean's weights come out in transformers as `read_tensors` gives them;
    the run does not go on from it.
    """
    from transformers import AutoModelForCausalLM

    to = run / "train" / "averages" / "last"
    assert (
        main(["checkpoint", "average", *(str(checkpoint(run, step)) for step in (4, 6)), "--to", str(to)])
        == 0
    )
    assert "mean of 2 checkpoints" in capsys.readouterr().out
    assert ask(capsys, "verify", to)[0]["state"] == "verified"
    shown = ask(capsys, "show", to)
    assert [source["step"] for source in shown["averaged_from"]] == [4, 6]
    assert {part["part"] for part in shown["parts"]} == {"model"}
    assert [row["step"] for row in ask(capsys, "list", run)] == [6, 4, 2]
    hf = export(to, run / "hf", CompleteModel.model_validate(read_plain(to)["identity"]["model"]), None)
    embedding = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).get_input_embeddings().weight
    both = [read_tensors(checkpoint(run, step))["model/embed.weight"] for step in (4, 6)]
    mean = (sum(both) / 2)[: len(embedding)]  # the vocabulary's padding stays behind
    torch.testing.assert_close(embedding.detach(), mean, rtol=1e-6, atol=1e-9)


def test_what_is_no_checkpoint_is_refused(tmp_path, capsys):
    """Every verb names the path and the fix, ends with 1, and makes nothing."""
    for verb, more in (
        ("list", []),
        ("show", []),
        ("verify", []),
        ("average", ["--to", str(tmp_path / "to")]),
    ):
        assert main(["checkpoint", verb, str(tmp_path), *more]) == 1
        message = capsys.readouterr().err
        assert str(tmp_path) in message and ("runs/demo_estonian" in message or "checkpoint list" in message)
    assert list(tmp_path.iterdir()) == []


def test_looking_needs_no_torch_and_help_has_examples(run, capsys):
    """list, show and verify work where torch is not installed, on a login node."""
    script = (
        "import sys; sys.modules.update(torch=None, transformers=None)\n"
        "from kielo.cli.main import main\n"
        f"sys.exit(any(main(['checkpoint', verb, {str(run)!r}]) for verb in ('list', 'show', 'verify')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for word in ("list", "show", "verify", "average"):
        assert main(["checkpoint", word, "--help"]) == 0
        assert f"kielo checkpoint {word} " in capsys.readouterr().out.partition("example: ")[2]
