"""`kielo show` and `kielo data`: the values of a recipe, and the documents of a step. No torch."""

import argparse
import json
from functools import reduce
from operator import getitem
from typing import Any

from kielo.artifact.manifest import read_manifest
from kielo.artifact.metrics import METRICS_NAME, PassedOver, of_kind, read_metrics
from kielo.artifact.token_sources import list_token_files
from kielo.artifact.weights_folder import tokenizer_here, weights_here
from kielo.cli.flags import takes
from kielo.cli.ideas import STAND_INS
from kielo.cli.terminal import print_json, print_table
from kielo.corpus.fetch import local_files
from kielo.dataset.document_packer import begin_of_documents, packed_begin_of_documents
from kielo.dataset.query import documents_of_step
from kielo.plan.idea import with_usual_training
from kielo.recipe import cards
from kielo.recipe.errors import KieloError
from kielo.recipe.read import NOT_GIVEN, Read, read_recipe, run_folder
from kielo.recipe.sections import Recipe
from kielo.resolve import complete_model
from kielo.resolve.overview import overview_of_recipe
from kielo.resolve.resolve import case_before_text, resolve
from kielo.resolve.rules import LAYOUT_RULES, complaints
from kielo.resolve.shares import uneven_steps
from kielo.resolve.text import imagined_text
from kielo.tokenizer.load import TOKENIZER_FILE, decode, load_tokenizer, role_name

_SHOWN_FILES = 6


@takes("""
    $ kielo show demo_estonian --set train.tokens=1000000
    RECIPE
    --json
""")
def show(options: argparse.Namespace) -> None:
    read = read_recipe(options.recipe, options.sets, STAND_INS)
    if set(read.origins.values()) <= {"default", NOT_GIVEN}:  # an empty file is not an idea
        read = read_recipe(options.recipe, options.sets)
    values = _values_in_force(read)
    if options.json:
        return print_json(values)
    print_table(("", ""), _overview_rows(read))
    rows = [(key, _short_json(entry["value"]), entry["origin"]) for key, entry in values.items()]
    print_table(["key", "value", "from"], rows)
    if files := values["corpus.sources"].get("files"):
        print_table(["source", "files"], [(name, _files_in_words(of)) for name, of in files.items()])


def _files_of_sources(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return source → its files, read and not read, or why none is read. Only of sources on this machine."""
    found: dict[str, dict[str, Any]] = {}
    for source in recipe.corpus.sources:
        if not (source.local_path or source.tokens):
            continue
        try:
            if source.local_path:
                _, read, unread = local_files(source)
            else:
                paths, unread = list_token_files(source.name, source.tokens or "", source.leave_out)
                read = [path.name for path in paths]
            found[source.name] = {"read": read, "not_read": unread}
        except KieloError as problem:
            found[source.name] = {"problem": str(problem)}
    return found


def _files_in_words(files: dict[str, Any]) -> str:
    if "problem" in files:
        return files["problem"]
    told = []
    for what, key in (("read", "read"), ("not read", "not_read")):
        names = files[key]
        shown = ", ".join(names[:_SHOWN_FILES]) + (", …" if len(names) > _SHOWN_FILES else "")
        if names or key == "read":
            told.append(f"{len(names):,} {what}" + (f": {shown}" if shown else ""))
    return "; ".join(told)


def _values_in_force(read: Read) -> dict[str, dict[str, Any]]:
    """Return every key's value and origin. `not_in_force` has the value that was replaced.

    model.weights replaces keys of [model], tokenizer.path keys of [tokenizer]. A value is None if the recipe
    lacks it, if it is in weights that are not on this machine, or if nothing uses it.
    """
    content, model = read.recipe.model_dump(mode="json"), read.recipe.model
    values: dict[str, dict[str, Any]] = {}
    for key, origin in read.origins.items():
        value = None if origin == NOT_GIVEN else reduce(getitem, key.split("."), content)
        values[key] = {"value": value, "origin": origin}
    for name in complete_model.overridden_by_tokenizer(read.recipe.tokenizer):
        given = values[f"tokenizer.{name}"]
        size = complete_model.size_of_ready_tokenizer(read.recipe.tokenizer) if name == "vocab_size" else None
        values[f"tokenizer.{name}"] = {"value": size, "origin": "tokenizer.path"}
        if given["origin"] != "default":
            values[f"tokenizer.{name}"]["not_in_force"] = given
    is_given = read.origins["corpus.sources"] != NOT_GIVEN
    if is_given and (files := _files_of_sources(read.recipe)):
        values["corpus.sources"]["files"] = files
    if model.weights is None:
        return values
    overridden = complete_model.overridden_by_weights(model)
    found = complete_model.model_of_weights_here(model)
    of_weights = found.model_dump(mode="json") if found else {}
    for name in (name for name in type(model).model_fields if name not in complete_model.KEPT_BESIDE_WEIGHTS):
        given = values[f"model.{name}"]
        values[f"model.{name}"] = {"value": of_weights.get(name), "origin": "model.weights"}
        if name in overridden:
            values[f"model.{name}"]["not_in_force"] = given
    return values


def _short_json(value: Any) -> str:
    """Return the value as JSON, tables of a list without their empty keys."""
    if isinstance(value, list):
        value = [
            {key: one for key, one in entry.items() if one not in (None, "", [])}
            if isinstance(entry, dict)
            else entry
            for entry in value
        ]
    return json.dumps(value, ensure_ascii=False)


def _overview_rows(read: Read) -> list[tuple[str, str]]:
    """Return the facts of the run, or why they are unknown: `show` also answers for unfinished recipes."""
    recipe, rows = read.recipe, []
    weights = recipe.model.weights
    try:
        if missing := [key for key, origin in read.origins.items() if origin == NOT_GIVEN]:
            rows.append(("an idea", f"`kielo run` needs {', '.join(missing)} too"))
            recipe, filled = with_usual_training(recipe, is_idea=True)
            rows += [("for a plan", line) for line in filled]
        if replaced := complete_model.overridden_in_words(recipe.model):
            rows.append(("weights", replaced))
        if weights is not None and weights_here(weights) is None:
            return [("model", f"from {weights}, which `kielo train` fetches"), *rows]
        return [
            *overview_of_recipe(recipe).rows(),
            *_document_rows(recipe),
            *(
                ("layout", f"not possible: {said}")
                for said in complaints(case_before_text(recipe), LAYOUT_RULES)
            ),
            *_uneven_rows(recipe),
            *rows,
        ]
    except KieloError as error:
        return [("model", f"not possible: {error}"), *rows]


def _document_rows(recipe: Recipe) -> list[tuple[str, str]]:
    """Return how documents begin and end, of a decoder with a ready tokenizer on this machine."""
    ready, tokens = recipe.tokenizer.ready, run_folder(recipe) / "tokens"
    folder = ready and tokenizer_here(ready)
    if recipe.train.objective == "masked_tokens" or not folder or not (folder / TOKENIZER_FILE).is_file():
        return []
    tokenizer, why = load_tokenizer(folder), "by the tokenizer's post-processor"
    if read_manifest(tokens) is not None:
        begin, why = packed_begin_of_documents(tokens, folder), f"as {tokens} was packed"
    elif recipe.corpus.token_sources:
        begin, why = (), "beside ready tokens, which stay as they are"
    elif recipe.tokenizer.bos == "auto":
        begin = begin_of_documents(recipe, folder)
    else:
        name, why = role_name(tokenizer, "bos_token"), "by tokenizer.bos"
        number = tokenizer.whole.token_to_id(name) if recipe.tokenizer.bos and name else None
        begin = () if number is None else (number,)
    names = " ".join(str(tokenizer.whole.id_to_token(number)) for number in begin)
    said = f"begin with {names}, " if names else "begin with their text, "
    return [("documents", f"{said}{why}; end with {tokenizer.end_of_text}")]


def _uneven_rows(recipe: Recipe) -> list[tuple[str, str]]:
    """Return how ranks share the steps if they do not divide them, on each of the recipe's nodes."""
    site, rows = cards.cluster(recipe.cluster), []
    for nodes in (number for number in recipe.nodes if number <= site.nodes):
        device, ranks = cards.accelerator(site.accelerator).device, nodes * site.devices_per_node
        try:
            said = uneven_steps(resolve(recipe, "", ranks, device, text=imagined_text(recipe)))
        except KieloError as error:
            said = [f"not possible: {error}"]
        rows += [(f"batches on {nodes} nodes", sentence) for sentence in said]
    return rows


def _beginning(text: str, most: int = 40) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


@takes("""
    $ kielo data demo_estonian --step 17
    RECIPE
    --step STEP:int!  number of the optimiser step, from 1
    --json
""")
def data(options: argparse.Namespace) -> None:
    recipe = read_recipe(options.recipe, options.sets).recipe
    folder = run_folder(recipe)
    resolved = resolve(recipe, folder, world_size=1, device="cpu")
    tokenizer = load_tokenizer(folder / "tokenizer")
    if not 1 <= options.step <= resolved.identity.total_steps:
        raise KieloError(f"--step {options.step}: the run has steps 1 to {resolved.identity.total_steps}")
    identity = resolved.identity
    steps = identity.next_steps(options.step)
    phase = identity.phases[steps.phase_index]
    rows = documents_of_step(
        folder / "tokens",
        identity.seed,
        phase,
        identity.longest_sequence_length,
        resolved.placement.end_of_text_id,
        options.step,
        lambda ids: decode(tokenizer, [ids.tolist()])[0],
    )
    if options.json:
        return print_json(rows)
    rows = [row | {"text": _beginning(row["text"])} for row in rows]
    passed_over = ", skipped by train.skip_steps" if steps.is_skipped else ""
    if any(
        row.passed_over_for == "spike" and row.passed_over_from <= options.step <= row.step
        for row in of_kind(read_metrics(folder / "train" / METRICS_NAME), PassedOver)
    ):
        passed_over = ", skipped after a spike of the loss"
    print(f"step {options.step}, phase {phase.number}{passed_over}")
    print_table(list(rows[0]), [tuple(row.values()) for row in rows])
