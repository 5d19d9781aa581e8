"""A tokenizer as llama.cpp knows it: its tokens, their kinds, its merges, and the name of its split of words.

llama.cpp has no regular expressions of its own for a tokenizer: it names a split of words, and reads no
vocabulary with another split. So a tokenizer has a name here, or is refused.
"""

import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import gguf

from kielo.artifact.json_object import JsonTable
from kielo.checkpoint import llama_cpp
from kielo.checkpoint.export_stage import IdsProof
from kielo.recipe.errors import KieloError
from kielo.tokenizer.chat_template import end_of_answers, template_of
from kielo.tokenizer.control_tokens import read_object
from kielo.tokenizer.load import TOKENIZER_FILE, TextTokenizer, encode, end_of_text_id, role_id

_SHORT_FORMS, _WIDE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
_NARROW = "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
_ENDS = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
_BEFORE = "[^\\r\\n\\p{L}\\p{N}]?"


def _cased(short: str, digits: str) -> str:
    return f"{_BEFORE}{_WIDE}*{_NARROW}+{short}|{_BEFORE}{_WIDE}+{_NARROW}*{short}|{digits}{_SLASHED}"


_SLASHED = _ENDS.replace("\\r\\n]*", "\\r\\n/]*", 1)
# llama.cpp's name → the split in the tokenizer.json of the models that it is named for, and whether a word
# that is a token stays whole whatever the merges (src/llama-vocab.cpp of llama.cpp b11549).
_SPLITS = {
    "qwen35": (
        f"{_SHORT_FORMS}|{_BEFORE}[\\p{{L}}\\p{{M}}]+|\\p{{N}}" + _ENDS.replace("\\p{L}", "\\p{L}\\p{M}"),
        False,
    ),
    "qwen2": (f"{_SHORT_FORMS}|{_BEFORE}\\p{{L}}+|\\p{{N}}{_ENDS}", False),
    "llama-bpe": (f"{_SHORT_FORMS}|{_BEFORE}\\p{{L}}+|\\p{{N}}{{1,3}}{_ENDS}", True),
    "smaug-bpe": (f"{_SHORT_FORMS}|{_BEFORE}\\p{{L}}+|\\p{{N}}{{1,3}}{_ENDS}", False),
    "gpt-4o": (_cased(_SHORT_FORMS + "?", "\\p{N}{1,3}"), False),
    "tekken": (_cased("", "\\p{N}"), True),
    "bloom": (" ?[^(\\s|[.,!?…。，、।۔،])]+", False),
    # ByteLevel with its own split
    "gpt-2": ("'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", False),
}
_OTHER_SPELLING = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"


class Vocabulary(NamedTuple):
    """tokens: in the order of ids, as many as the model has rows. kinds: a gguf.TokenType each.

    split: llama.cpp's name of the split of words. roles: "bos", "eos", "pad", "unk", "eot" → id.
    """

    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    split: str
    roles: dict[str, int]
    adds_bos: bool
    chat_template: str | None


def read_vocabulary(tokenizer: TextTokenizer, rows: int) -> Vocabulary:
    """Read a tokenizer for a model with `rows` rows. Raise KieloError if llama.cpp has no such tokenizer."""
    path = tokenizer.folder / TOKENIZER_FILE
    content = read_object(path)
    split = split_name(content, path)
    control = tokenizer.for_text.control_tokens
    added = {token["id"] for token in content.get("added_tokens") or ()}
    names = {number: token for token, number in tokenizer.whole.get_vocab(with_added_tokens=True).items()}
    if beyond := [number for number in names if number >= rows]:
        raise KieloError(f"{path}: token {min(beyond)} has no row in the model, which has {rows:,}")
    kinds = [
        gguf.TokenType.UNUSED
        if number not in names
        else gguf.TokenType.CONTROL
        if number in control
        else gguf.TokenType.USER_DEFINED
        if number in added
        else gguf.TokenType.NORMAL
        for number in range(rows)
    ]
    roles = {role: role_id(tokenizer, f"{role}_token") for role in ("bos", "pad", "unk")}
    roles["eos"] = end_of_text_id(tokenizer)  # llama.cpp's default is 11
    roles["eot"] = end_of_answers(tokenizer)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
    begins = tokenizer.whole.encode("a", add_special_tokens=True).ids[:1]
    return Vocabulary(
        [names.get(number, f"[PAD{number}]") for number in range(rows)],
        [int(kind) for kind in kinds],
        merges,
        split,
        {role: number for role, number in roles.items() if number is not None},
        roles["bos"] is not None and begins == [roles["bos"]],
        template_of(tokenizer.folder),
    )


def split_name(content: JsonTable, path: Path) -> str:
    """Return llama.cpp's name for the split of words of a tokenizer.json. Raise KieloError if it has none."""
    model, split = content.get("model") or {}, content.get("pre_tokenizer") or {}
    parts = split.get("pretokenizers", [split]) if split.get("type") == "Sequence" else [split]
    kinds = [part.get("type") for part in parts]
    *cuts, last = parts
    fix = "Fix: export without --format gguf, and serve it with transformers or vLLM"
    if model.get("type") != "BPE" or kinds[-1:] != ["ByteLevel"] or model.get("byte_fallback"):
        kind = model.get("type")
        raise KieloError(
            f"{path}: a {kind} vocabulary that is not byte-level BPE. Kielo writes only those for llama.cpp. "
            f"{fix}"
        )
    unread = [
        what
        for what, is_there in (
            ("a normalizer", content.get("normalizer") is not None),
            ("add_prefix_space", last.get("add_prefix_space")),
            ("continuing_subword_prefix", model.get("continuing_subword_prefix")),
            ("end_of_word_suffix", model.get("end_of_word_suffix")),
        )
        if is_there
    ]
    if unread:
        raise KieloError(f"{path}: has {' and '.join(unread)}, which llama.cpp does not apply. {fix}")
    patterns = [_pattern(part) for part in cuts] + [_SPLITS["gpt-2"][0]] * last.get("use_regex", True)
    whole_words = bool(model.get("ignore_merges"))
    for name, (pattern, is_whole) in _SPLITS.items():
        if patterns == [pattern] and whole_words == is_whole:
            return name
    raise KieloError(
        f"{path}: llama.cpp has no name for its split of words {json.dumps(patterns, ensure_ascii=False)}. "
        f"It knows the splits {', '.join(_SPLITS)}. {fix}"
    )


def _pattern(part: JsonTable) -> str | None:
    found = part.get("pattern") or {}
    is_plain = part.get("type") == "Split" and part.get("behavior") == "Isolated" and not part.get("invert")
    return found["Regex"].replace(_OTHER_SPELLING, _SHORT_FORMS) if is_plain and "Regex" in found else None


def compare_ids(path: Path, tokenizer: TextTokenizer, texts: Sequence[tuple[str, str]]) -> IdsProof:
    """Compare llama.cpp's ids of (place, text) with Kielo's, by the GGUF file's vocabulary."""
    if (program := llama_cpp.program()) is None:
        return IdsProof(None, 0, None)
    ours = encode(tokenizer, [text for _, text in texts])
    for (place, _), mine, their in zip(
        texts, ours, llama_cpp.ids_of(path, [text for _, text in texts]), strict=True
    ):
        if mine != their:
            pairs = enumerate(zip_longest(mine, their))
            at = next(number for number, (one, other) in pairs if one != other)
            ids = f"{mine[at : at + 6]} in Kielo and {their[at : at + 6]} in llama.cpp"
            return IdsProof(program, len(texts), f"{place}, from token {at} on: {ids}")
    return IdsProof(program, len(texts), None)
