"""The files of a tokenizer in Hugging Face form, by their names in its folder."""

from pathlib import Path

from kielo.artifact.weights_folder import TEMPLATES_FOLDER

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
