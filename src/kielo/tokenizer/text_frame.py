"""The control tokens that a tokenizer's post-processor puts before and after each text.

Hugging Face's `tokenizer(text)` has them, so training and scoring put them around documents too. They are
read from tokenizer.json alone, as in transformers 5: `add_bos_token` in tokenizer_config.json has no effect.
"""

import json
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import hash_file, read_manifest, write_json_atomically, write_text_atomically
from kielo.artifact.stage_counts import TokenizerCounts
from kielo.artifact.stage_json import counts_of
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import AsTokenizer, Recipe
from kielo.tokenizer.control_tokens import read_object
from kielo.tokenizer.load import CONFIG_FILE, TOKENIZER_FILE, TextTokenizer, load_tokenizer, role_name


class TextFrame(NamedTuple):
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def text_frame(tokenizer: Tokenizer) -> TextFrame:
    encoding = tokenizer.encode("a", add_special_tokens=True)
    of_text = [place for place, is_special in enumerate(encoding.special_tokens_mask) if not is_special]
    first, last = (of_text[0], of_text[-1]) if of_text else (len(encoding.ids), len(encoding.ids))
    return TextFrame(tuple(encoding.ids[:first]), tuple(encoding.ids[last + 1 :]))


def ids_before_texts(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Return the ids that begin a document: those before a text, unless they are end-of-text alone (OPT)."""
    before = text_frame(tokenizer.whole).before
    return () if before == (tokenizer.whole.token_to_id(tokenizer.end_of_text),) else before


def ids_before_texts_of(folder: Path) -> tuple[int, ...]:
    """Read `ids_before_texts` from the manifest of a run's tokenizer, or else from the tokenizer."""
    manifest, path = read_manifest(folder), folder / TOKENIZER_FILE
    if manifest is not None and path.is_file():
        ids = counts_of(folder, manifest, TokenizerCounts).ids_before_texts
        if ids is not None and hash_file(path) == manifest.files[TOKENIZER_FILE].xxh3_128:
            return tuple(ids)
    return ids_before_texts(load_tokenizer(folder))


def write_frame(folder: Path, bos: AsTokenizer, eos: AsTokenizer) -> None:
    if bos == eos == "auto":
        return
    tokenizer = load_tokenizer(folder)
    before, after = (
        [name for number in ids if (name := tokenizer.whole.id_to_token(number)) is not None]
        for ids in text_frame(tokenizer.whole)
    )
    if bos != "auto":
        begin = role_name(tokenizer, "bos_token") or role_name(tokenizer, "cls_token")
        if bos and (begin is None or tokenizer.whole.token_to_id(begin) is None):
            raise KieloError(
                "tokenizer.bos = true: the tokenizer has no bos_token. Fix: name one of its tokens as "
                f"bos_token in its {CONFIG_FILE}"
            )
        before = [begin] if bos and begin else []
    if eos != "auto":
        after = [tokenizer.end_of_text] if eos else []
    content = read_object(folder / TOKENIZER_FILE)
    content["post_processor"] = _post_processor(content.get("post_processor"), tokenizer.whole, before, after)
    write_text_atomically(folder / TOKENIZER_FILE, json.dumps(content, indent=2, ensure_ascii=False))
    # transformers 4 and llama.cpp read these.
    flags = {"add_bos_token": bool(before), "add_eos_token": bool(after)}
    write_json_atomically(folder / CONFIG_FILE, read_object(folder / CONFIG_FILE) | flags)


def _post_processor(
    old: JsonTable | None, tokenizer: Tokenizer, before: list[str], after: list[str]
) -> JsonTable | None:
    """Return the JSON of a post-processor that puts these tokens around texts, with the offsets of `old`."""

    def framed(text: str, number: int) -> list[JsonTable]:
        first, last = (
            [{"SpecialToken": {"id": name, "type_id": number}} for name in names] for names in (before, after)
        )
        return [*first, {"Sequence": {"id": text, "type_id": number}}, *last]

    parts = [] if old is None else old["processors"] if old["type"] == "Sequence" else [old]
    parts = [part for part in parts if part["type"] == "ByteLevel"]
    ids = {name: tokenizer.token_to_id(name) for name in (*before, *after)}
    if ids:
        known = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in ids.items()}
        single, pair = framed("A", 0), framed("A", 0) + framed("B", 1)
        template = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known}
        parts.append(template)
    return None if not parts else parts[0] if len(parts) == 1 else {"type": "Sequence", "processors": parts}


def refuse_other_frame(recipe: Recipe, tokenizer: TextTokenizer) -> None:
    whole, found = tokenizer.whole, text_frame(tokenizer.whole)
    end, cls = tokenizer.end_of_text, role_name(tokenizer, "cls_token")
    # Documents end with end-of-text alone. Documents of encoders begin with `[CLS]`, if there is one.
    before: tuple[int | None, ...] = found.before
    fix = "tokenizer.eos = false"
    afters = [(), (whole.token_to_id(end),)]
    if recipe.train.objective == "masked_tokens" and not recipe.corpus.token_sources and cls is not None:
        before, afters = (whole.token_to_id(cls),), afters[1:]
        fix = "tokenizer.bos = true and tokenizer.eos = true"
    if found.before == before and found.after in afters:
        return
    said = [
        " ".join(str(whole.id_to_token(number)) for number in ids if number is not None) or "nothing"
        for ids in (*found, before)
    ]
    raise KieloError(
        f"{tokenizer.folder}: the post-processor puts {said[0]} before a text and {said[1]} after it, but "
        f"documents are packed with {said[2]} before and {end} after them. Fix: {fix}"
    )
