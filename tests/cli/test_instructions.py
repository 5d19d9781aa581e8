"""The recipe of docs/text.md with conversations, at toy sizes."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from kielo.artifact.manifest import read_manifest
from kielo.artifact.metrics import HeldOutLoss, TrainingStep, of_kind, read_metrics
from kielo.artifact.token_shards import TokenShard
from kielo.cli.main import main
from tests.docs.blocks import blocks
from tests.docs.toy_text import document, write_texts
from tests.house.checks import ROOT

SMALL = """
tokenizer.vocab_size=300 dataset.sequence_length=32 dataset.max_epochs=1000 dataset.heldout_share=0.2
model.hidden_size=16 model.intermediate_size=32 model.num_hidden_layers=1 model.num_attention_heads=2
model.num_key_value_heads=1 train.tokens=1024 train.tokens_per_step=256 train.micro_batch_sequences=2
train.heldout_every_steps=4 train.tensorboard=false train.precision=fp32 verify.parity_steps=2
evaluate.sample_tokens=4 corpus.workers=1
"""


def write_chats(folder: Path, number: int = 60) -> None:
    """Files that the recipe names: conversations of one and two questions."""
    write_texts(folder)
    with open(folder / "my_chats.jsonl", "w", encoding="utf-8") as file:
        for n in range(number):
            turns = [("user", document(2 * n)), ("assistant", document(2 * n + 1))] * (1 + n % 2)
            messages = [{"role": role, "content": text} for role, text in turns]
            file.write(json.dumps({"messages": messages}) + "\n")


@pytest.fixture
def flags(tmp_path, monkeypatch) -> list[str]:
    """The recipe as the page has it, in a folder with its text, and flags that make it small."""
    block = next(
        block.text for block in blocks(ROOT / "docs" / "text.md") if 'kind = "instructions"' in block.text
    )
    (tmp_path / "my_chats.toml").write_text(block, encoding="utf-8")
    write_chats(tmp_path)
    monkeypatch.chdir(tmp_path)
    return ["my_chats.toml", *(part for value in SMALL.split() for part in ("--set", value))]


def test_the_documented_recipe_packs(flags, capsys):
    """The mask is beside the tokens, and the table counts what carries loss."""
    assert main(["run", *flags, "--to", "pack"]) == 0
    tokens = Path("runs/my_chats/tokens")
    counts = read_manifest(tokens).counts["sources"]["chats"]
    assert (
        0 < counts["tokens_with_loss"] == TokenShard(tokens / "chats").loss_mask[:].sum() < counts["tokens"]
    )
    capsys.readouterr()
    assert main(["plan", "data", *flags]) == 0
    assert "with loss" in capsys.readouterr().out


@pytest.mark.full
def test_the_documented_recipe_runs_to_the_end(flags, capsys):
    """Held-out scores by source, the query, the report and the card say what was trained on; the exported
    model's turns end."""
    assert main(["run", *flags]) == 0
    run = Path("runs/my_chats")
    counts = read_manifest(run / "tokens").counts["sources"]["chats"]
    rows = read_metrics(run / "train" / "metrics.jsonl")
    assert of_kind(rows, TrainingStep)[-1].step == 4
    assert set(of_kind(rows, HeldOutLoss)[-1].heldout_sets) == {"text", "chats"}
    scores = json.loads((run / "evaluate" / "scores.json").read_text())
    assert [one["name"] for one in scores["sets"]] == ["chats", "text"]
    capsys.readouterr()
    assert main(["data", *flags, "--step", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"chats", "text"} == {row["source"] for row in rows} and all("with_loss" in row for row in rows)
    assert f'<td class="number">{counts["tokens_with_loss"]:,}</td>' in (run / "report.html").read_text()
    card = (run / "hf" / "README.md").read_text()
    assert "trained on their answers alone" in card and "apply_chat_template" in card
    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    model = AutoModelForCausalLM.from_pretrained(run / "hf")
    ends = [tokenizer.convert_tokens_to_ids(name) for name in ("<|endoftext|>", "<|im_end|>")]
    assert model.generation_config.eos_token_id == ends
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Tere"}], tokenize=False, add_generation_prompt=True
    )
    assert asked == "<|im_start|>user\nTere<|im_end|>\n<|im_start|>assistant\n"
