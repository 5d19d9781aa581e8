"""Control tokens of a ready tokenizer, and a copy of the tokenizer in which no text encodes to them.

Libraries read a control token wherever a text spells it: as an added token, after a normaliser has made it of
other characters, or because the model's vocabulary has it (Unigram and WordPiece look words up in it). So in
the tokenizer that encodes documents every control token has a random name that nobody can have written. Ids
stay, and all other added tokens (words of a domain, runs of spaces) keep working.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from tokenizers import Tokenizer

from kielo.artifact.json_object import JsonTable
from kielo.recipe.errors import KieloError

CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
CHAT_TEMPLATE_FILE = "chat_template.jinja"
# Control tokens whatever their flags: no word is spelled like this.
_ALWAYS_CONTROL = re.compile(r"<\|.*\|>|<｜.*｜>", re.DOTALL)
_MARKUP = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_BYTE_OR_CHARACTER = re.compile(r".|<0x[0-9A-Fa-f]{2}>", re.DOTALL)


def control_tokens(folder: Path, end_of_text: str) -> frozenset[str]:
    """Return the folder's special tokens, and tokens by their role, form, or use in the chat template."""
    configs, path = [read_object(folder / name) for name in CONFIG_FILES], folder / CHAT_TEMPLATE_FILE
    template = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    # One text, or a list of {"name", "template"}.
    template += "".join(str(config.get("chat_template") or "") for config in configs)
    found = {end_of_text}.union(*map(_named_in, configs))
    for token in read_object(folder / "tokenizer.json").get("added_tokens") or []:
        name = token["content"]
        in_template = bool(_MARKUP.fullmatch(name)) and name in template
        if token.get("special") or _ALWAYS_CONTROL.fullmatch(name) or in_template:
            found.add(name)
    # A byte or a single character is always text.
    return frozenset(name for name in found if not _BYTE_OR_CHARACTER.fullmatch(name))


class TextOnly(NamedTuple):
    tokenizer: Tokenizer
    control_tokens: dict[int, str]  # without the token for unknown characters, unless it ends documents
    hidden_names: dict[str, str]  # of each in `tokenizer`, which nobody can have written


def without_control_tokens(whole: Tokenizer, folder: Path, end_of_text: str) -> TextOnly:
    control = control_tokens(folder, end_of_text)
    if end_of_text not in control:
        raise KieloError(
            f"{folder}: the token {end_of_text!r}, which ends documents, is an ordinary character of texts. "
            "Fix: another eos_token in tokenizer_config.json"
        )
    content = json.loads(whole.to_str())  # one form, whichever version wrote the file
    model = content["model"]
    unknown = unknown_token(model)
    if unknown is not None and not _BYTE_OR_CHARACTER.fullmatch(unknown):
        control |= {unknown}
    hidden = {name: f"<{token_hex(16)}>" for name in control}
    for token in content["added_tokens"]:
        token["content"] = hidden.get(token["content"], token["content"])
    if model["type"] == "Unigram":  # [token, log-probability] by id
        model["vocab"] = [[hidden.get(name, name), score] for name, score in model["vocab"]]
    else:
        model["vocab"] = {hidden.get(name, name): number for name, number in model["vocab"].items()}
    if model.get("unk_token"):
        model["unk_token"] = None if unknown is None else hidden.get(unknown, unknown)
    if "merges" in model:
        kept = (merge for merge in model["merges"] if control.isdisjoint([*merge, "".join(merge)]))
        model["merges"] = list(kept)
    content["post_processor"] = None  # it only puts control tokens around texts
    forbidden = control - {unknown} | {end_of_text}
    ids = {number: name for name in forbidden if (number := whole.token_to_id(name)) is not None}
    return TextOnly(Tokenizer.from_str(json.dumps(content)), ids, hidden)


def read_object(path: Path) -> JsonTable:
    """Read the JSON object in a file; {} without a file. Raises KieloError for a file of something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as problem:
        raise KieloError(f"{path}: not a JSON object ({problem})") from None
    if not isinstance(content, dict):
        raise KieloError(f"{path}: not a JSON object, but a {type(content).__name__}")
    return content


def _named_in(config: JsonTable) -> Iterator[str]:
    for key, value in config.items():
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        if key == "added_tokens_decoder":
            values = [token for token in values if isinstance(token, dict) and token.get("special")]
        elif key.endswith("_token"):
            values = [value]
        elif not key.endswith("_special_tokens"):
            values = []
        for token in values:
            name = token.get("content") if isinstance(token, dict) else token
            if isinstance(name, str) and name:
                yield name


def unknown_token(model: JsonTable) -> str | None:
    if model["type"] == "Unigram":
        return None if model["unk_id"] is None else model["vocab"][model["unk_id"]][0]
    return model.get("unk_token")
