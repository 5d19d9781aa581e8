"""A tokenizer as transformers' AutoTokenizer reads it, beside Kielo's reading: do both give the same ids?

Kielo reads tokenizer.json alone. AutoTokenizer also follows tokenizer_config.json, whose class can rebuild
the normaliser and the split of words, and whose keys can add tokens. So the ids of real text are compared,
but not of texts that spell a control token, which only Kielo takes for text.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from kielo.checkpoint.export_stage import tokenizer_files
from kielo.dataset.query import SampleDocument
from kielo.recipe.errors import KieloError
from kielo.tokenizer.chat_template import ChatTemplate, LaidOut, has_chat_template
from kielo.tokenizer.control_tokens import CONFIG_FILES, read_object
from kielo.tokenizer.load import CONFIG_FILE, TOKENIZER_FILE, TextTokenizer, encode, load_tokenizer, role_name
from kielo.tokenizer.text_frame import text_frame

PLAIN_CLASS = "PreTrainedTokenizerFast"  # reads tokenizer.json as it is, in transformers 4 and 5
CODE_FILE, CODE_CLASS = "plain_tokenizer.py", "plain_tokenizer.PlainTokenizer"
CODE = '''"""The tokenizer.json of this folder as it is."""

from transformers import PreTrainedTokenizerFast


class PlainTokenizer(PreTrainedTokenizerFast):
    """Keep the split of words of tokenizer.json, whatever model is beside it."""
'''
NOT_COMPARED = (
    "the tokenizer is not compared with transformers' AutoTokenizer yet: transformers is not installed here"
)
_OTHER_CONFIGS = ("special_tokens_map.json", "added_tokens.json")  # AutoTokenizer reads these too
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Keys of tokenizer_config.json by which no text gets other ids.
_HARMLESS = """
    chat_template clean_up_tokenization_spaces model_input_names model_max_length padding_side truncation_side
"""
_SHOWN, _SHOWN_CHARACTERS = 6, 40  # ids and characters at the first difference
# What real text may lack: a space at the beginning, several spaces, other scripts, composed letters.
ODD_TEXTS = (
    " a", "  two", "a  b   c", "\n", "\ta\n\n b\r\n", "Tere, maailm! See on ÕÄÖÜ šž.", "12345 3.14 1,000",
    "नमस्ते दुनिया", "สวัสดีชาวโลก", "你好，世界。", "e\u0301 é ﬁ Ⅳ", "👩‍👩‍👧 🇪🇪", "a\u00a0b\u200bc\u3000d",
    "_x__y ▁z", "don't I'LL",
    "def f(x):\n    return x  # ok\n", "https://a.b/c?d=e&f=%20", "ALL CAPS and lower", "a ", "x" * 40,
)  # fmt: skip
_ODD_CHAT = [
    {"role": "user", "content": " Tere!  Kuidas läheb?"},
    {"role": "assistant", "content": "Hästi,\n tänan."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
]


Files = Mapping[str, bytes]  # of a tokenizer, by name
Sample = Sequence[SampleDocument]


class Comparison(NamedTuple):
    """The result of a comparison. Texts that spell a control token are left out."""

    texts: int
    conversations: int
    left_out: int
    difference: str | None  # the first of the texts, the end token or the vocabulary, in words
    of_chats: str | None = None  # the first conversation with other ids
    of_template: str | None = None  # the first conversation that is rendered differently
    added: tuple[str, ...] = ()  # tokens without a row in the model

    @property
    def is_exact(self) -> bool:
        return not (self.difference or self.of_chats or self.added)


def is_installed() -> bool:
    return find_spec("transformers") is not None


def compare_folder(folder: Path, model_type: str | None, sample: Sample) -> tuple[str, list[str]]:
    """Compare AutoTokenizer's ids with Kielo's. Return a report and warnings; KieloError for other texts."""
    if not is_installed():
        return NOT_COMPARED, []
    from transformers import __version__

    tokenizer = load_tokenizer(folder)
    files = {name: path.read_bytes() for name, path in tokenizer_files(folder).items()}
    found = compare(files, None, tokenizer, sample)
    theirs = f"AutoTokenizer of transformers {__version__}"
    if found.difference:
        raise KieloError(
            f"{folder}: {theirs} gives other ids than Kielo, which reads {TOKENIZER_FILE} alone: "
            f"{found.difference}. An export would not have the ids that were trained. "
            + fix_in_words(files, tokenizer, sample)
        )
    agreed_files(files, model_type, tokenizer, sample)  # or the export would be refused after the training
    counts = {"texts": found.texts, "conversations": found.conversations}
    compared = " and ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "no text"
    compared = f"{counts['texts']:,} texts" if found.of_chats else compared
    said = f"{compared} have the same ids in transformers {__version__}"
    said += f" ({found.left_out:,} that spell a control token were left out)" * bool(found.left_out)
    mended = f"the export gets a {CONFIG_FILE} of {PLAIN_CLASS}, by which it is not so"
    warnings = []
    if found.of_chats:
        warnings.append(f"{theirs} gives other ids to conversations ({found.of_chats}); {mended}")
    if found.of_template:
        warnings.append(f"{theirs} renders conversations otherwise ({found.of_template})")
    if found.added:
        named = ", ".join(map(repr, found.added[:3])) + ", …" * (len(found.added) > 3)
        warnings.append(
            f"{theirs} adds {len(found.added):,} tokens to the vocabulary of the model ({named}), which "
            f"{CONFIG_FILE} or a file beside it names; {mended}"
        )
    return said, warnings


def compare(files: Files, model_type: str | None, tokenizer: TextTokenizer, sample: Sample) -> Comparison:
    """Compare AutoTokenizer's ids, beside a model of `model_type`, with the stored ids or with Kielo's."""
    kept = _without_control_tokens(tokenizer, sample)
    chats = [one for one in kept if one.messages] if has_chat_template(tokenizer.folder) else []
    texts = [one for one in kept if not one.messages]
    counts = (len(texts), len(chats), len(sample) - len(kept))
    encoded = zip(texts, encode(tokenizer, [one.text for one in texts]), strict=True)
    ours = [_bare(one.ids, tokenizer) if one.ids else ids for one, ids in encoded]
    laid_out = _laid_out(tokenizer, chats)
    try:
        theirs = _auto_tokenizer(files, model_type)
        difference = _difference(theirs, tokenizer, texts, ours)
        of_chats = _difference_of_chats(theirs, tokenizer, chats, laid_out)
    except Exception as problem:  # of any class of transformers
        return Comparison(*counts, f"AutoTokenizer does not read it ({type(problem).__name__}: {problem})")
    added = sorted(theirs.get_vocab().keys() - tokenizer.whole.get_vocab().keys())
    of_template = _difference_of_template(theirs, chats, laid_out)
    return Comparison(*counts, difference, of_chats, of_template, tuple(added))


def agreed_files(
    files: Files, model_type: str | None, tokenizer: TextTokenizer, sample: Sample
) -> dict[str, bytes]:
    for change in (lambda files, _: dict(files), plain_files, coded_files):
        found = compare(candidate := change(files, tokenizer), model_type, tokenizer, sample)
        if found.is_exact:
            return candidate
    raise KieloError(
        f"{tokenizer.folder}: transformers' AutoTokenizer gives other ids than the model is trained on, also "
        f"as {PLAIN_CLASS}: {found.difference or found.of_chats or found.added}"
    )


def plain_files(files: Files, tokenizer: TextTokenizer) -> dict[str, bytes]:
    """Return the files with a tokenizer_config.json by which AutoTokenizer reads tokenizer.json as it is."""
    plain = {name: content for name, content in files.items() if name not in _OTHER_CONFIGS}
    config = json.loads(files.get(CONFIG_FILE, b"{}"))
    added = {one.content for one in tokenizer.whole.get_added_tokens_decoder().values() if one.special}
    control = set(tokenizer.for_text.control_tokens.values()) | added
    roles = {role: name for role in _ROLES if (name := role_name(tokenizer, role)) in control}
    others = (control & added) - set(roles.values())
    written = {"tokenizer_class": PLAIN_CLASS, "clean_up_tokenization_spaces": False}
    written |= {key: config[key] for key in _HARMLESS.split() if key in config} | roles
    if others:
        by_id = sorted(others, key=lambda name: tokenizer.whole.token_to_id(name) or 0)
        written["additional_special_tokens"] = by_id
    splits = read_object(tokenizer.folder / TOKENIZER_FILE).get("pre_tokenizer") or {}
    if "add_prefix_space" in splits:  # transformers 4 sets it to False without the key
        written["add_prefix_space"] = splits["add_prefix_space"]
    return plain | {CONFIG_FILE: json_bytes(written)}


def coded_files(files: Files, tokenizer: TextTokenizer) -> dict[str, bytes]:
    """Return the plain files with a class of their own, or transformers 5 takes a Qwen 2 model's class."""
    plain = plain_files(files, tokenizer)
    config = json.loads(plain[CONFIG_FILE]) | {"auto_map": {"AutoTokenizer": [None, CODE_CLASS]}}
    return plain | {CONFIG_FILE: json_bytes(config), CODE_FILE: CODE.encode()}


def fix_in_words(files: Files, tokenizer: TextTokenizer, sample: Sample) -> str:
    """Return the change of the configuration by which AutoTokenizer gives Kielo's ids, tried out."""
    config = json.loads(files.get(CONFIG_FILE, b"{}")) | {"tokenizer_class": PLAIN_CLASS}
    said = f'Fix: "tokenizer_class": "{PLAIN_CLASS}" in {CONFIG_FILE} of tokenizer.path, or of a copy of it'
    by_class = dict(files) | {CONFIG_FILE: json_bytes(config)}
    if compare(by_class, None, tokenizer, sample).difference is None:
        return said
    plain = plain_files(files, tokenizer)
    if compare(plain, None, tokenizer, sample).difference is not None:
        return f"Fix: another tokenizer, as {PLAIN_CLASS} gives other ids too"
    dropped = sorted(config.keys() - json.loads(plain[CONFIG_FILE]).keys())
    return f"{said}, without {', '.join([*dropped, *(name for name in _OTHER_CONFIGS if name in files)])}"


def _auto_tokenizer(files: Mapping[str, bytes], model_type: str | None) -> Any:
    from transformers import AutoTokenizer

    with TemporaryDirectory() as place:
        folder = Path(place)
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        if model_type is not None:
            (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _without_control_tokens(tokenizer: TextTokenizer, sample: Sample) -> list[SampleDocument]:
    """Leave out texts that spell a control token, perhaps after the normaliser."""
    names = [*tokenizer.for_text.control_tokens.values(), *tokenizer.for_text.hidden_names]
    pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")
    normalizer = tokenizer.whole.normalizer
    normalise = (lambda text: text) if normalizer is None else normalizer.normalize_str
    return [one for one in sample if not pattern.search(one.text) and not pattern.search(normalise(one.text))]


def _laid_out(tokenizer: TextTokenizer, chats: Sequence[SampleDocument]) -> list[LaidOut]:
    if not chats:
        return []
    ours = ChatTemplate(tokenizer).lay_out([(one.place, one.messages or []) for one in chats])
    return [
        replace(laid_out, ids=_bare(one.ids or laid_out.ids, tokenizer))
        for one, laid_out in zip(chats, ours, strict=True)
    ]


def _difference(theirs: Any, tokenizer: TextTokenizer, texts: Sample, ours: list[list[int]]) -> str | None:
    for one, our_ids in zip(texts, ours, strict=True):
        their_ids = list(theirs(one.text, add_special_tokens=False, verbose=False).input_ids)
        if their_ids != our_ids:
            return _in_words(one, our_ids, their_ids, tokenizer, theirs)
    return next(_other_differences(theirs, tokenizer), None)


def _other_differences(theirs: Any, tokenizer: TextTokenizer) -> Iterator[str]:
    """Yield differences that show in every text: tokens around it, its end, the tokens of ids."""
    around, whole = [theirs("a").input_ids, tokenizer.whole.encode("a").ids], tokenizer.whole
    if around[0] != around[1]:
        yield f"the ids of 'a' with the tokens around a text are {around[1]} here and {around[0]} there"
    role = next((role for role in ("eos_token", "sep_token") if role_name(tokenizer, role)), None)
    end, their_end = whole.token_to_id(tokenizer.end_of_text), getattr(theirs, f"{role}_id") if role else None
    if their_end is not None and their_end != end:
        yield (
            f"documents end with {end} ({tokenizer.end_of_text!r}) here, and its {role} is {their_end} "
            f"({theirs.convert_ids_to_tokens(their_end)!r}): {' and '.join(CONFIG_FILES)} may name two"
        )
    vocabulary = theirs.get_vocab()
    for name, number in sorted(whole.get_vocab().items(), key=lambda item: item[1]):
        if vocabulary.get(name) != number:
            yield f"the token {name!r} has the id {number} here and {vocabulary.get(name)} there"


def _difference_of_chats(
    theirs: Any, tokenizer: TextTokenizer, chats: Sample, laid_out: Sequence[LaidOut]
) -> str | None:
    for one, ours in zip(chats, laid_out, strict=True):
        found = _bare(theirs(ours.text, add_special_tokens=False, verbose=False).input_ids, tokenizer)
        if found != ours.ids:
            return _in_words(one, ours.ids, found, tokenizer, theirs)
    return None


def _difference_of_template(theirs: Any, chats: Sample, laid_out: Sequence[LaidOut]) -> str | None:
    for one, ours in zip(chats, laid_out, strict=True):
        try:
            rendered = theirs.apply_chat_template(one.messages, tokenize=False)
        except Exception as problem:  # of jinja2, and of the template itself
            return f"{one.place}: {type(problem).__name__}: {problem}"
        if rendered != ours.text:
            first = len(os.path.commonprefix([rendered, ours.text]))
            here, there = (text[first : first + _SHOWN_CHARACTERS] for text in (ours.text, rendered))
            return f"{one.place}: from character {first} on {here!r} here and {there!r} there"
    return None


def _bare(ids: Sequence[int], tokenizer: TextTokenizer) -> list[int]:
    ids, before = list(ids), list(text_frame(tokenizer.whole).before)
    end = tokenizer.whole.token_to_id(tokenizer.end_of_text)
    if before and ids[: len(before)] == before:
        ids = ids[len(before) :]
    return ids[:-1] if ids and ids[-1] == end else ids


def _in_words(
    one: SampleDocument, ours: list[int], theirs: list[int], tokenizer: TextTokenizer, their_tokenizer: Any
) -> str:
    first = len(os.path.commonprefix([ours, theirs]))
    around = slice(max(0, first - _SHOWN // 2), first + _SHOWN)
    our_names = " ".join(str(tokenizer.whole.id_to_token(number)) for number in ours[around])
    their_names = " ".join(map(str, their_tokenizer.convert_ids_to_tokens(theirs[around])))
    return (
        f"{one.place}: {one.text[:60]!r}: from id {around.start} on {ours[around]} ({our_names}) here and "
        f"{theirs[around]} ({their_names}) there"
    )


def odd_sample(tokenizer: TextTokenizer) -> list[SampleDocument]:
    """Return texts that real text may lack, and a conversation, if the tokenizer takes them."""
    text = "\n".join(one["content"] for one in _ODD_CHAT)
    sample = [SampleDocument("a made-up text", text) for text in ODD_TEXTS]
    if has_chat_template(tokenizer.folder):
        sample.append(SampleDocument("a made-up conversation", text, _ODD_CHAT))
    taken = []
    for one in sample:
        with suppress(KieloError):
            _laid_out(tokenizer, [one]) if one.messages else encode(tokenizer, [one.text])
            taken.append(one)
    return taken


def json_bytes(content: object) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
