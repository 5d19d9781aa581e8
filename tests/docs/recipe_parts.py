"""Checks a TOML block of a page as a recipe. A part of one, without a name, is put on top of own_text."""

import contextlib
import tomllib
from pathlib import Path

from tokenizers import Tokenizer, models

from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_first_language


def complaint(text: str, folder: Path) -> str:
    """Returns what is wrong with the block, or "". Writes into `folder`, also a tokenizer that it names."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return str(error)
    base = "" if "name" in table or "extends" in table else 'extends = "own_text"\n'
    with contextlib.chdir(folder):
        if ready := table.get("tokenizer", {}).get("path"):
            Path(ready).mkdir(parents=True, exist_ok=True)
            if not (Path(ready) / "tokenizer.json").exists():
                Tokenizer(models.BPE(vocab={"<|endoftext|>": 0}, merges=[])).save(f"{ready}/tokenizer.json")
        Path("block.toml").write_text(base + text, encoding="utf-8")
        try:
            read_first_language("block.toml")
        except KieloError as error:
            return str(error)
    return ""
