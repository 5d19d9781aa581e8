"""Verbs that list shipped recipes, cards and schemas. Only `recipes --copy` writes a file."""

import argparse
import os
from pathlib import Path

from kielo.artifact.formats import FORMATS, schema_of
from kielo.artifact.manifest import write_text_atomically
from kielo.cli.flags import examples
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.recipe import cards
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_first_language, recipe_choices, shipped_recipes


def recipes_flags(parser: argparse.ArgumentParser) -> None:
    examples(parser, "kielo recipes --copy demo_estonian")
    parser.add_argument("--copy", metavar="NAME", help="copy this recipe into the current folder")
    parser.add_argument("--json", action="store_true")


def recipes(options: argparse.Namespace) -> None:
    shipped = shipped_recipes()
    if options.copy:
        if options.copy not in shipped:
            raise KieloError(f"--copy {options.copy}: no shipped recipe. Fix: one of {', '.join(shipped)}")
        target = Path(shipped[options.copy].name)
        if os.path.lexists(target):
            raise KieloError(f"{target} exists already, and nothing was written. Fix: move it away")
        write_text_atomically(target, shipped[options.copy].read_text(encoding="utf-8"))
        print_text(f"wrote {target}. To start: kielo run {target}")
        return
    rows = [_recipe_row(name) for name in shipped]
    if options.json:
        return print_json([dict(zip(("name", "language", "description"), row, strict=True)) for row in rows])
    print_table(["recipe", "language", "what it makes"], rows)


def _recipe_row(name: str) -> tuple[str, str, str]:
    choices, recipe = recipe_choices(name), read_first_language(name).recipe
    kind = choices[0].partition("=")[0] if choices else ""
    language = {
        "": recipe.language,
        "language": f"{len(choices)} languages",
        "variant": f"{recipe.language}, {len(choices)} variants",
    }
    return name, language[kind], recipe.description


def schema_flags(parser: argparse.ArgumentParser) -> None:
    examples(parser, "kielo schema", "kielo schema --of recipe > recipe.schema.json")
    parser.add_argument(
        "--of",
        choices=FORMATS,
        metavar="NAME",
        help=f"name of a format to print: {', '.join(FORMATS)}. Default: a table of all",
    )


def schema(options: argparse.Namespace) -> None:
    if options.of:
        return print_json(schema_of(options.of))
    rows = [(name, format.file, format.content) for name, format in FORMATS.items()]
    print_table(["format", "file", "content"], rows)


def clusters_flags(parser: argparse.ArgumentParser) -> None:
    examples(parser, "kielo clusters")
    parser.add_argument("--json", action="store_true")


def clusters(options: argparse.Namespace) -> None:
    known = [cards.cluster(name) for name in cards.clusters()]
    if options.json:
        return print_json([card.model_dump(mode="json") for card in known])
    rows = [
        (
            card.name,
            card.accelerator,
            card.devices_per_node,
            card.nodes,
            cards.accelerator(card.accelerator).peak_tflops.get("bf16"),
        )
        for card in known
    ]
    print_table(["cluster", "accelerator", "devices a node", "nodes", "peak bf16 TFLOP/s a device"], rows)


def languages_flags(parser: argparse.ArgumentParser) -> None:
    examples(parser, "kielo languages")
    parser.add_argument("--json", action="store_true")


def languages(options: argparse.Namespace) -> None:
    known = [cards.language(code) for code in cards.languages()]
    if options.json:
        return print_json([card.model_dump(mode="json") for card in known])
    rows = [
        (
            card.code,
            card.name,
            card.script,
            ", ".join(f"{name} ≥ {value:g}" for name, value in card.document_language_threshold.items()),
        )
        for card in known
    ]
    print_table(["code", "language", "script", "document threshold"], rows)
