"""Writes docs/recipe.md, the reference of all recipe keys, by `python docs/reference.py`.

In: the sections of kielo.recipe.sections and their JSON Schema. Out: a Markdown page. Needs no torch.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from kielo.recipe.schema import json_schema
from kielo.recipe.sections import BatchRamp, Layout, LayoutOnNodes, Phase, Recipe, Section, TrainSchedule
from kielo.resolve.resolved import Identity, Placement

MOST_CHOICES = 100  # that are listed
PAGE = Path(__file__).resolve().parent / "recipe.md"
HEAD = """# Recipe keys

<!-- written by docs/reference.py from src/kielo/recipe/sections.py; do not edit by hand -->

A recipe is a TOML file. Its keys, what they default to, and what becomes of them:

* **identity**: what is trained. Each checkpoint stores it, and a change of it is refused.
* **schedule**: it becomes phases of steps and segments of the learning rate, which are in the identity.
* **placement**: where and how the run computes. It may change whenever the run is started again.
* **stage**: read by one stage, which runs again when the key changes (the training data of a checkpoint is
  never replaced).

`extends = "NAME or FILE"` starts from another recipe. `--set train.tokens=1_000_000` sets a key on the
command line; `kielo show RECIPE` prints each value with its origin, and `kielo schema --of recipe` writes the
JSON Schema for an editor.

Relative paths start at the folder in which `kielo` is started. A run remembers this folder: `kielo run RUN`
from another folder is refused if a path of its recipe leads elsewhere there.

A key without effect is refused, with its condition ("Only with ..." below). It is no mistake if a recipe that
extends it, or `--set`, removes the condition.

`languages = ["et", "fi"]`, outside all tables and in place of `language`, is a run for each language. In
every text `{language}` is the code of the run's language, even if a recipe has only one. A source whose own
language is in the list belongs to that language's run alone.

`[variants.NAME]` is a run for each NAME, such as sizes of a model: its values replace the recipe's key by
key, and in every text `{variant}` is the name. `--set variant=NAME` chooses a run. A variant of a shipped
recipe also has a name of its own, `RECIPE_NAME`: `fingpt_13b`. `kielo run`, `plan`, `launch`, `status` and
`cancel` take languages or variants as a whole.
"""


# Keys whose class has several kinds, or none: what `resolve` makes of them.
OTHERS = {
    "Recipe": {"folder": "placement", "cluster": "placement", "machine": "placement"},
    "LayoutOnNodes": dict.fromkeys(("cluster", "nodes", "micro_batch_sequences", "layout"), "placement"),
    "Dataset": {"sequence_length": "schedule", "mixture": "schedule", "max_epochs": "schedule"},
}


# Sections inside another section that have their table elsewhere.
REPEATED: dict[type[Section], tuple[type[Section], ...]] = {LayoutOnNodes: (Layout,)}


class Kinds(NamedTuple):
    """The sections that the identity, the schedule and the placement hold whole, or a part of them."""

    identity: list[type]
    schedule: list[type]
    placement: list[type]

    def of(self, section: type[Section], name: str) -> str:
        """Returns what becomes of a key, by the class that declares it."""
        declared_in = next(base for base in section.__mro__ if name in vars(base).get("__annotations__", {}))
        for kind, classes in self._asdict().items():
            if declared_in in classes:
                return kind
        return OTHERS.get(declared_in.__name__, {}).get(name, "stage")


class Table(NamedTuple):
    """One table of a recipe: its TOML head, its section, and its class's entry in the JSON Schema."""

    head: str
    section: type[Section]
    schema: dict[str, Any]


def page() -> str:
    """Returns the page: a table of keys for each table of a recipe, in the order of the sections."""
    kinds = Kinds(_sections_of(Identity), [TrainSchedule, BatchRamp, Phase], _sections_of(Placement))
    schema = json_schema()
    parts = [HEAD]
    for table in _tables("", Recipe, schema, schema["$defs"]):
        rows = [
            f"| `{name}` | {_type(table.schema['properties'][name], schema)} | {_default(name, table)} "
            f"| {kinds.of(table.section, name)} | {_cell(info.description or '')} |"
            for name, info in table.section.model_fields.items()
            if _section(info.annotation) in (None, *REPEATED.get(table.section, ()))
        ]
        if rows:
            head = ["| key | type | default | becomes | meaning |", "|---|---|---|---|---|"]
            parts.append("\n".join([f"## {table.head or 'Outside all tables'}", "", *head, *rows]) + "\n")
    return "\n".join(parts)


def _sections_of(resolved: type[BaseModel]) -> list[type]:
    """The sections that a resolved description extends, those that it embeds, and those inside them."""
    found = [base for base in resolved.__mro__[1:] if issubclass(base, Section) and base is not Section]
    for info in resolved.model_fields.values():
        if inner := _section(info.annotation):
            found += [inner, *_sections_of(inner)]
    return found


def _tables(path: str, section: type[Section], schema: dict, classes: dict) -> Iterator[Table]:
    name = path.removesuffix("[]")
    head = f"[[{name}]]" if path.endswith("[]") else f"[{name}]" if name else ""
    yield Table(head, section, schema)
    for key, info in section.model_fields.items():
        inner = _section(info.annotation)
        if inner and inner not in REPEATED.get(section, ()):
            one = f"{name}.{key}" if name else key
            several = "[]" if inner is not info.annotation and _is_list(schema["properties"][key]) else ""
            yield from _tables(one + several, inner, classes[inner.__name__], classes)


def _is_list(schema: dict[str, Any]) -> bool:
    return any(one.get("type") == "array" for one in [schema, *schema.get("anyOf", [])])


def _section(annotation: Any) -> type[Section] | None:
    """Return the section that a key holds: alone, in a tuple, or optional."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    inner = [found for one in get_args(annotation) if (found := _section(one))]
    return inner[0] if inner else None


def _type(schema: dict[str, Any], whole: dict[str, Any]) -> str:
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].rpartition("/")[2]]
    choices = schema.get("anyOf") or [schema]
    kinds = [_one_type(one) for one in choices if one.get("type") != "null"]
    return " or ".join(dict.fromkeys(kinds))


def _one_type(schema: dict[str, Any]) -> str:
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if len(schema.get("enum", ())) > MOST_CHOICES:
        return f"one of {len(schema['enum'])} names"
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if schema.get("type") == "array":
        inner = schema.get("prefixItems")
        if inner:
            return "[" + ", ".join(_one_type(one).replace(", ", " or ") for one in inner) + "]"
        of = schema.get("items", {})
        return f"list of {_one_type(of)}" if of else "list"
    if schema.get("type") == "object":
        return "table"
    return {"integer": "whole number", "number": "number", "boolean": "true, false"}.get(
        schema.get("type", ""), "text"
    ) + _bounds(schema)


def _bounds(schema: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    return " " + ", ".join(bounds) if bounds else ""


def _default(name: str, table: Table) -> str:
    info = table.section.model_fields[name]
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if value is None or value in ((), {}, ""):
        return ""
    return f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
