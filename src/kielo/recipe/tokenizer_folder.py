"""Folders with the files of an older tokenizer: the command that makes a tokenizer.json of them."""

from pathlib import Path

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
