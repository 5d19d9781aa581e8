"""Verbs that answer a question and change nothing (but `recipes --copy`). None needs torch."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from kielo.cli.terminal import print_json, print_table
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder, shipped_recipes


def show(options: argparse.Namespace) -> None:
    read = read_recipe(options.recipe, options.sets)
    values = {key: _value(read.recipe.model_dump(mode="json"), key) for key in read.origins}
    if options.json:
        return print_json({key: {"value": value, "origin": read.origins[key]} for key, value in values.items()})
    rows = [(key, json.dumps(value, ensure_ascii=False), read.origins[key]) for key, value in values.items()]
    print_table(["key", "value", "from"], rows)


def _value(content: Any, key: str) -> Any:
    for part in key.split("."):
        content = content[part]
    return content


def recipes(options: argparse.Namespace) -> None:
    shipped = shipped_recipes()
    if options.copy:
        if options.copy not in shipped:
            raise KieloError(f"no shipped recipe is called {options.copy!r}; there are: {', '.join(shipped)}")
        target = Path(shipped[options.copy].name)
        if target.exists():
            raise KieloError(f"{target} exists already; move it away first, nothing was written")
        shutil.copyfile(shipped[options.copy], target)
        print(f"wrote {target}; start it with: kielo run {target}")
        return
    rows = [(name, read_recipe(name).recipe.language, read_recipe(name).recipe.description) for name in shipped]
    if options.json:
        return print_json([dict(zip(("name", "language", "description"), row)) for row in rows])
    print_table(["recipe", "language", "what it makes"], rows)


def schema(options: argparse.Namespace) -> None:
    from kielo.recipe.schema import json_schema

    print_json(json_schema())


def clusters(options: argparse.Namespace) -> None:
    from kielo.recipe.cards import accelerator, cluster, clusters

    cards = [cluster(name) for name in clusters()]
    if options.json:
        return print_json([card.model_dump(mode="json") for card in cards])
    rows = [
        (card.name, card.accelerator, card.devices_per_node, card.nodes, accelerator(card.accelerator).peak_tflops.get("bf16"))
        for card in cards
    ]
    print_table(["cluster", "accelerator", "devices a node", "nodes", "peak bf16 TFLOP/s a device"], rows)


def languages(options: argparse.Namespace) -> None:
    from kielo.recipe.cards import language, languages

    cards = [language(code) for code in languages()]
    if options.json:
        return print_json([card.model_dump(mode="json") for card in cards])
    rows = [
        (card.code, card.name, card.script,
         ", ".join(f"{name} ≥ {value:g}" for name, value in card.document_language_threshold.items()))
        for card in cards
    ]
    print_table(["code", "language", "script", "document threshold"], rows)


def measure(options: argparse.Namespace) -> None:
    from kielo.tokenizer.load import load_tokenizer
    from kielo.tokenizer.measure import measure

    path = Path(options.text)
    if not path.is_file():
        raise KieloError(f"--text {path}: no such file; give a plain text file, one document a line")
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise KieloError(f"--text {path}: byte {error.start} is not UTF-8; convert it with iconv first") from None
    if not any(texts):
        raise KieloError(f"--text {path}: no text in it; give a plain text file, one document a line")
    figures = {folder: measure(load_tokenizer(Path(folder)), texts) for folder in options.tokenizers}
    if options.json:
        return print_json(figures)
    names = list(next(iter(figures.values())))
    print_table(["figure", *figures], [(name, *(_short(figures[folder][name]) for folder in figures)) for name in names])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def data(options: argparse.Namespace) -> None:
    from kielo.dataset.query import documents_of_step
    from kielo.plan.resolve import resolve

    recipe = read_recipe(options.recipe, options.sets).recipe
    folder = run_folder(recipe)
    resolved = resolve(recipe, folder, world_size=1, device="cpu")
    if not 1 <= options.step <= resolved.identity.total_steps:
        raise KieloError(f"--step {options.step}: the run has steps 1 to {resolved.identity.total_steps}")
    identity = resolved.identity
    index, _, is_skipped = identity.stretch(options.step)
    phase = identity.phases[index]
    rows = documents_of_step(
        folder / "tokens", identity.seed, phase, identity.longest_sequence_length, resolved.placement.end_of_text_id,
        options.step,
    )
    if options.json:
        return print_json(rows)
    passed_over = ", passed over as train.skip_steps says" if is_skipped else ""
    print(f"step {options.step}, phase {phase.number}{passed_over}")
    print_table(list(rows[0]), [tuple(row.values()) for row in rows])
