"""The model card, `README.md` of an export, with front matter for the Hugging Face hub.

`render` makes the card of a run with results, from what `gather` found. `render_export` makes the card of one
exported checkpoint, from the checkpoint and the recipe. `card.md.jinja` has the text of both.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from kielo import __version__
from kielo.artifact.durable import is_own_text, marked, write_own_text
from kielo.artifact.weights_folder import is_on_hub
from kielo.checkpoint.export_stage import CARD_FILE, WantedExport
from kielo.recipe.cards import language_code
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import CompleteModel, Recipe, Source
from kielo.recipe.several_languages import languages_of
from kielo.report.gather import Gathered
from kielo.report.progress import pair_rows
from kielo.report.units import fill_template, plain

_OF_RESULTS = ("overview", "row_map", "scores", "masked", "parity", "parity_on_ranks", "corpus", "training")


def write_model_card(folder: Path, card: str) -> None:
    """Write the card into the folder of an export, unless a person has changed the card there."""
    path = folder / CARD_FILE
    if path.exists() and not is_own_text(path):
        print(f"{path} was changed by hand and is kept", file=sys.stderr)
    elif not path.exists() or path.read_text(encoding="utf-8") != marked(card):
        write_own_text(path, card)


def render(gathered: Gathered) -> str:
    recipe, overview, scores = gathered.recipe, gathered.overview, gathered.scores
    weights = recipe.model.weights
    model_type = overview.model.model_type if overview else recipe.model.model_type
    is_encoder, is_hybrid = recipe.train.objective == "masked_tokens", recipe.train.causal_share > 0
    kind, languages = _kind(is_encoder, is_hybrid), _named_languages(recipe)
    return _card(
        recipe,
        model_type,
        is_encoder,
        is_hybrid,
        title=recipe.name,
        introduction=f"A {kind} for {languages}, made with Kielo {gathered.kielo_version}.",
        weights=weights,
        base_model=weights.removeprefix("hf:").partition("@")[0] if weights and is_on_hub(weights) else None,
        prompt=scores.samples[0].prompt if scores and scores.samples else "…",
        results=vars(gathered) | {"masked": gathered.masked_scores},
    )


def export_card(wanted: WantedExport, recipe: Recipe | None) -> str:
    """Return the card of an export as Markdown, from its checkpoint and the recipe of its run, if known."""
    index, identity = wanted.index, wanted.index.plain.identity
    averaged = index.plain.averaged_from
    origin = f"step {index.step}"
    if averaged:
        origin = f"the average of {len(averaged)} checkpoints up to step {index.step}"
    is_hybrid = identity.get("train", {}).get("causal_share", 0) > 0
    return render_export(recipe, wanted.model, origin, identity.get("name"), wanted.dtype, is_hybrid)


def render_export(
    recipe: Recipe | None, model: CompleteModel, origin: str, run: str | None, dtype: str, is_hybrid: bool
) -> str:
    """Return the card of an exported checkpoint. It omits results: they may belong to another checkpoint.

    Without a `recipe` the card has no licence, languages and sources. origin: such as "step 70". run: the
    run's name, None if the checkpoint does not name it. is_hybrid: the model was trained with causal
    sequences beside hidden tokens.
    """
    is_encoder = FAMILIES[model.model_type].is_encoder
    kind = _kind(is_encoder, is_hybrid)
    # Only a repository has its commit here. A folder may be gone by now.
    name, _, commit = (model.weights or "").removeprefix("hf:").partition("@")
    return _card(
        recipe,
        model.model_type,
        is_encoder,
        is_hybrid,
        title=run or f"A {kind}",
        introduction=f"A {kind}{f' for {_named_languages(recipe)}' if recipe else ''} ({model.model_type}, "
        f"weights in {dtype}): {origin}{f' of the run {plain(run)}' if run else ''}, exported by `kielo` "
        f"{__version__}.",
        weights=model.weights,
        base_model=name if commit else None,
    )


def loading_call(model_type: str, folder: str) -> str:
    """Return the Python expression that loads an export with the head that it was trained with."""
    family = FAMILIES[model_type]
    kind = "MaskedLM" if family.is_encoder else "CausalLM"
    return f'AutoModelFor{kind}.from_pretrained({folder}, dtype="auto"{_remote(model_type)})'


def _card(
    recipe: Recipe | None,
    model_type: str,
    is_encoder: bool,
    is_hybrid: bool,
    *,
    results: dict[str, Any] | None = None,
    prompt: str = "…",
    **texts: str | None,
) -> str:
    # Only text that certainly came from the hub: a Debian package may have replaced its fallback.
    sources = recipe.corpus.sources if recipe else ()
    from_hub = [one.huggingface_dataset for one in sources if not one.debian_package and not one.path]
    text = fill_template(
        "card.md.jinja",
        recipe=recipe,
        languages=card_languages(recipe) if recipe else (),
        datasets=list(dict.fromkeys(filter(None, from_hub))),
        follows=Path(recipe.follows).stem if recipe and recipe.follows else None,
        model_type=model_type,
        is_encoder=is_encoder,
        is_hybrid=is_hybrid,
        remote=_remote(model_type),
        prompt=json.dumps(prompt, ensure_ascii=False),
        loading_call=loading_call,
        origin=_origin,
        pair_rows=pair_rows,
        **{name: (results or {}).get(name) for name in _OF_RESULTS},
        **texts,
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def _remote(model_type: str) -> str:
    return "" if FAMILIES[model_type].in_transformers else ", trust_remote_code=True"


def _kind(is_encoder: bool, is_hybrid: bool) -> str:
    return f"{'masked and causal' if is_hybrid else 'masked' if is_encoder else 'causal'} language model"


def card_languages(recipe: Recipe) -> list[str]:
    others = (code for source in recipe.corpus.sources for code in languages_of(recipe, source))
    return list(dict.fromkeys(map(language_code, [recipe.language, *others])))


def _named_languages(recipe: Recipe) -> str:
    codes = [f"`{plain(code)}`" for code in card_languages(recipe)]
    return ("the language " if len(codes) == 1 else "the languages ") + ", ".join(codes)


def _origin(source: Source) -> str:
    """Name the origin of a source, without paths of the machine that had it."""
    parts = []
    if source.debian_package:
        parts.append(f"Debian package {source.debian_package}")
    if source.huggingface_dataset:
        subset = f" ({source.huggingface_subset})" if source.huggingface_subset else ""
        parts.append(f"Hugging Face dataset {source.huggingface_dataset}{subset}")
    if source.tokens:
        parts.append(f"ready tokens {source.name}")
    if source.address_of_files:
        parts.append(f"files of {source.address_of_files}")
    if source.local_path:
        parts.append(f"local text {source.name or Path(source.local_path).name}")
    return ", or where that is missing ".join(parts)
