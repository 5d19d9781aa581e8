"""Each code block of a card does what it says in the exported folder, in a program without Kielo."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from kielo.artifact.run_format import with_version
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.cli.main import main
from kielo.models import families
from kielo.models.blocks.decoder import init_weights
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Model
from kielo.report.gather import gather
from kielo.report.model_card import render
from kielo.tokenizer.chat_template import DEFAULT_TEMPLATE, TURN_BEGINS, TURN_ENDS

ROLES = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]",
         "pad_token": "[PAD]", "eos_token": "[SEP]"}  # fmt: skip
# kind of model → (model_type, keys of [train], kind of the source)
KINDS = {
    "decoder": ("llama", {}, "text"),
    "chat": ("gpt2", {}, "instructions"),
    "encoder": ("modernbert", {"objective": "masked_tokens"}, "text"),
    "hybrid": ("modernbert", {"objective": "masked_tokens", "causal_share": 0.25}, "text"),
    "ltg": ("ltg_bert", {"objective": "masked_tokens"}, "text"),
    "ltg_hybrid": ("ltg_bert", {"objective": "masked_tokens", "causal_share": 0.25}, "text"),
}
# In make test-full: a chat model and an encoder with code of its own have all that these have.
RARELY = ("decoder", "hybrid", "ltg_hybrid")
# What a program prints last, so that a block that does nothing fails.
RUNS = """
import contextlib, io, json, os, sys
sys.modules["kielo"] = None
for folder, blocks in json.load(sys.stdin):
    os.chdir(folder)
    names, printed = {}, []
    for block in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(block, names)
        printed.append(out.getvalue())
    print("found", json.dumps([folder, printed]))
"""


def made_run(folder: Path, kind: str) -> Path:
    """Writes a checkpoint of first weights, a tokenizer of bytes and a recipe; returns the recipe."""
    model_type, train, source = KINDS[kind]
    folder.mkdir()
    names = [*dict.fromkeys(ROLES.values()), TURN_BEGINS, TURN_ENDS, *sorted(ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.add_special_tokens(names[:7])
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = ROLES | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {"chat_template": DEFAULT_TEMPLATE} if source == "instructions" else {}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"position_bucket_size": 8} if model_type == "ltg_bert" else {}
    model = families.build_model(
        families.complete(Model(model_type=model_type, vocab_size=len(names), **sizes), 128)
    )
    init_weights(model, 3)
    identity = with_version({"name": kind, "model": model.config.model_dump(mode="json"), "train": train})
    checkpointer = Checkpointer(folder / "train" / "checkpoints")
    values = {f"model/{name}": value.detach() for name, value in model.named_parameters()}
    checkpointer.save(1, values, {"identity": identity})
    checkpointer.settle()
    checkpointer.close()
    recipe = folder / "recipe.toml"
    lines = [
        f'name = "{kind}"',
        'language = "et"',
        f'folder = "{folder}"',
        "[model]",
        f'model_type = "{model_type}"',
    ]
    lines += ["[train]", *(f"{key} = {json.dumps(value)}" for key, value in train.items())]
    lines += ["[[corpus.sources]]", 'name = "a"', 'path = "/text.jsonl"', f'kind = "{source}"']
    recipe.write_text("\n".join(lines) + "\n")
    return recipe


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> dict[str, list[list[str]]]:
    """Kind of model → what the blocks of its two cards print: of the export alone, and of the report."""
    return printed_of(tmp_path_factory.mktemp("cards"), [kind for kind in KINDS if kind not in RARELY])


@pytest.fixture(scope="module")
def printed_rarely(tmp_path_factory) -> dict[str, list[list[str]]]:
    return printed_of(tmp_path_factory.mktemp("cards"), [*RARELY])


def printed_of(root: Path, kinds: list[str]) -> dict[str, list[list[str]]]:
    asked = []
    for kind in kinds:
        run = root / kind
        recipe = read_recipe(made_run(run, kind)).recipe
        assert main(["export", str(run), "--to", str(run / "hf")]) == 0
        for card in ((run / "hf" / "README.md").read_text(encoding="utf-8"), render(gather(run, recipe, {}))):
            asked.append((str(run / "hf"), re.findall(r"```python\n(.*?)```", card, re.S)))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(root / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUNS], input=json.dumps(asked), cwd=root, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line.removeprefix("found ")) for line in done.stdout.splitlines()]
    assert [folder for folder, _ in found] == [folder for folder, _ in asked]
    return {kind: [found[2 * at][1], found[2 * at + 1][1]] for at, kind in enumerate(kinds)}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] * (kind in RARELY)) for kind in KINDS]
)
def test_every_block_of_a_card_does_what_it_says(request, kind) -> None:
    """A decoder continues text, an encoder fills its mask with five tokens, a chat model answers too."""
    for blocks in request.getfixturevalue("printed_rarely" if kind in RARELY else "printed")[kind]:
        assert len(blocks) == (2 if kind == "chat" else 1)
        assert all(block.strip() for block in blocks)
        if kind in ("encoder", "ltg"):
            assert blocks[0].count("'token_str'") == 5
        if kind in ("decoder", "chat"):
            assert blocks[0].startswith("…")
