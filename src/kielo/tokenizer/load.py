"""Ready tokenizers: a folder in Hugging Face form → a `TextTokenizer`; text → ids, never control tokens.

Also the facts that a folder tells of its tokenizer: its files, and the numbers that a run needs.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from kielo.artifact.manifest import hash_file, hash_json, read_manifest, write_text_atomically
from kielo.artifact.stage_counts import TokenizerCounts
from kielo.artifact.stage_json import counts_of
from kielo.artifact.weights_folder import TEMPLATES_FOLDER
from kielo.recipe.errors import KieloError
from kielo.recipe.places import conversion
from kielo.tokenizer.control_tokens import (
    CHAT_TEMPLATE_FILE,
    CONFIG_FILES,
    TextOnly,
    read_object,
    without_control_tokens,
)

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"


class TextTokenizer:
    """A tokenizer as read from a folder (`whole`), and its copy for encoding text."""

    def __init__(self, whole: Tokenizer, folder: Path, end_of_text: str):
        self.whole, self.folder, self.end_of_text = whole, folder, end_of_text

    @cached_property
    def for_text(self) -> TextOnly:
        """A copy with the same ids in which text has no control tokens. Its first use takes seconds."""
        with panics_told(self.folder):
            return without_control_tokens(self.whole, self.folder, self.end_of_text)


@contextmanager
def panics_told(folder: Path) -> Iterator[None]:
    """Raise KieloError for a panic of the Rust library, which is no Exception."""
    try:
        yield
    except BaseException as problem:
        if type(problem).__name__ != "PanicException":
            raise
        raise KieloError(
            f"{folder / TOKENIZER_FILE}: the tokenizers library gave up on it "
            f"({' '.join(str(problem).split())[:200]}). Fix: another tokenizer"
        ) from None


def load_tokenizer(folder: Path | str) -> TextTokenizer:
    path = tokenizer_path(folder)
    with panics_told(path.parent):
        try:
            whole = Tokenizer.from_file(str(path))
        except Exception as problem:  # the Rust library raises bare Exception
            raise KieloError(f"{path}: not a readable tokenizer ({problem})") from None
    whole.no_padding()
    whole.no_truncation()
    if getattr(whole.model, "dropout", None):  # of BPE: a text would get different ids each time
        whole.model.dropout = None
    return TextTokenizer(whole, path.parent, end_of_text(path.parent))


def tokenizer_path(folder: Path | str) -> Path:
    if not (path := Path(folder) / TOKENIZER_FILE).is_file():
        fix = conversion(path.parent) or ". Fix: name a folder in Hugging Face form, with a tokenizer.json"
        raise KieloError(f"{path}: no such file{fix}")
    return path


def write_without_dropout(folder: Path) -> bool:
    """Turn off the dropout of merges in the tokenizer.json of `folder`. Return True if it was on."""
    content = read_object(folder / TOKENIZER_FILE)
    if not content.get("model", {}).get("dropout"):
        return False
    content["model"]["dropout"] = None
    write_text_atomically(folder / TOKENIZER_FILE, json.dumps(content, indent=2, ensure_ascii=False))
    return True


def end_of_text(folder: Path) -> str:
    """Return the token that ends a document: `eos_token`, else an encoder's `sep_token`, else END_OF_TEXT."""
    names = [special_token(folder / file, key) for key in ("eos_token", "sep_token") for file in CONFIG_FILES]
    return next(filter(None, names), END_OF_TEXT)


def end_of_text_id(tokenizer: TextTokenizer) -> int:
    number = tokenizer.whole.token_to_id(tokenizer.end_of_text)
    if number is None:
        raise KieloError(
            f"the tokenizer has no token {tokenizer.end_of_text!r} to end documents with. Fix: name one of "
            f"its special tokens as eos_token in its {CONFIG_FILE}"
        )
    return number


def role_name(tokenizer: TextTokenizer, role: str) -> str | None:
    """Return the token that the configuration gives a role (`mask_token`), or None."""
    names = (special_token(tokenizer.folder / file, role) for file in CONFIG_FILES)
    return next(filter(None, names), None)


def role_id(tokenizer: TextTokenizer, role: str) -> int | None:
    name = role_name(tokenizer, role)
    return None if name is None else tokenizer.whole.token_to_id(name)


def vocabulary_size(tokenizer: TextTokenizer) -> int:
    """Return the largest id plus one: the rows that an embedding needs, even if a vocabulary has gaps."""
    return 1 + max(tokenizer.whole.get_vocab(with_added_tokens=True).values())


def encode(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Encode each text to ids, without special tokens. Raises KieloError if one has a control token."""
    for_text, forbidden, _ = tokenizer.for_text
    with panics_told(tokenizer.folder):
        encodings = for_text.encode_batch_fast(list(texts), add_special_tokens=False)
    rows = [encoding.ids for encoding in encodings]
    for text, row in zip(texts, rows, strict=True):
        if not forbidden.keys().isdisjoint(row):
            name = next(forbidden[number] for number in row if number in forbidden)
            raise KieloError(
                f"{tokenizer.folder}: this tokenizer writes its control token {name!r} within a text, which "
                f"begins {text[:40]!r}. It probably stands for unknown characters too. Fix: a tokenizer that "
                "keeps them apart"
            )
    return rows


def decode(tokenizer: TextTokenizer, rows: Sequence[Sequence[int]], has_special: bool = True) -> list[str]:
    with panics_told(tokenizer.folder):
        return tokenizer.whole.decode_batch([list(row) for row in rows], skip_special_tokens=not has_special)


def special_token(path: Path, key: str) -> str | None:
    value = read_object(path).get(key)
    name = value.get("content") if isinstance(value, dict) else value  # older files spell out an AddedToken
    if value is not None and not isinstance(name, str):
        raise KieloError(f"{path}: {key} = {str(value)[:60]} does not fit. Fix: the text of a token, or null")
    return name or None


_FILES = (TOKENIZER_FILE, *CONFIG_FILES, "added_tokens.json", CHAT_TEMPLATE_FILE)
# The same vocabulary in formats of other programs. Kielo reads tokenizer.json alone.
_OTHER_FORMATS = (
    "vocab.json merges.txt vocab.txt tokenizer.model spiece.model sentencepiece.bpe.model tekken.json"
)


def main_files(folder: Path) -> list[str]:
    return [name for name in _FILES if (folder / name).is_file()]


def side_files(folder: Path, has_same_vocabulary: bool = True) -> list[str]:
    """Return the folder's other files of a tokenizer, without formats of another vocabulary."""
    templates = sorted((folder / TEMPLATES_FOLDER).glob("*.jinja"))
    others = [name for name in _OTHER_FORMATS.split() if (folder / name).is_file()]
    return [f"{TEMPLATES_FOLDER}/{path.name}" for path in templates] + others * has_same_vocabulary


@dataclass(frozen=True)
class TokenizerFacts:
    vocabulary_size: int
    end_of_text_id: int
    file_hash: str  # of tokenizer.json
    hash: str  # by `tokenizer_hash`


def tokenizer_facts(folder: Path | str) -> TokenizerFacts:
    """Read the facts from the manifest if the files match it. Otherwise load the tokenizer."""
    folder = Path(folder)
    file_hash, manifest = hash_file(tokenizer_path(folder)), read_manifest(folder)
    hashes = {TOKENIZER_FILE: file_hash}
    hashes |= {name: hash_file(folder / name) for name in CONFIG_FILES if (folder / name).is_file()}
    counts = counts_of(folder, manifest, TokenizerCounts) if manifest else TokenizerCounts()
    files = manifest.files if manifest else {}
    listed = {name: files[name].xxh3_128 for name in (TOKENIZER_FILE, *CONFIG_FILES) if name in files}
    largest, end = counts.largest_id, counts.end_of_text_id
    if largest is None or end is None or hashes != listed:
        tokenizer = load_tokenizer(folder)
        largest, end = vocabulary_size(tokenizer) - 1, end_of_text_id(tokenizer)
    return TokenizerFacts(largest + 1, end, file_hash, tokenizer_hash(folder, file_hash))


def tokenizer_hash(folder: Path | str, file_hash: str | None = None) -> str:
    """Return a hash of all that decides a text's ids: tokenizer.json and the name of end-of-text."""
    return hash_json([file_hash or hash_file(tokenizer_path(folder)), end_of_text(Path(folder))])
