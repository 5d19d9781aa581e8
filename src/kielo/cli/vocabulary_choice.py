"""Keep, extend or replace a model's vocabulary: table and decision of `kielo tokenizer measure`. No torch."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kielo.artifact.weights_folder import resolve_weights
from kielo.cli.ideas import STAND_INS, check_nodes
from kielo.models.families import read_hf_config
from kielo.models.proportions import count
from kielo.plan.idea import usual_training
from kielo.plan.vocabulary_choice import (
    Advice,
    Choice,
    Pricing,
    Vocabulary,
    check_rows,
    embedding_share,
    kind_of,
    recipe_tokens,
)
from kielo.recipe.amounts import parse_amount, short_amount
from kielo.recipe.cards import cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import full_phases
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import CompleteModel, Recipe
from kielo.report.units import format_bytes
from kielo.resolve.complete_model import complete_model, is_shape_of_absent_weights
from kielo.tokenizer.load import TextTokenizer, vocabulary_size
from kielo.tokenizer.make_row_map import make_row_map

_ENDINGS = ("KB", "MB", "GB", "TB")  # of --bytes


def advise(
    options: argparse.Namespace, tokenizers: Mapping[str, TextTokenizer], figures: dict[str, dict[str, Any]]
) -> Advice | None:
    """Return the choices between tokenizers, or None for one tokenizer, and without an amount of text.

    Also add the embedding's share to the figures of each tokenizer.
    """
    recipe, model = _recipe_and_model(options, next(iter(tokenizers.values())))
    vocabularies = _vocabularies(model, tokenizers, figures)
    for of in vocabularies:
        figures[of.name]["embedding_share"] = embedding_share(model, of.size)
    relearn = None if options.relearn is None else _amount("--relearn", options.relearn)
    tokens = recipe_tokens(recipe)
    if options.bytes is not None:
        text_bytes = float(_amount("--bytes", options.bytes))
    elif tokens is not None:
        text_bytes = tokens * vocabularies[0].bytes_per_token
    else:
        return None
    if len(vocabularies) < 2:
        return None
    pricing = Pricing(recipe, model, _nodes(options, recipe))
    return Advice(text_bytes, [pricing.choice(of, text_bytes, relearn) for of in vocabularies])


def _recipe_and_model(options: argparse.Namespace, kept: TextTokenizer) -> tuple[Recipe, CompleteModel]:
    """Return the training of --model and its complete shape, with its own vocabulary."""
    sets = [f'cluster="{options.cluster}"'] if options.cluster else []
    size = vocabulary_size(kept)
    if options.model.startswith(("hf:", "megatron:")) or (Path(options.model) / "config.json").is_file():
        model = read_hf_config(resolve_weights(options.model))
        usual = usual_training(count(model))
        length = min(usual.sequence_length, model.max_position_embeddings)
        step = usual.tokens_per_step // length * length
        sets += [f"dataset.sequence_length={length}", f"train.tokens_per_step={step}"]
        recipe = read_recipe(None, sets, STAND_INS).recipe
    else:
        recipe = read_recipe(options.model, sets, STAND_INS).recipe
        if recipe.model.weights and not is_shape_of_absent_weights(recipe.model):
            model = read_hf_config(resolve_weights(recipe.model.weights))
        else:
            rows = recipe.model.vocab_size or size
            model = complete_model(recipe, full_phases(recipe), rows, is_imagined=True)
    check_rows(model, kept, size)
    return recipe, model


def _vocabularies(
    model: CompleteModel, tokenizers: Mapping[str, TextTokenizer], figures: Mapping[str, Mapping[str, Any]]
) -> list[Vocabulary]:
    kept, found = next(iter(tokenizers.values())), []
    for name, tokenizer in tokenizers.items():
        kind, of = kind_of(kept, tokenizer), figures[name]
        new_rows, size = 0, model.vocab_size
        if kind != "keep":
            made, size = make_row_map(kept, tokenizer, "mean"), vocabulary_size(tokenizer)
            new_rows = len(made.rows) - made.copied
        per_token, english = of["bytes_per_token"], of.get("english_tokens")
        found.append(Vocabulary(name, kind, size, per_token, new_rows, english))
    return found


def _nodes(options: argparse.Namespace, recipe: Recipe) -> int | None:
    """Return the nodes to plan on, or None without a machine."""
    site = cluster(recipe.cluster)
    if options.nodes is not None:
        check_nodes(options.nodes, [options.nodes], site)
    elif options.cluster:
        if site.nodes > 1:
            raise KieloError(f"--cluster {site.name} has 1 to {site.nodes} nodes; how many? Fix: --nodes 16")
        return 1
    return options.nodes or next(iter(recipe.nodes), None)


def _amount(flag: str, text: str) -> int:
    has_ending = text.upper().endswith(_ENDINGS)
    try:
        number = parse_amount(text[:-1] if has_ending else text)
    except ValueError:
        number = 0
    if number < 1:
        raise KieloError(f"{flag} {text!r} is not an amount. Fix: {flag} 40G")
    return number


def in_words(advice: Advice) -> str:
    """Return the decision and its reason."""
    kept, best = advice.choices[0], advice.best
    unit, text = _unit(advice), format_bytes(advice.text_bytes)
    if best is kept:
        return (
            f"Keep {kept.vocabulary.name}: no other choice saves a twentieth of its {_figure(kept.cost)} "
            f"{unit}, for {text} of text."
        )
    verb = {"keep": "Take", "extend": "Extend to", "replace": "Replace by"}[best.vocabulary.kind]
    return (
        f"{verb} {best.vocabulary.name}: {short_amount(best.text_tokens)} tokens in place of "
        f"{short_amount(kept.text_tokens)} ({best.text_tokens / kept.text_tokens - 1:+.0%}), and "
        f"{_figure(best.cost)} {unit} in place of {_figure(kept.cost)} ({best.cost / kept.cost - 1:+.0%}) "
        f"with the training of its new rows, for {text} of text."
    )


def choice_rows(advice: Advice) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """Return titles and a row for each choice; if English was measured, with its change of tokens."""
    unit, english = _unit(advice), advice.choices[0].vocabulary.english_tokens
    titles = ("", "tokenizer", "tokens", unit, "new rows", "tokens for them", f"{unit} for them")
    rows = []
    for one in advice.choices:
        of, pays_from = one.vocabulary, advice.pays_from_bytes(one)
        pays = "never" if pays_from is None else format_bytes(pays_from)
        text = (short_amount(one.text_tokens), _figure(one.text_cost), f"{of.new_rows:,}")
        relearning = (short_amount(one.relearn_tokens), _figure(one.relearn_cost), _figure(one.cost))
        row = [of.kind, of.name, *text, *relearning, "–" if one is advice.choices[0] else pays]
        if english:
            row.append(f"{of.english_tokens / english - 1:+.0%}" if of.english_tokens else "–")
        rows.append(tuple(row))
    return (*titles, f"{unit} in all", "pays from", *(["English tokens"] if english else [])), rows


def _unit(advice: Advice) -> str:
    return "FLOPs" if advice.choices[0].text_hours is None else "device-hours"


def _figure(cost: float) -> str:
    if not cost:
        return "0"
    return f"{cost:.3g}" if cost >= 1e6 else f"{cost:,.{0 if cost >= 100 else 1}f}"


def choice_json(choice: Choice) -> dict[str, Any]:
    content = asdict(choice)
    return content.pop("vocabulary") | content
