"""Each block of docs/hand_over.md does what the page says, in the program that it names, without Kielo."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kielo.cli.main import main
from tests.border.test_programs import PLACE, TOLERANCE
from tests.border.test_programs import chat_model as chat_model
from tests.border.test_programs import run as run
from tests.cli.test_run import write_recipe
from tests.docs.blocks import blocks
from tests.house.checks import ROOT

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(PLACE is None, reason="asked for by make test-border"),
]
BLOCKS = list(blocks(ROOT / "docs" / "hand_over.md"))


def block(words: str) -> str:
    (found,) = (block.text for block in BLOCKS if words in block.text)
    return found


def ended(folder: Path, *command: str) -> str:
    """Run a program of the programs' environment in a folder of runs; return what it printed."""
    programs = Path(PLACE or "").resolve() / "programs" / "bin"
    environment = os.environ | {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    name, *arguments = command
    done = subprocess.run(
        [programs / name, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory, run: Path, chat_model: Path) -> Path:
    """A folder with the runs that the page names."""
    folder = tmp_path_factory.mktemp("hand over")
    encoder = tmp_path_factory.mktemp("an encoder")
    sets = ["model.model_type=modernbert", "model.sliding_window=9", "train.objective=masked_tokens"]
    flags = [part for value in sets for part in ("--set", value)]
    assert main(["run", str(write_recipe(encoder)), "--to", "export", *flags]) == 0
    (folder / "runs").mkdir()
    for name, made in (
        ("demo_estonian", run),
        ("my_chat", chat_model.parent),
        ("demo_estonian_bert", encoder / "run"),
    ):
        (folder / "runs" / name).symlink_to(made)
    return folder


def answers(folder: Path) -> float:
    """The mean log-probability of the page's answer after its question, by transformers."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    asked = [{"role": "user", "content": "Mis on keel?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = before + tokenizer("Keel on rikas.", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logs = model.float().eval()(torch.tensor([ids])).logits[0].log_softmax(-1)
    places = range(len(before), len(ids))
    return sum(logs[place - 1, ids[place]].item() for place in places) / len(places)


def test_transformers_writes_text(runs: Path) -> None:
    assert ended(
        runs,
        "python",
        "-c",
        block('AutoModelForCausalLM, AutoTokenizer\n\nfolder = "runs/demo_estonian/hf"\ntok'),
    ).startswith("Faili")


def test_lm_eval_measures_the_task_of_the_page(runs: Path) -> None:
    """Bits per byte of two short texts, as transformers alone gives them."""
    texts = ["Tere, maailm", "Keel on rikas"]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (runs / "court.jsonl").write_text("".join(lines), encoding="utf-8")
    (runs / "tasks").mkdir()
    (runs / "tasks" / "court.yaml").write_text(block("task: court"), encoding="utf-8")
    command = block("lm_eval run").split()
    ended(runs, *command, "--output_path", "scores")
    (result,) = (runs / "scores").rglob("results*.json")
    found = json.loads(result.read_text())["results"]["court"]["bits_per_byte,none"]
    folder = runs / "runs" / "demo_estonian" / "hf"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    bits = 0.0
    for text in texts:
        ids = [
            tokenizer.bos_token_id or tokenizer.eos_token_id,
            *tokenizer(text, add_special_tokens=False)["input_ids"],
        ]
        with torch.no_grad():
            logs = model.float().eval()(torch.tensor([ids])).logits[0].log_softmax(-1)
        bits -= sum(logs[place, token].item() for place, token in enumerate(ids[1:])) / math.log(2)
    assert found == pytest.approx(bits / sum(len(text.encode()) for text in texts), rel=TOLERANCE)


@pytest.mark.parametrize(("words", "made"), [("SFTTrainer(", "answers"), ("DPOTrainer(", "preferences")])
def test_trl_teaches_the_answer_and_kielo_reads_it_again(
    words: str, made: str, runs: Path, monkeypatch
) -> None:
    """The answer gets likelier, and the tensors come back as they went in."""
    ended(runs, "python", "-c", block(words))
    assert answers(runs / made) > answers(runs / "runs" / "my_chat" / "hf")
    monkeypatch.chdir(runs)
    assert main(["verify", "round-trip", f"hf:{made}"]) == 0


def test_peft_merges_an_adapter(runs: Path) -> None:
    """An adapter that was not trained is 0, so the merged weights are the exported weights."""
    ended(runs, "python", "-c", block("LoraConfig"))
    first = AutoModelForCausalLM.from_pretrained(runs / "runs" / "demo_estonian" / "hf").state_dict()
    merged = AutoModelForCausalLM.from_pretrained(runs / "adapted").state_dict()
    assert merged.keys() == first.keys()
    assert all(torch.equal(merged[name], first[name]) for name in first)


def test_sentence_transformers_compares_sentences(runs: Path) -> None:
    """A sentence is like itself. Its vector is compared with transformers in test_programs.py."""
    assert "1.0000" in ended(runs, "python", "-c", block("SentenceTransformer("))
