"""Paths that a person gives, with `..` resolved before they are used; folders of older tokenizers."""

import os
from pathlib import Path


def place(given: str | Path) -> Path:
    """Return the path without `..`, as it will lead once its folders exist. A link as the last name stays.

    In a missing folder `..` leads nowhere: `nope/../mine` seems to be free, but is `mine` once `nope` exists.
    """
    path = Path(given)
    if ".." not in path.parts:
        return path
    if path.name == "..":
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent)) / path.name


def without_form(reference: str) -> str:
    """Return a reference to weights or a tokenizer without its form: a folder, or a name on the hub."""
    return reference.removeprefix("hf:").removeprefix("megatron:")


# (files, class if no config names one, package that transformers' conversion needs)
_OLDER = (
    (("tokenizer.model",), "LlamaTokenizerFast", "sentencepiece"),
    (("vocab.json", "merges.txt"), "GPT2TokenizerFast", None),
    (("vocab.txt",), "BertTokenizerFast", None),
)


def conversion(folder: Path, name: str | None = None) -> str:
    """Return a fix: the command that makes a tokenizer.json from `folder`'s files; "" without such files.

    name: the repository on the hub that `folder` is a snapshot of. Its files go to the folder `tokenizer`.
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
        return f'. Fix: {install}python -c "{code}", which reads {" and ".join(files)}{then}'
    return ""
