"""A folder with the files of an older tokenizer is refused with the command that makes its tokenizer.json."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tokenizers import (
    BertWordPieceTokenizer,
    ByteLevelBPETokenizer,
    Tokenizer,
    models,
    pre_tokenizers,
    trainers,
)
from transformers import AutoTokenizer

from kielo.recipe.errors import KieloError
from kielo.recipe.places import conversion
from kielo.recipe.read import read_recipe
from kielo.tokenizer.load import encode, load_tokenizer, tokenizer_facts
from kielo.tokenizer.stage_inputs import ready_files

TEXT = "Tere, maailm! See on katse 2026."
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "tere", "##e", "see", "on", "katse", ",", "!", "."]


def write_byte_pairs(folder: Path) -> None:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT] * 9, trainer)
    made.model.save(str(folder))


def write_words(folder: Path) -> None:
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")


def ids(folder: Path) -> list[int]:
    """Return the ids of TEXT by the older files, as another program reads them."""
    if (folder / "vocab.txt").is_file():
        return BertWordPieceTokenizer(str(folder / "vocab.txt")).encode(TEXT, add_special_tokens=False).ids
    if (folder / "config.json").is_file():
        return AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False)["input_ids"]
    files = [str(folder / name) for name in ("vocab.json", "merges.txt")]
    return ByteLevelBPETokenizer(*files).encode(TEXT).ids


@pytest.mark.parametrize(
    ("write", "config"),
    [
        *((write_byte_pairs, config) for config in ("", "gpt2", "qwen2", "opt")),
        *((write_words, config) for config in ("", "bert", "modernbert")),
    ],
)
def test_the_command_makes_the_tokenizer(
    write: Callable[[Path], None], config: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Run as it is written, it gives a tokenizer with the ids of transformers, by whatever reads it."""
    write(tmp_path)
    if config:
        (tmp_path / "config.json").write_text(f'{{"model_type": "{config}"}}')
    refusals = []
    ready = partial(ready_files, key="tokenizer.path")
    for reads in (load_tokenizer, tokenizer_facts, ready, recipe_of):
        with pytest.raises(KieloError) as caught:
            reads(tmp_path)
        refusals.append(str(caught.value))
    commands = {re.search(r'Fix: python -c "(.*)", which reads vocab', said)[1] for said in refusals}
    assert len(commands) == 1
    expected = ids(tmp_path)
    exec(commands.pop(), {})
    assert encode(load_tokenizer(tmp_path), [TEXT]) == [expected] and len(set(expected)) > 5
    assert len(ready_files(tmp_path, "tokenizer.path")) >= 2


def recipe_of(folder: Path) -> None:
    read_recipe("demo_estonian", [f"tokenizer.path={folder}"])


def test_a_sentencepiece_model_needs_its_package(tmp_path: Path) -> None:
    """The command installs it first; transformers chooses the class by a config, if there is one."""
    (tmp_path / "tokenizer.model").touch()
    assert "pip install sentencepiece && python -c" in conversion(tmp_path)
    assert "import LlamaTokenizerFast as T" in conversion(tmp_path)
    (tmp_path / "config.json").touch()
    assert "import AutoTokenizer as T" in conversion(tmp_path)


def test_a_folder_without_such_files_has_no_command(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").touch()
    assert conversion(tmp_path) == ""
