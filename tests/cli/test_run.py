"""A newcomer's whole path on a text of forty lines:
every verb that touches a run, through the real entry point.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kielo.artifact.checkpoint_inspection import newest_checkpoint
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.cli.main import STAGES, main
from kielo.evaluate.contender import load_checkpoint
from kielo.evaluate.generate import generate
from kielo.resolve.resolved import read
from tests.corpus.texts import ENGLISH, estonian_document

RECIPE = """
name = "tiny"
language = "et"
folder = "{folder}"

[corpus]
sources = "{text}"
workers = 1

[tokenizer]
vocab_size = 320

[dataset]
sequence_length = 16
heldout_share = 0.2
max_epochs = 1000

[model]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2
tie_word_embeddings = true

[train]
tokens = 2560
tokens_per_step = 128
precision = "fp32"
heldout_every_steps = 10
tensorboard = false

[verify]
parity_steps = 2
parity_sequence_length = 16

[evaluate]
sample_tokens = 4
"""


def write_recipe(folder: Path, name: str = "tiny") -> Path:
    """A recipe, and its text, in a folder whose name has a space."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    lines = [estonian_document(number).replace("\n", " ") for number in range(40)] + ENGLISH
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    path = folder / f"{name}.toml"
    path.write_text(RECIPE.format(folder=folder / "run", text=text), encoding="utf-8")
    return path


def kielo(*arguments: str | Path, is_online: bool = False) -> subprocess.Popen:
    """Start `kielo` as people do, in a process of its own. is_online: names of servers are looked up."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if is_online:
        environment.pop("RES_OPTIONS", None)  # tests/conftest.py turns lookups off
    return subprocess.Popen(
        [sys.executable, "-m", "kielo", *map(str, arguments)],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_run_goes_through_every_stage_and_sums_up(finished):
    """`--json` prints summary.json and nothing else; it has every key that a machine was promised."""
    recipe, summary = finished
    folder = recipe.parent / "run"
    assert summary == json.loads((folder / "summary.json").read_text())
    assert list(summary["stages"]) == list(STAGES)
    assert not any(stage["skipped"] for stage in summary["stages"].values())
    assert {"bytes_in", "bytes_kept", "documents_in", "documents_kept"} <= set(summary["corpus"])
    assert set(summary["bits_per_byte"]) == {"model", "unigram", "xz", "ngram"}
    assert summary["parity"]["passed"] and summary["parity"]["steps"] == 2
    assert summary["tokens_per_second"] > 0 and summary["kielo_version"]
    assert Path(summary["export"]).is_dir() and (folder / "report.html").stat().st_size > 10_000


def test_a_second_run_skips_what_did_not_change(finished, capsys):
    """Every stage but the report says that there is nothing to do, and the seconds of the first run stay."""
    recipe, first = finished
    assert main(["run", str(recipe)]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = lines[: lines.index("── report")]
    assert len(told) == len(STAGES) - 1 and max(map(len, told)) <= 80  # one line a stage
    assert all(f"── {name}: nothing to do" in line for name, line in zip(STAGES, told))
    summary = json.loads((recipe.parent / "run" / "summary.json").read_text())
    assert [name for name, stage in summary["stages"].items() if not stage["skipped"]] == ["report"]
    assert summary["bits_per_byte"] == first["bits_per_byte"]


def test_a_rerun_with_nothing_to_do_loads_no_torch(finished):
    """Every stage looks whether it is current before it imports what only its work needs.

    So a rerun costs a second of the processor, and not the five of importing torch and transformers.
    """
    script = (
        "import sys\nfrom kielo.cli.main import main\n"
        "assert main(['run', sys.argv[1]]) == 0\n"
        "print('loaded:', *[name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, finished[0]], capture_output=True, text=True, timeout=120
    )
    lines = process.stdout.splitlines()
    assert process.stdout.count("nothing to do") == len(STAGES) - 1, process.stderr
    assert lines[-1] == "loaded:"


def test_the_plan_of_a_run_that_has_trained_is_only_printed(finished, capsys):
    """Its resolved.toml says how it trained; before any training it is written for other ranks."""
    recipe = finished[0]
    path = recipe.parent / "run" / "resolved.toml"
    before = path.read_bytes()
    assert main(["plan", "resolve", str(recipe), "--ranks", "2"]) == 0
    assert "stays as it is: the run has trained" in capsys.readouterr().out
    assert path.read_bytes() == before
    train, aside = path.parent / "train", path.parent / "train_aside"
    train.rename(aside)
    try:
        assert main(["plan", "resolve", str(recipe), "--ranks", "2"]) == 0
        assert "wrote " in capsys.readouterr().out and path.read_bytes() != before
    finally:
        path.write_bytes(before)
        shutil.rmtree(train, ignore_errors=True)
        aside.rename(train)


def test_a_dry_run_says_what_would_happen_and_writes_nothing(finished, capsys):
    """The first batch is read, on any number of ranks; bytes of a rank are counted; no file changes."""
    recipe = finished[0]

    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in sorted((recipe.parent / "run").rglob("*"))}

    before = files()
    assert main(["train", str(recipe), "--dry-run", "--ranks", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["steps"], found["goes_on_after_step"]) == (2, 20, 20)
    assert found["first_batch"]["sequences"] == 4 and 0 < found["first_batch"]["counted_tokens"] <= 64
    assert found["first_batch"]["largest_token"] < found["first_batch"]["vocabulary"]
    assert found["peak_bytes"] > 4 * finished[1]["parameters"] * 4 and found["precision"] == "fp32"
    assert main(["train", str(recipe), "--dry-run"]) == 0
    assert "nothing was trained or written" in capsys.readouterr().out
    assert files() == before


def test_the_export_is_the_same_model_in_transformers(finished):
    """Logits of the exported folder within 1e-4 of Kielo's in fp32 (the same sums in another order),
    and it generates.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = finished[0].parent / "run"
    checkpoint = max((run / "train" / "checkpoints").glob("step_*"))
    ours = load_checkpoint(checkpoint, read(run / "resolved.toml"), run / "tokenizer")
    theirs = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    inputs = tokenizer("Õpetaja selgitas", return_tensors="pt")
    with torch.no_grad():
        difference = ours.logits(inputs["input_ids"], None) - theirs(inputs["input_ids"]).logits
    assert difference.abs().max() <= 1e-4
    assert (
        theirs.generate(**inputs, max_new_tokens=5, do_sample=False).shape[1] > inputs["input_ids"].shape[1]
    )


def test_the_folder_of_a_run_names_it(finished, capsys, tmp_path):
    """Its recipe.toml has the flags too; the folder may have moved; a copy that a person changed stays."""
    recipe, _ = finished
    moved = tmp_path / "elsewhere"
    shutil.copytree(recipe.parent / "run", moved)
    assert main(["show", str(recipe), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(["show", str(moved), "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert second.pop("folder")["value"] == str(moved) and first.pop("folder")
    assert {key: one["value"] for key, one in second.items()} == {
        key: one["value"] for key, one in first.items()
    }
    own = moved / "recipe.toml"
    own.write_text(own.read_text() + "# mine\n")
    assert main(["run", str(moved), "--only", "tokenizer", "--set", "report.license=mit"]) == 0
    assert "changed by hand" in capsys.readouterr().err and own.read_text().endswith("# mine\n")
    own.unlink()
    assert main(["show", str(moved)]) == 1 and "a folder without recipe.toml" in capsys.readouterr().err


def test_a_run_writes_text(finished, capsys, tmp_path):
    """`generate` writes the same text streamed and as JSON, from an export and from a checkpoint without one.

    With the likeliest tokens it is the text that evaluation writes, which has no key-value cache.
    """
    recipe, _ = finished
    run = tmp_path / "run"
    shutil.copytree(recipe.parent / "run", run)
    asked = ["generate", str(run), "Seadistage", "--tokens", "12", "--temperature", "0"]
    assert main(asked) == 0
    streamed = capsys.readouterr().out
    assert streamed.startswith("Seadistage") and len(streamed) > len("Seadistage\n")
    shutil.rmtree(run / "hf")
    assert main([*asked, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert streamed == f"Seadistage{text}\n"
    resolved = read(run / "resolved.toml")
    contender = load_checkpoint(newest_checkpoint(run), resolved, run / "tokenizer")
    assert generate(contender, "Seadistage", 12, 0.0, 50, 1) == text
    assert main([*asked, "--tokens", "0"]) == 1 and "--tokens 0" in capsys.readouterr().err


def test_the_verbs_that_ask_about_a_run_answer_in_json(finished, capsys, tmp_path):
    """plan, data, checkpoint list, show, tokenizer measure, verify parity, evaluate and export,
    on one finished run.
    """
    recipe, summary = finished
    run = recipe.parent / "run"

    def ask(*arguments: str | Path):
        assert main([*map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert ask("plan", "resolve", recipe, "--ranks", "2")["placement"]["world_size"] == 2
    assert {row["source"] for row in ask("data", recipe, "--step", "3")} == {"text"}
    checkpoints = ask("checkpoint", "list", run)
    assert [row["step"] for row in checkpoints] == [20, 10] and checkpoints[0]["state"] == "complete"
    assert ask("show", recipe, "--set", "seed=9")["seed"] == {"value": 9, "origin": "--set"}
    assert ask("tokenizer", "measure", run / "tokenizer", "--text", recipe.parent / "text.txt")
    assert ask("verify", "parity", run)["passed"]
    assert ask("evaluate", run)["bits_per_byte"] == summary["bits_per_byte"]
    theirs = ask("evaluate", run / "hf", recipe)["bits_per_byte"]
    assert theirs["model"] == pytest.approx(summary["bits_per_byte"]["model"], rel=1e-4)
    checkpoint = run / "train" / "checkpoints" / checkpoints[0]["name"]
    assert main(["export", str(checkpoint), "--to", str(tmp_path / "mine")]) == 0
    assert (tmp_path / "mine" / "config.json").read_bytes() == (run / "hf" / "config.json").read_bytes()


@pytest.mark.full
def test_ranks_stop_on_a_signal_with_75_and_go_on(tmp_path):
    """`kielo train --ranks 2`: SIGTERM to the parent ends in a saved step and code 75, though torchrun
    flattens codes; the same command goes on from there, and another run is refused the folder.
    """
    recipe = write_recipe(tmp_path)
    assert main(["run", str(recipe), "--to", "pack"]) == 0
    longer = ["--set", "train.tokens=512000", "--set", "checkpoint.every_steps=100000"]
    process = kielo("train", recipe, "--ranks", "2", "--json", *longer)
    metrics = tmp_path / "run" / "train" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 75, stderr
    outcome = json.loads(stdout)
    assert outcome["outcome"] == "requeue" and 0 < outcome["step"] < 4000
    stopped = tmp_path / "run" / "train" / "checkpoints" / f"step_{outcome['step']:08d}"
    assert read_tensors(stopped)

    refused = kielo("train", recipe, "--set", "train.tokens=1024000")  # another run than the folder's
    _, stderr = refused.communicate(timeout=120)
    assert refused.returncode == 1 and "phases.1.steps: was 4000, is now 8000" in stderr
    again = kielo("train", recipe, "--ranks", "2", "--json", *longer)
    while not any(row.startswith("resuming after step") for row in iter(again.stderr.readline, "")):
        pass
    again.send_signal(signal.SIGTERM)
    stdout, _ = again.communicate(timeout=120)
    assert again.returncode == 75 and json.loads(stdout)["step"] >= outcome["step"]


def test_ranks_that_cannot_work_are_refused_before_they_start(tmp_path, capsys):
    """Numbers that do not divide end with 1 and the numbers that would, without a process being started."""
    recipe = write_recipe(tmp_path)
    assert main(["run", str(recipe), "--to", "pack"]) == 0
    assert main(["train", str(recipe), "--ranks", "3", "--set", "layout.tensor=2"]) == 1
    assert "3 ranks" in capsys.readouterr().err
    assert main(["train", str(recipe), "--ranks", "4", "--set", "layout.tensor=4"]) == 1
    assert "layout.tensor = 4 does not divide model.num_attention_heads = 2" in capsys.readouterr().err
    assert not (tmp_path / "run" / "train").exists()
