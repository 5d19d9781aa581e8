"""Ready tokenizers: a folder in Hugging Face form -> a `tokenizers.Tokenizer`, and text -> ids with it."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from kielo.artifact.manifest import hash_file, hash_json
from kielo.recipe.errors import KieloError

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a folder that holds tokenizer.json (and tokenizer_config.json, which names its
    tokens).

    It cuts and pads nothing, and reads a special token that is spelled out in a text as ordinary characters,
    so no document can write an end-of-text into the training stream. Raises KieloError naming the file.
    """
    path = Path(folder) / TOKENIZER_FILE
    if not path.is_file():
        raise KieloError(
            f"{path}: no such file; a tokenizer folder in Hugging Face form has a tokenizer.json"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as problem:  # the Rust library raises bare Exception
        raise KieloError(f"{path}: not a readable tokenizer ({problem})") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    tokenizer.end_of_text = special_token(path.with_name(CONFIG_FILE), "eos_token") or END_OF_TEXT
    return tokenizer


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """Id of the token that ends a document: `eos_token` of tokenizer_config.json, `<|endoftext|>` without
    one.

    Raises KieloError when the vocabulary lacks it.
    """
    name = getattr(tokenizer, "end_of_text", END_OF_TEXT)
    number = tokenizer.token_to_id(name)
    if number is None:
        raise KieloError(
            f"the tokenizer has no token {name!r} to end documents with; name one of its special tokens as "
            f"eos_token in its {CONFIG_FILE}"
        )
    return number


def tokenizer_hash(folder: Path | str) -> str:
    """Hash of what decides a text's ids: tokenizer.json and the name of end-of-text. Chat templates and the like are left out.

    Raises KieloError where there is no tokenizer.json.
    """
    path = Path(folder) / TOKENIZER_FILE
    if not path.is_file():
        raise KieloError(f"{path}: no such file; a tokenizer folder in Hugging Face form has a tokenizer.json")
    return hash_json([hash_file(path), special_token(path.with_name(CONFIG_FILE), "eos_token") or END_OF_TEXT])


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id: what an embedding needs, also where a vocabulary has gaps."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, without special tokens around them. Uses every core that the process may."""
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def decode(tokenizer: Tokenizer, rows: Sequence[Sequence[int]]) -> list[str]:
    """The texts back, special tokens included."""
    return tokenizer.decode_batch([list(row) for row in rows], skip_special_tokens=False)


def special_token(path: Path, key: str) -> str | None:
    """What tokenizer_config.json or special_tokens_map.json calls a token such as `eos_token`; None where it does not say.

    Raises KieloError naming file and key for what is no name.
    """
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise KieloError(f"{path}: not valid JSON ({problem})") from None
    if not isinstance(content, dict):
        raise KieloError(f"{path}: not a JSON object but a {type(content).__name__}")
    value = content.get(key)
    name = value.get("content") if isinstance(value, dict) else value  # older files spell out an AddedToken
    if value is not None and not isinstance(name, str):
        raise KieloError(f"{path}: {key} = {str(value)[:60]} does not fit; expected the text of one token, or null")
    return name or None
