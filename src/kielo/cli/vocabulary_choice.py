"""Keep, extend or replace a model's vocabulary: table and words of `kielo tokenizer measure`. No torch."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kielo.cli.ideas import STAND_INS
from kielo.recipe.amounts import parse_amount, short_amount
from kielo.recipe.errors import KieloError

if TYPE_CHECKING:
    from kielo.plan.vocabulary_choice import Advice, Choice, Vocabulary
    from kielo.recipe.sections import CompleteModel, Recipe
    from kielo.tokenizer.load import TextTokenizer

_ENDINGS = ("KB", "MB", "GB", "TB")  # of --bytes


def advise(
    options: argparse.Namespace,
    tokenizers: Mapping[str, "TextTokenizer"],
    figures: dict[str, dict[str, Any]],
) -> "Advice | None":
    """Returns the choices between tokenizers; None for one tokenizer, and without an amount of text.

    Adds the embedding's share to the figures of each.
    """
    from kielo.plan.vocabulary_choice import Advice, Pricing, embedding_share, recipe_tokens

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


def _recipe_and_model(options: argparse.Namespace, kept: "TextTokenizer") -> tuple["Recipe", "CompleteModel"]:
    """Returns how --model is trained and its complete shape, with its own vocabulary."""
    from kielo.artifact.weights_folder import resolve_weights
    from kielo.models.families import read_hf_config
    from kielo.models.proportions import count
    from kielo.plan.idea import usual_training
    from kielo.plan.vocabulary_choice import check_rows
    from kielo.recipe.phases import full_phases
    from kielo.recipe.read import read_recipe
    from kielo.resolve.complete_model import complete_model
    from kielo.tokenizer.load import vocabulary_size

    sets = [f'cluster="{options.cluster}"'] if options.cluster else []
    size = vocabulary_size(kept)
    if options.model.startswith("hf:") or (Path(options.model) / "config.json").is_file():
        model = read_hf_config(resolve_weights(options.model))
        usual = usual_training(count(model))
        length = min(usual.sequence_length, model.max_position_embeddings)
        step = usual.tokens_per_step // length * length
        sets += [f"dataset.sequence_length={length}", f"train.tokens_per_step={step}"]
        recipe = read_recipe(None, sets, STAND_INS).recipe
    else:
        recipe = read_recipe(options.model, sets, STAND_INS).recipe
        if recipe.model.weights:
            model = read_hf_config(resolve_weights(recipe.model.weights))
        else:
            model = complete_model(recipe, full_phases(recipe), recipe.model.vocab_size or size)
    check_rows(model, kept, size)
    return recipe, model


def _vocabularies(
    model: "CompleteModel",
    tokenizers: Mapping[str, "TextTokenizer"],
    figures: Mapping[str, Mapping[str, Any]],
) -> list["Vocabulary"]:
    from kielo.plan.vocabulary_choice import Vocabulary, kind_of
    from kielo.tokenizer.load import vocabulary_size
    from kielo.tokenizer.make_row_map import make_row_map

    kept, found = next(iter(tokenizers.values())), []
    for name, tokenizer in tokenizers.items():
        kind, of = kind_of(kept, tokenizer), figures[name]
        new_rows, size = 0, model.vocab_size
        if kind != "keep":
            made, size = make_row_map(kept, tokenizer, "mean"), vocabulary_size(tokenizer)
            new_rows = len(made.rows) - made.copied
        found.append(Vocabulary(name, kind, size, of["bytes_per_token"], new_rows, of.get("english_tokens")))
    return found


def _nodes(options: argparse.Namespace, recipe: "Recipe") -> int | None:
    """Returns the nodes to plan on; None where no machine is asked for."""
    from kielo.recipe.cards import cluster

    site = cluster(recipe.cluster)
    if options.nodes is not None and not 1 <= options.nodes <= site.nodes:
        raise KieloError(
            f"--nodes {options.nodes}: {site.name} has 1 to {site.nodes} nodes; what would work: "
            f"{min(max(options.nodes, 1), site.nodes)}"
        )
    if options.nodes is None and options.cluster:
        if site.nodes > 1:
            raise KieloError(f"on how many nodes of {site.name}? For example --nodes 16; it has {site.nodes}")
        return 1
    return options.nodes or next(iter(recipe.nodes), None)


def _amount(flag: str, text: str) -> int:
    has_ending = text.upper().endswith(_ENDINGS)
    try:
        number = parse_amount(text[:-1] if has_ending else text)
    except ValueError:
        number = 0
    if number < 1:
        raise KieloError(f"{flag} {text!r} is no amount; what would work: {flag} 40G")
    return number


def in_words(advice: "Advice") -> list[str]:
    """Returns the recommendation and its reasons."""
    kept, best = advice.choices[0], advice.best
    if best is kept:
        lines = [f"Keep {kept.vocabulary.name}: no other choice saves a twentieth of its {_cost(kept)}."]
    else:
        verb = {"keep": "Take", "extend": "Extend to", "replace": "Replace by"}[best.vocabulary.kind]
        lines = [
            f"{verb} {best.vocabulary.name}: {short_amount(best.text_tokens)} tokens in place of "
            f"{short_amount(kept.text_tokens)} ({best.text_tokens / kept.text_tokens - 1:+.0%}), and "
            f"{_cost(best)} in place of {_figure(kept.cost)} ({best.cost / kept.cost - 1:+.0%}), with those "
            "that learn its new rows."
        ]
    lines += [_reason(advice, one) for one in advice.choices[1:] if one.vocabulary.kind != "keep"]
    return [
        *lines,
        "This counts compute, for text like the measured one. Which vocabulary learns more from the same "
        "text, held-out bits per byte of training with each say.",
    ]


def _reason(advice: "Advice", choice: "Choice") -> str:
    from kielo.report.units import format_bytes

    of, pays_from = choice.vocabulary, advice.pays_from_bytes(choice)
    line = (
        f"{of.name}: learning {of.new_rows:,} new rows with the body frozen takes "
        f"{short_amount(choice.relearn_tokens)} tokens, {_cost(choice, choice.relearn_cost)}"
    )
    if pays_from is None:
        line += "; its tokens of the text cost no less, so it never pays"
    else:
        line += (
            f"; it pays from {format_bytes(pays_from)} of text on, and there are "
            f"{format_bytes(advice.text_bytes)}"
        )
    english = advice.choices[0].vocabulary.english_tokens
    if english is not None and of.english_tokens is not None:
        line += f". English takes {of.english_tokens / english - 1:+.0%} tokens"
    return f"{line}."


def _cost(choice: "Choice", cost: float | None = None) -> str:
    unit = "FLOPs" if choice.text_hours is None else "device-hours"
    return f"{_figure(choice.cost if cost is None else cost)} {unit}"


def choice_rows(advice: "Advice") -> tuple[Sequence[str], list[Sequence[str]]]:
    unit = "FLOPs" if advice.choices[0].text_hours is None else "device-hours"
    titles = (
        "",
        "tokenizer",
        "tokens",
        unit,
        "new rows",
        "tokens for them",
        f"{unit} for them",
        f"{unit} in all",
    )
    rows = [
        (
            one.vocabulary.kind,
            one.vocabulary.name,
            short_amount(one.text_tokens),
            _figure(one.text_cost),
            f"{one.vocabulary.new_rows:,}",
            short_amount(one.relearn_tokens),
            _figure(one.relearn_cost),
            _figure(one.cost),
        )
        for one in advice.choices
    ]
    return titles, rows


def _figure(cost: float) -> str:
    if not cost:
        return "0"
    return f"{cost:.3g}" if cost >= 1e6 else f"{cost:,.{0 if cost >= 100 else 1}f}"


def choice_json(choice: "Choice") -> dict[str, Any]:
    content = asdict(choice)
    return content.pop("vocabulary") | content
