"""Complaints about a recipe or a card: file and key, the given value, and the fix.

In: pydantic's errors and the origin of each value. Out: lines for people, all complaints at once.
"""

import difflib
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from kielo.recipe.errors import KieloError

# Characters that no name and no path can have, because they end a line of a script, a log or a table: C0 and
# C1 of Unicode, and its own ends of a line and a paragraph.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of each text in tables and lists, and of the keys themselves."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield key, str(name)
            yield from strings(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from strings(inner, f"{key}[{number}]")


# The fix, by pydantic's kind of error, if pydantic's own message is about Python.
_KINDS = {
    **dict.fromkeys(("int_from_float", "int_parsing", "int_type"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list in [ ]"),
    "string_type": "a text in quotes",
    "dict_type": "a table in { }",
    "model_type": "a table in { } with keys of its own",
    "too_short": "a list with one entry or more",
    "string_too_short": "a text that is not empty",
}
# Of required keys.
_EXAMPLES = {
    "name": 'name = "my_model"',
    "language": 'language = "fi" (see `kielo languages`)',
    "corpus": '[corpus] with sources = ["my_text.txt"]; `kielo plan` needs none',
    "corpus.sources": 'corpus.sources = ["my_text.txt"]',
}
# Keys by their names in other tools.
_CALLED_ELSEWHERE = {
    "lr": "train.learning_rate",
    "batch_size": "train.tokens_per_step",
    "epochs": "dataset.max_epochs",
    "steps": "train.tokens",
    "max_steps": "train.tokens",
    "num_layers": "model.num_hidden_layers",
    "seq_len": "dataset.sequence_length",
    "dtype": "train.precision",
    "gpus": "layout.shard",
    "tp": "layout.tensor",
    "pp": "layout.pipeline",
}


@dataclass(frozen=True)
class Complaint:
    """A complaint about the dotted keys `keys`. It may be false if another complaint is about one of them."""

    keys: tuple[str, ...]
    message: str


def dotted(location: Sequence[str | int]) -> str:
    """Return "corpus.sources[0].path" for ("corpus", "sources", 0, "path"); phases are numbered from 1."""
    key = ""
    for part in location:
        if key == "phases" and isinstance(part, int):
            key += f".{part + 1}"
        else:
            key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
    return key


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a recipe or a card, sections included."""
    for name, info in model.model_fields.items():
        yield prefix + name
        if section := _section(info):
            yield from keys_of(section, f"{prefix}{name}.")


def nearest_key(unknown: str, model: type[BaseModel]) -> str | None:
    """Return the known key that was probably meant: a sibling, else the same word in another section."""
    known = list(keys_of(model))
    if (called := _CALLED_ELSEWHERE.get(unknown.rpartition(".")[2].lower())) in known:
        return called
    parent, _, leaf = re.sub(r"\[\d+\]", "", unknown).rpartition(".")
    siblings = [key for key in known if key.rpartition(".")[0] == parent]
    words = set(leaf.split("_"))
    sharing = [key for key in siblings if words & set(key.rpartition(".")[2].split("_"))]
    stages = ((siblings, 0.75), (known, 0.85), (sharing, 0.0), (siblings, 0.6), (known, 0.65))
    for candidates, cutoff in stages:
        by_leaf = {key.rpartition(".")[2]: key for key in reversed(candidates)}
        if close := difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=cutoff):
            return by_leaf[close[0]]
    return None


def did_you_mean(given: str, known: Mapping[str, Sequence[str]]) -> str:
    """Return "; did you mean lumi_g?", or "" if no name is near. known: name → its other names."""
    called = {
        word: name
        for name, others in known.items()
        for other in (name, *others)
        for word in (other.lower(), *other.lower().split())
    }
    asked = given.lower()
    beginning = [name for other, name in called.items() if asked and other.startswith(asked)]
    near = difflib.get_close_matches(asked, called, n=1)
    found = called.get(asked) or (beginning[0] if beginning else called[near[0]] if near else None)
    return f"; did you mean {found}?" if found else ""


def from_validation(
    error: ValidationError, model: type[BaseModel], origin: Callable[[str], str]
) -> list[Complaint]:
    """Return a complaint for each of pydantic's errors. origin: dotted key → its file, or --set."""
    entries = error.errors(include_url=False)
    parents = {entry["loc"][:length] for entry in entries for length in range(len(entry["loc"]))}
    # A list with broken entries is also "too short" to pydantic. The entries' own complaints are better.
    entries = [entry for entry in entries if not (entry["type"] == "too_short" and entry["loc"] in parents)]
    return [_explain(entry, model, origin) for entry in entries]


def refuse(subject: str, complaints: Sequence[Complaint]) -> None:
    lines = list(dict.fromkeys(complaint.message for complaint in complaints))
    if len(lines) == 1:
        raise KieloError(lines[0])
    if lines:
        listed = "".join(f"\n  - {line}" for line in lines)
        raise KieloError(f"{len(lines)} things to put right in {subject}:{listed}")


def _explain(entry: Any, model: type[BaseModel], origin: Callable[[str], str]) -> Complaint:
    key, kind = dotted(entry["loc"]), entry["type"]
    where = origin(key)
    if kind == "extra_forbidden":
        near = _nearest_of_list_item(entry["loc"]) or nearest_key(key, model)
        listed = (
            "`kielo schema --of recipe` lists" if "corpus" in model.model_fields else "the shipped cards have"
        )
        hint = f"the nearest known key is {near}" if near else f"{listed} the known keys"
        return Complaint((key,), f"{where}: unknown key {key}; {hint}")
    if kind == "missing":
        example = _EXAMPLES.get(key)
        hint = f". Fix: {example}" if example else " and has no default"
        return Complaint((key,), f"{where}: {key} is missing{hint}")
    section = _section(model.model_fields.get(key))
    if kind in ("model_type", "dict_type") and section is not None:
        example = next(iter(section.model_fields))
        return Complaint(
            (key,),
            f"{where}: {key} = {_short(entry['input'])} does not fit, because {key} is a section. Fix: a key "
            f"of it, such as {key}.{example}",
        )
    if kind == "string_pattern_mismatch":
        return Complaint((key,), f"{where}: {key} = {_short(entry['input'])} does not fit. {_name(entry)}")
    fix = _in_words(entry)
    if entry["type"] == "literal_error" and isinstance(entry["input"], str):
        choices = re.findall(r"'([^']*)'", entry["ctx"]["expected"])
        fix += did_you_mean(entry["input"], {choice: [] for choice in choices})
    given = "" if isinstance(entry["input"], dict | BaseModel) else f" = {_short(entry['input'])}"
    info = field_of(key, model)
    default = None if info is None or info.is_required() else info.get_default(call_default_factory=True)
    if default is not None:
        fix += f" (default: {_short(default)})"
    separator = ". " if fix.startswith("Fix") else ": "
    return Complaint((key,), f"{where}: {key}{given} does not fit{separator}{fix}")


def _in_words(entry: Any) -> str:
    kind, message = entry["type"], entry["msg"]
    if kind == "float_parsing" and re.fullmatch(r"\d+,\d+", entry["input"]):
        return f"Fix: {entry['input'].replace(',', '.')}"
    if kind == "string_too_long":
        return f"Fix: at most {entry['ctx']['max_length']} characters"
    if kind in _KINDS:
        return f"Fix: {_KINDS[kind]}"
    fix = re.sub(r"^(Input should be|Value error,)\s*", "", message)
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        fix = f"a number {fix}"
    return f"Fix: {fix}" if message.startswith("Input should be") else fix


def _nearest_of_list_item(location: Sequence[str | int]) -> str | None:
    """Return the nearest key inside an entry of a list of sections: [[corpus.sources]] or [[phases]]."""
    *parents, leaf = location
    if not parents or not isinstance(parents[-1], int):
        return None
    from kielo.recipe.sections import Phase, Source

    section = Phase if parents[0] == "phases" else Source
    close = difflib.get_close_matches(str(leaf), section.model_fields, n=1)
    return dotted((*parents, close[0])) if close else None


def _name(entry: Any) -> str:
    pattern, given = entry["ctx"]["pattern"], entry["input"]
    without_accents = unicodedata.normalize("NFKD", given).encode("ascii", "ignore").decode()
    likely = re.sub(r"[^A-Za-z0-9_.-]+", "_", without_accents).strip("_.-")
    for candidate in (likely, likely.lower()):
        if re.fullmatch(pattern, candidate):
            return f"Fix: {candidate}"
    return "Fix: Latin letters without accents, digits, and _ . - inside of a name"


def field_of(key: str, model: type[BaseModel]) -> FieldInfo | None:
    """Return the field of a dotted key, or None if there is none."""
    *sections, leaf = key.split(".")
    for name in sections:
        section = _section(model.model_fields.get(name))
        if section is None:
            return None
        model = section
    return model.model_fields.get(leaf)


def _section(info: FieldInfo | None) -> type[BaseModel] | None:
    kind = info.annotation if info else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
