"""Facts of a tokenizer that its folder tells: its files by name, and the numbers that a run follows from."""

from dataclasses import dataclass
from pathlib import Path

from kielo.artifact.manifest import Manifest, hash_file, hash_json, read_manifest
from kielo.artifact.stage_counts import TokenizerCounts
from kielo.artifact.stage_json import counts_of
from kielo.artifact.weights_folder import TEMPLATES_FOLDER
from kielo.recipe.errors import KieloError
from kielo.recipe.places import conversion
from kielo.tokenizer.control_tokens import CONFIG_FILES
from kielo.tokenizer.load import TOKENIZER_FILE, end_of_text, end_of_text_id, load_tokenizer, vocabulary_size

# The files of a tokenizer in Hugging Face form, by their names in its folder.


_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
# The vocabulary once more, in the formats of other programs. Kielo reads tokenizer.json alone.
_OTHER_FORMATS = (
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)


def main_files(folder: Path) -> list[str]:
    """Return the files in `folder` that decide how text and conversations become tokens."""
    return [name for name in _FILES if (folder / name).is_file()]


def side_files(folder: Path, has_same_vocabulary: bool = True) -> list[str]:
    """Return the other files of the tokenizer in `folder`, which go along with its copies.

    has_same_vocabulary: False for a copy with another vocabulary, which the other formats do not have.
    """
    templates = sorted((folder / TEMPLATES_FOLDER).glob("*.jinja"))
    others = [name for name in _OTHER_FORMATS if (folder / name).is_file()]
    return [f"{TEMPLATES_FOLDER}/{path.name}" for path in templates] + others * has_same_vocabulary


# Facts of a tokenizer that a run's numbers follow from, read from its manifest where that can be trusted.
#
# So a rank of a run parses no vocabulary.


@dataclass(frozen=True)
class TokenizerFacts:
    """Facts of one tokenizer. file_hash: of tokenizer.json; hash: see `tokenizer_hash`."""

    vocabulary_size: int
    end_of_text_id: int
    file_hash: str
    hash: str


def tokenizer_facts(folder: Path | str) -> TokenizerFacts:
    """Read the facts from the manifest if the files are as it lists them; if not, loads the tokenizer once.

    A manifest of an earlier version of Kielo does not have them all. Raises KieloError like `load_tokenizer`.
    """
    folder = Path(folder)
    file_hash, manifest = _file_hash(folder), read_manifest(folder)
    hashes = {TOKENIZER_FILE: file_hash}
    hashes |= {name: hash_file(folder / name) for name in CONFIG_FILES if (folder / name).is_file()}
    counts = counts_of(folder, manifest, TokenizerCounts) if manifest else TokenizerCounts()
    largest, end = counts.largest_id, counts.end_of_text_id
    if manifest is None or largest is None or end is None or hashes != _listed(manifest):
        tokenizer = load_tokenizer(folder)
        largest, end = vocabulary_size(tokenizer) - 1, end_of_text_id(tokenizer)
    return TokenizerFacts(largest + 1, end, file_hash, _hash(file_hash, folder))


def tokenizer_hash(folder: Path | str) -> str:
    """Return a hash of all that decides a text's ids: tokenizer.json and the name of end-of-text.

    Chat templates and the like are left out. Raises KieloError where there is no tokenizer.json.
    """
    return _hash(_file_hash(Path(folder)), Path(folder))


def _hash(file_hash: str, folder: Path) -> str:
    return hash_json([file_hash, end_of_text(folder)])


def _file_hash(folder: Path) -> str:
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise KieloError(
            f"{path}: no such file"
            + (conversion(folder) or "; a tokenizer folder in Hugging Face form has a tokenizer.json")
        )
    return hash_file(path)


def _listed(manifest: Manifest) -> dict[str, str | None]:
    names = (TOKENIZER_FILE, *CONFIG_FILES)
    return {name: manifest.files[name].xxh3_128 for name in names if name in manifest.files}
