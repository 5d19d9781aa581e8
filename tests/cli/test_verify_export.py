"""`kielo verify export`: programs that serve an export, beside transformers' own numbers."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kielo.checkpoint import llama_cpp
from kielo.cli.main import main
from kielo.verify.serving_programs import PROGRAMS, Answer, CannotServeError, Question
from tests.cli import vllm_stand_in

WEIGHT = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def run(first_run, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(first_run.recipe.parent / "run", folder)
    return folder


@pytest.fixture
def here(monkeypatch) -> dict[str, Any]:
    """Asks in this process; a function under a program's name changes its answer. Only those are there."""
    changes: dict[str, Any] = {"transformers": lambda answer: answer}

    def ask(name: str, file: Path, question: Question) -> Answer:
        try:
            return changes[name](Answer(**PROGRAMS[name].answer(file, question)))
        except CannotServeError as error:
            return Answer([], [], str(error))

    def installed(package: str) -> str | None:
        return "1.0" if any(PROGRAMS[name].package == package for name in changes) else None

    monkeypatch.setattr("kielo.verify.serving.ask", ask)
    monkeypatch.setattr("kielo.verify.serving.installed", installed)
    return changes


def change_a_weight(folder: Path, by: float = 1e-2) -> None:
    """The planted error, in the weights alone."""
    tensors = load_file(folder / "model.safetensors")
    tensors[WEIGHT][3, 5] += by
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def rows_of(run: Path) -> dict[str, Any]:
    found = json.loads((run / "serving" / "serving.json").read_text())
    return {row["program"]: row for row in found["programs"]}


def test_an_export_gives_what_its_checkpoint_gives(run, here, capsys) -> None:
    assert main(["verify", "export", str(run)]) == 0
    screen = capsys.readouterr().out
    assert "CTranslate2: not installed. Fix: pip install ctranslate2\n" in screen
    assert "vLLM: not installed. Fix: pip install vllm\n" in screen
    row = rows_of(run)["transformers"]
    assert row["verdict"] == "ok" and row["largest_difference"] < 1e-6 and row["same_tokens"] > 0
    # Another folder of the run, and an export in a run as itself.
    shutil.copytree(run / "hf", run / "again")
    assert main(["verify", "export", str(run), "--export", str(run / "again"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["export"] == str(run / "again")
    assert main(["verify", "export", str(run / "again")]) == 0


def test_one_changed_weight_is_refused_with_its_first_token(run, here, capsys) -> None:
    change_a_weight(run / "hf")
    assert main(["verify", "export", str(run)]) == 1
    screen = " ".join(capsys.readouterr().out.split())
    assert "transformers: FAILED: text 1 (" in screen and ": token 2, " in screen
    assert "transformers: NOT the model of step_00000020." in screen
    assert rows_of(run)["transformers"]["largest_difference"] > 1e-5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: one._replace(greedy=[[one.greedy[0][0] ^ 1, *one.greedy[0][1:]], *one.greedy[1:]]),
         "text 1 (text, 0): token 1 of the greedy text: "),
        (lambda one: one._replace(greedy=[one.greedy[0], [], *one.greedy[2:]]),
         "the greedy text ends after 0 tokens of 8"),
        (lambda one: one._replace(log_probabilities=[[float("nan")] * 7] * 4), "token 2, "),
    ],
)  # fmt: skip
def test_another_answer_is_refused(change, said, run, here) -> None:
    here["transformers"] = change
    assert main(["verify", "export", str(run)]) == 1
    assert said in rows_of(run)["transformers"]["reason"].replace(_place(run), "text, 0")


def _place(run: Path) -> str:
    return json.loads((run / "serving" / "serving.json").read_text())["texts"][0]


def test_vllm_is_asked_by_its_documented_interface(run, here, monkeypatch) -> None:
    """By a stand-in; the log-probabilities of the prompt are transformers'."""
    monkeypatch.setitem(sys.modules, "vllm", vllm_stand_in)
    here["vLLM"] = lambda answer: answer
    assert main(["verify", "export", str(run)]) == 0
    assert rows_of(run)["vLLM"]["verdict"] == "ok"
    ids = [5, 60, 71, 8]
    found = PROGRAMS["vLLM"].answer(run / "hf", Question(sequences=[ids], new_tokens=3, end=0))
    model = AutoModelForCausalLM.from_pretrained(run / "hf").eval()
    with torch.no_grad():
        logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert found["log_probabilities"][0] == pytest.approx(
        [logs[at, number].item() for at, number in enumerate(ids[1:])], abs=1e-6
    )
    monkeypatch.setattr(vllm_stand_in.ModelRegistry, "get_supported_archs", lambda: ["OPTForCausalLM"])
    assert main(["verify", "export", str(run)]) == 0
    row = rows_of(run)["vLLM"]
    assert (row["verdict"], row["reason"]) == ("cannot serve it", "it has no architecture LlamaForCausalLM")


def test_what_is_no_export_of_the_run_is_refused(run, here, tmp_path, capsys) -> None:
    def refusal(*arguments: Path | str) -> str:
        assert main(["verify", "export", *map(str, arguments)]) == 1
        return capsys.readouterr().err

    shutil.copytree(run / "hf", tmp_path / "elsewhere")
    assert f"Fix: kielo verify export RUN --export {tmp_path / 'elsewhere'}" in refusal(
        tmp_path / "elsewhere"
    )
    assert "no finished export of kind 'gguf'" in refusal(run, "--gguf", run / "hf")
    manifest = json.loads((run / "hf" / "manifest.json").read_text())
    manifest["inputs"]["checkpoint"] = "0" * 32
    (run / "hf" / "manifest.json").write_text(json.dumps(manifest))
    assert "is an export of no checkpoint that" in refusal(run)
    shutil.rmtree(run / "hf")
    assert f"Fix: kielo run {run} --to export" in refusal(run)
    assert not (run / "serving").exists()


@pytest.mark.full
def test_every_program_in_a_process_of_its_own(run, tmp_path, monkeypatch, capsys) -> None:
    """vLLM by a stand-in, the others themselves: all agree, and see what is beyond their limits."""
    packages = tmp_path / "packages"
    (packages / "vllm-0.0.dist-info").mkdir(parents=True)
    (packages / "vllm-0.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.0\n")
    shutil.copy(vllm_stand_in.__file__, packages / "vllm.py")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")]))
    command = ["verify", "export", str(run)]
    expected = {"transformers": "ok", "CTranslate2": "ok", "vLLM": "ok", "llama.cpp": "not installed"}
    if llama_cpp.program():
        assert main(["export", str(run), "--to", str(tmp_path / "gguf"), "--format", "gguf"]) == 0
        command += ["--gguf", str(tmp_path / "gguf")]
        expected["llama.cpp"] = "ok"
    assert main(command) == 0
    assert {name: row["verdict"] for name, row in rows_of(run).items()} == expected
    change_a_weight(run / "hf")
    assert main(command) == 1
    found = {name: row["verdict"] for name, row in rows_of(run).items()}
    assert found == expected | dict.fromkeys(("transformers", "CTranslate2"), "FAILED")
    change_a_weight(run / "hf", by=10)
    assert main(command) == 1
    assert rows_of(run)["vLLM"]["verdict"] == "FAILED"
    # A program that fails is no pass.
    (packages / "vllm.py").write_text("raise RuntimeError('no GPU here')")
    assert main(command) == 1
    assert "RuntimeError: no GPU here" in rows_of(run)["vLLM"]["reason"]
