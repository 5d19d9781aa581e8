"""Ready tokenizers: a folder in Hugging Face form -> a `TextTokenizer`, and text -> ids with it.

Text is text: whatever a document spells, none of its ids is a control token's (`control_tokens.py`).
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from kielo.artifact.manifest import hash_file, hash_json
from kielo.recipe.errors import KieloError
from kielo.tokenizer.control_tokens import CONFIG_FILES, read_object, without_control_tokens

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"


class TextTokenizer:
    """`whole` is the tokenizer as it is read: it has every token's id, and decodes. `for_text` is (one with
    the same ids in which no text reaches a control token, those tokens by id). `end_of_text` is the token
    that ends a document.
    """

    def __init__(self, whole: Tokenizer, folder: Path, end_of_text: str):
        self.whole, self.folder, self.end_of_text = whole, folder, end_of_text

    @cached_property
    def for_text(self) -> tuple[Tokenizer, dict[int, str]]:
        """Made when text is first encoded: with a large vocabulary that takes seconds."""
        return without_control_tokens(self.whole, self.folder, self.end_of_text)


def load_tokenizer(folder: Path | str) -> TextTokenizer:
    """The tokenizer of a folder that holds tokenizer.json (and tokenizer_config.json, which names its
    tokens).

    It cuts and pads nothing. Raises KieloError naming the file.
    """
    path = Path(folder) / TOKENIZER_FILE
    if not path.is_file():
        raise KieloError(
            f"{path}: no such file; a tokenizer folder in Hugging Face form has a tokenizer.json"
        )
    try:
        whole = Tokenizer.from_file(str(path))
    except Exception as problem:  # the Rust library raises bare Exception
        raise KieloError(f"{path}: not a readable tokenizer ({problem})") from None
    whole.no_padding()
    whole.no_truncation()
    return TextTokenizer(whole, path.parent, _end_of_text_in(path.parent))


def end_of_text_id(tokenizer: TextTokenizer) -> int:
    """Id of the token that ends a document: `eos_token` of tokenizer_config.json or special_tokens_map.json,
    `<|endoftext|>` without one.

    Raises KieloError when the vocabulary lacks it.
    """
    number = tokenizer.whole.token_to_id(tokenizer.end_of_text)
    if number is None:
        raise KieloError(
            f"the tokenizer has no token {tokenizer.end_of_text!r} to end documents with; name one of its "
            f"special tokens as eos_token in its {CONFIG_FILE}"
        )
    return number


def tokenizer_hash(folder: Path | str) -> str:
    """Hash of what decides a text's ids: tokenizer.json and the name of end-of-text. Chat templates and the
    like are left out.

    Raises KieloError where there is no tokenizer.json.
    """
    path = Path(folder) / TOKENIZER_FILE
    if not path.is_file():
        raise KieloError(
            f"{path}: no such file; a tokenizer folder in Hugging Face form has a tokenizer.json"
        )
    return hash_json([hash_file(path), _end_of_text_in(path.parent)])


def vocabulary_size(tokenizer: TextTokenizer) -> int:
    """One more than the largest id: what an embedding needs, also where a vocabulary has gaps."""
    return 1 + max(tokenizer.whole.get_vocab(with_added_tokens=True).values())


def encode(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, without special tokens around them. Uses every core that the process may.

    Raises KieloError where the tokenizer writes a control token for text all the same.
    """
    for_text, forbidden = tokenizer.for_text
    rows = [encoding.ids for encoding in for_text.encode_batch_fast(list(texts), add_special_tokens=False)]
    for text, row in zip(texts, rows):
        if not forbidden.keys().isdisjoint(row):
            name = next(forbidden[number] for number in row if number in forbidden)
            raise KieloError(
                f"{tokenizer.folder}: this tokenizer writes its control token {name!r} within a text, which "
                f"begins {text[:40]!r}; it probably stands for unknown characters too: use a tokenizer that "
                "keeps them apart"
            )
    return rows


def decode(tokenizer: TextTokenizer, rows: Sequence[Sequence[int]]) -> list[str]:
    """The texts back, special tokens included."""
    return tokenizer.whole.decode_batch([list(row) for row in rows], skip_special_tokens=False)


def special_token(path: Path, key: str) -> str | None:
    """What tokenizer_config.json or special_tokens_map.json calls a token such as `eos_token`; None where it
    does not say.

    Raises KieloError naming file and key for what is no name.
    """
    value = read_object(path).get(key)
    name = value.get("content") if isinstance(value, dict) else value  # older files spell out an AddedToken
    if value is not None and not isinstance(name, str):
        raise KieloError(
            f"{path}: {key} = {str(value)[:60]} does not fit; expected the text of one token, or null"
        )
    return name or None


def _end_of_text_in(folder: Path) -> str:
    names = (special_token(folder / file, "eos_token") for file in CONFIG_FILES)
    return next(filter(None, names), END_OF_TEXT)
