"""The recipe of a translated script: each key with its argument, and all arguments at the end."""

from collections.abc import Sequence
from typing import Any

from kielo.recipe import cards
from kielo.recipe.from_script.script_arguments import (
    NOT_HONOURED,
    TRANSLATED,
    UNDERSTOOD,
    Row,
    TranslatedScript,
    number_text,
)
from kielo.recipe.toml_text import toml_value

_TABLES = (
    "tokenizer",
    "dataset",
    "model",
    "layout",
    "train",
    "train.fp8",
    "checkpoint",
    "evaluate",
    "report",
)
_TITLES = {
    UNDERSTOOD: "Understood: a key has the value.",
    TRANSLATED: "Translated.",
    NOT_HONOURED: "Not honoured, and why.",
}
_ANYWHERE = ("gpu", "gpus", "accel", "normal", "workq", "batch", "main", "standard", "compute", "booster")
_WIDEST = 100


def cluster_of(partition: str) -> str | None:
    """Return the cluster with a queue of this name, if there is only one, and the name says something."""
    if not partition or partition in _ANYWHERE:
        return None
    found = [name for name in cards.clusters() if partition in _queues(name)]
    return found[0] if len(found) == 1 else None


def _queues(cluster: str) -> set[str]:
    jobs = cards.cluster(cluster).jobs
    return {queue.name for queue in jobs.partitions} if jobs else set()


def script_recipe(made_from: str, top: dict[str, Any], found: TranslatedScript) -> str:
    """Return the recipe. top: name, language, description and cluster."""
    tables: dict[str, list[str]] = {}
    for key, (value, origin) in found.keys.items():
        table, _, name = key.rpartition(".")
        if key not in ("corpus.sources", "dataset.mixture"):
            tables.setdefault(table, []).append(f"{name} = {number_text(value)}  # {_one_line(origin, 80)}")
    for table, lines in found.comments.items():
        tables.setdefault(table, []).extend(f"# {_one_line(line, 300)}" for line in lines)
    if found.phases:
        tables.setdefault("train", [])
    text = f"# Made by `kielo init {made_from}`. What became of each argument is at the end.\n"
    text += "".join(f"{name} = {number_text(value)}\n" for name, value in top.items())
    text += "".join(f"{line}\n" for line in tables.get("", [])) + _sources(found)
    for table in (*_TABLES, *(name for name in tables if name and name not in _TABLES)):
        if table in tables:
            text += f"\n[{table}]\n" + "".join(f"{line}\n" for line in tables[table])
        if table == "dataset" and "dataset.mixture" in found.keys:
            mixture, _ = found.keys["dataset.mixture"]
            text += "\n[dataset.mixture]\n"
            text += "".join(
                f"{toml_value(name)} = {number_text(weight)}\n" for name, weight in mixture.items()
            )
    for phase in found.phases:
        text += "\n[[phases]]\n" + "".join(
            f"{name} = {number_text(value)}\n" for name, value in phase.items()
        )
    return text + _listed(found.rows)


def _sources(found: TranslatedScript) -> str:
    if "corpus.sources" not in found.keys:
        place = 'tokens = "text_document"' if "tokenizer.path" in found.keys else 'path = "text/*.jsonl.zst"'
        why = "# The script names no text that is read here. Plans need none: fill in the place."
        return f"\n{why}\n[[corpus.sources]]\n{place}\n"
    text = ""
    for source in found.keys["corpus.sources"][0]:
        text += "\n[[corpus.sources]]\n" + "".join(
            f"{key} = {toml_value(value)}\n" for key, value in source.items()
        )
    return text


def _listed(rows: Sequence[Row]) -> str:
    text = "\n# What became of each argument, by line:\n"
    for verdict, title in _TITLES.items():
        text += f"#\n# {title}\n"
        for row in rows:
            if row.verdict == verdict:
                place = f"line {row.place}" if row.place else "no argument"
                text += f"#   {place}: {row_argument(row)}: {_one_line(row.meaning, 300)}\n"
    return text


def row_argument(row: Row) -> str:
    """Return the argument as one short line."""
    return _one_line(row.argument, _WIDEST)


def counted(rows: Sequence[Row]) -> str:
    return ", ".join(f"{sum(row.verdict == verdict for row in rows)} {verdict}" for verdict in _TITLES)


def _one_line(text: str, widest: int) -> str:
    text = "".join(character if character.isprintable() else " " for character in text)
    words = text.split()
    return text if len(text) <= widest else f"{text[: widest - 20].rstrip()} … ({len(words)} words)"
