"""Paths that a person gives: `..` is followed before anything is checked or written there; old tokenizers."""

import os
from pathlib import Path

# Follows `..` in a path that a person gives, before anything is checked or written there.


def place(given: str | Path) -> Path:
    """Return the path without `..`, as it will lead once its folders are made; the last name stays.

    Behind a folder that is not there yet, `..` leads nowhere, so `nope/../mine` seems to be free, and it is
    `mine` when `nope` has been made.
    """
    path = Path(given)
    if ".." not in path.parts:
        return path
    if path.name == "..":
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent)) / path.name


# Folders with the files of an older tokenizer: the command that makes a tokenizer.json of them.


# (files, class if no config names one, what its conversion needs beside transformers), as people find them
_OLDER = (
    (("tokenizer.model",), "LlamaTokenizerFast", "sentencepiece"),
    (("vocab.json", "merges.txt"), "GPT2TokenizerFast", None),
    (("vocab.txt",), "BertTokenizerFast", None),
)


def conversion(folder: Path, name: str | None = None) -> str:
    """Return a sentence with the command that makes a tokenizer.json of `folder`'s files; "" without such.

    name: the repository on the hub that `folder` is a snapshot of, whose files go to the folder `tokenizer`.
    """
    for files, usual, package in _OLDER:
        if not all((folder / file).is_file() for file in files):
            continue
        is_named = any((folder / file).is_file() for file in ("config.json", "tokenizer_config.json"))
        # transformers finds no class for a vocab.txt by a config.json that is not BERT's
        kind = "AutoTokenizer" if is_named and files != ("vocab.txt",) else usual
        source, to = (name, "tokenizer") if name else (str(folder), str(folder))
        install = f"pip install {package} && " if package else ""
        code = f"from transformers import {kind} as T; T.from_pretrained({source!r}).save_pretrained({to!r})"
        then = ", then tokenizer.path = 'tokenizer'" if name else ""
        return f'. Fix: {install}python -c "{code}" makes it of {" and ".join(files)}{then}'
    return ""
