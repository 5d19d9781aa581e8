"""Facts of a tokenizer that its folder tells: its files by name, and the numbers that a run needs."""

from dataclasses import dataclass
from pathlib import Path

from kielo.artifact.manifest import hash_file, hash_json, read_manifest
from kielo.artifact.stage_counts import TokenizerCounts
from kielo.artifact.stage_json import counts_of
from kielo.artifact.weights_folder import TEMPLATES_FOLDER
from kielo.tokenizer.control_tokens import CHAT_TEMPLATE_FILE, CONFIG_FILES
from kielo.tokenizer.load import (
    TOKENIZER_FILE,
    end_of_text,
    end_of_text_id,
    load_tokenizer,
    tokenizer_path,
    vocabulary_size,
)

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
    """Facts of one tokenizer. `file_hash` is tokenizer.json's, `hash` is by `tokenizer_hash`."""

    vocabulary_size: int
    end_of_text_id: int
    file_hash: str
    hash: str


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
    return TokenizerFacts(largest + 1, end, file_hash, _hash(file_hash, folder))


def tokenizer_hash(folder: Path | str) -> str:
    """Return a hash of all that decides a text's ids: tokenizer.json and the name of end-of-text."""
    return _hash(hash_file(tokenizer_path(folder)), Path(folder))


def _hash(file_hash: str, folder: Path) -> str:
    return hash_json([file_hash, end_of_text(folder)])
