"""The model card, `README.md` of an export, with front matter for the Hugging Face hub.

`render` makes the card of a run with results, from what `gather` found. `render_export` makes the card of one
exported checkpoint, from the checkpoint and the recipe. Both print the same instructions, which tests run.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kielo import __version__
from kielo.artifact.own_text import is_own_text, marked, write_own_text
from kielo.artifact.scores import MaskedScores, Scores
from kielo.artifact.tokenizer_files import RowMap
from kielo.artifact.verify_results import Parity
from kielo.artifact.weights_folder import is_on_hub
from kielo.checkpoint.export_stage import CARD_FILE, WantedExport
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import CompleteModel, Recipe, Source
from kielo.recipe.several_languages import languages_of
from kielo.report.gather import Gathered, Training
from kielo.report.units import HIDDEN_TOKENS, baseline_name, format_bytes
from kielo.resolve.overview import Overview


def write_model_card(folder: Path, card: str) -> None:
    """Write the card into the folder of an export, unless a person has changed the card there."""
    path = folder / CARD_FILE
    if path.exists() and not is_own_text(path):
        print(f"{path} was changed by hand and is kept", file=sys.stderr)
    elif not path.exists() or path.read_text(encoding="utf-8") != marked(card):
        write_own_text(path, card)


def render(gathered: Gathered) -> str:
    recipe, overview = gathered.recipe, gathered.overview
    is_encoder, is_hybrid = recipe.train.objective == "masked_tokens", recipe.train.causal_share > 0
    model, weights = overview.model if overview else recipe.model, recipe.model.weights
    base_model = weights.removeprefix("hf:").partition("@")[0] if weights and is_on_hub(weights) else None
    parts = [
        _front_matter(recipe, base_model, is_encoder),
        f"# {_plain(recipe.name)}",
        _plain(recipe.description),
        f"A {_kind(is_encoder, is_hybrid)} language model for {_named_languages(recipe)}, made with "
        f"Kielo {gathered.kielo_version}.",
        _model(overview),
        _first_weights(weights, base_model, recipe.follows, gathered.row_map),
        _bits_per_byte(gathered.scores),
        _masked_tokens(gathered.masked_scores),
        _parity(gathered.parity),
        *_uses(model.model_type, is_hybrid, _first_prompt(gathered.scores)),
        _chat(recipe),
        _training(recipe, gathered.corpus, gathered.training),
        _limits(recipe),
    ]
    return _joined(parts)


@dataclass(frozen=True)
class Exported:
    """Facts of an exported checkpoint, as the checkpoint has them.

    model: complete. origin: "step 70". run: the run's name, None if the checkpoint does not name it. dtype:
    of the weights. is_hybrid: trained with causal sequences beside hidden tokens.
    """

    model: CompleteModel
    origin: str
    run: str | None
    dtype: str
    is_hybrid: bool = False


def render_export(exported: Exported, recipe: Recipe | None) -> str:
    """Return the card of an exported checkpoint as Markdown, without results, which may be of another
    checkpoint.

    recipe: None if it is not known. The card then has no licence, languages and sources.
    """
    model, run = exported.model, exported.run
    is_encoder = FAMILIES[model.model_type].is_encoder
    kind = f"{_kind(is_encoder, exported.is_hybrid)} language model"
    # A repository has its commit here, which a folder, that may be gone by now, has not.
    name, _, commit = (model.weights or "").removeprefix("hf:").partition("@")
    base_model = name if commit else None
    parts = [
        _front_matter(recipe, base_model, is_encoder),
        f"# {_plain(run) if run else f'A {kind}'}",
        _plain(recipe.description) if recipe else "",
        f"A {kind}{f' for {_named_languages(recipe)}' if recipe else ''} ({model.model_type}, weights in "
        f"{exported.dtype}): {exported.origin}{f' of the run {_plain(run)}' if run else ''}, exported by "
        f"`kielo` {__version__}.",
        _first_weights(model.weights, base_model, recipe.follows if recipe else None, None),
        *_uses(model.model_type, exported.is_hybrid, "…"),
        *((_chat(recipe), _training(recipe), _limits(recipe)) if recipe else ()),
    ]
    return _joined(parts)


def export_card(wanted: WantedExport, recipe: Recipe | None) -> str:
    """Return the card of an export as Markdown, from its checkpoint and the recipe of its run, if known."""
    index, identity = wanted.index, wanted.index.plain.identity
    averaged = index.plain.averaged_from
    origin = f"step {index.step}"
    if averaged:
        origin = f"the average of {len(averaged)} checkpoints up to step {index.step}"
    is_hybrid = identity.get("train", {}).get("causal_share", 0) > 0
    exported = Exported(wanted.model, origin, identity.get("name"), wanted.dtype, is_hybrid)
    return render_export(exported, recipe)


def loading_call(model_type: str, folder: str) -> str:
    """Return the Python expression that loads an export with the head that it was trained with."""
    family = FAMILIES[model_type]
    kind = "MaskedLM" if family.is_encoder else "CausalLM"
    return f'AutoModelFor{kind}.from_pretrained({folder}, dtype="auto"{_remote(model_type)})'


def _remote(model_type: str) -> str:
    return "" if FAMILIES[model_type].in_transformers else ", trust_remote_code=True"


def _joined(parts: list[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _kind(is_encoder: bool, is_hybrid: bool) -> str:
    return "masked and causal" if is_hybrid else "masked" if is_encoder else "causal"


def _uses(model_type: str, is_hybrid: bool, prompt: str) -> list[str]:
    """Return instructions to load and use the model, with code that runs unchanged."""
    is_encoder, remote = FAMILIES[model_type].is_encoder, _remote(model_type)
    folder = '\n\nfolder = "."  # this folder, or its name on the hub\n'
    if is_encoder and not is_hybrid:
        code = (
            f"from transformers import pipeline{folder}"
            f'fill_mask = pipeline("fill-mask", model=folder{remote})\n'
            "# The mask stands for a word and the space before it.\n"
            'print(fill_mask(f"…{fill_mask.tokenizer.mask_token} …"))'
        )
    else:
        text = 'f"…{tokenizer.mask_token} …"' if is_encoder else json.dumps(prompt, ensure_ascii=False)
        code = (
            f"from transformers import AutoModelFor{'Masked' if is_encoder else 'Causal'}LM, AutoTokenizer"
            f"{folder}tokenizer = AutoTokenizer.from_pretrained(folder{remote})\n"
            f"model = {loading_call(model_type, 'folder')}\n"
            f'inputs = tokenizer({text}, return_tensors="pt")\n'
        )
        code += (
            "place = inputs.input_ids[0].tolist().index(tokenizer.mask_token_id)\n"
            "print(tokenizer.decode(model(**inputs).logits[0, place - 1].topk(5).indices))"
            if is_encoder
            else f"print(tokenizer.decode({_GENERATED}))"
        )
    return ["## How to load it", f"```python\n{code}\n```", _both_uses() if is_hybrid else ""]


_GENERATED = "model.generate(**inputs, max_new_tokens=80, do_sample=True, top_k=50)[0]"


def _both_uses() -> str:
    return (
        "The output at each position is about the next token, as GPT-BERT's (Charpentier and Samuel 2024): "
        "the logits for a hidden token are at the position before it, and with a causal mask of attention "
        "the same weights continue text. Classes that expect the output at a position to be about that "
        "position must be changed."
    )


def _masked_tokens(scores: MaskedScores | None) -> str:
    if not scores:
        return ""
    shares = {"**this model**": scores.accuracy.model}
    shares |= {HIDDEN_TOKENS[name]: share for name, share in scores.accuracy.baselines().items()}
    rows = "\n".join(f"| {name} | {100 * share:.1f} % |" for name, share in shares.items())
    return (
        f"## Hidden tokens\n\n{scores.hidden_tokens:,} tokens of held-out text were hidden, "
        f"{100 * scores.masking_rate:g} % by {_plain(scores.masking)}; more is better. The baselines were "
        f"given the same training text.\n\n| | predicted |\n|---|--:|\n{rows}" + _measures_of_encoders(scores)
    )


def _measures_of_encoders(scores: MaskedScores) -> str:
    """Return the other measures that were taken, as sentences."""
    found = []
    if bits := scores.pseudo_bits_per_byte:
        found.append(
            f"Each token in turn hidden, the model needs {bits.token:.3f} bits per byte of held-out text; "
            f"with the later tokens of its word hidden too, {bits.within_word:.3f}."
        )
    if pairs := scores.minimal_pairs:
        found.append(
            f"Of {pairs.all.pairs:,} minimal pairs of {_plain(pairs.file)} it finds the good sentence "
            f"likelier in {100 * pairs.all.token:.1f} %, and in {100 * pairs.all.within_word:.1f} % with the "
            "later tokens of a word hidden too."
        )
    if tags := scores.part_of_speech:
        found.append(
            f"A linear classifier of its frozen states (layer {tags.layer}) finds the part of speech of "
            f"{100 * tags.accuracy:.1f} % of {tags.words:,} words; the most frequent tag of each word is "
            f"right in {100 * tags.baseline:.1f} %."
        )
    return "".join(f"\n\n{one}" for one in found)


def _front_matter(recipe: Recipe | None, base_model: str | None, is_encoder: bool) -> str:
    """Return YAML with scalars as JSON strings, which stay strings: a bare `no` would be false."""
    of_recipe, datasets = [], []
    if recipe:
        of_recipe = [
            f"license: {json.dumps(recipe.report.license)}",
            "language:",
            *(f"- {json.dumps(code)}" for code in _languages(recipe)),
        ]
        # Only text that certainly came from the hub; a Debian package may have been used in place of its
        # fallback.
        datasets = [source.huggingface_dataset for source in recipe.corpus.sources if _is_from_hub(source)]
    lines = [
        "---",
        *of_recipe,
        "library_name: transformers",
        *([f"base_model: {json.dumps(base_model)}"] if base_model else []),
        f"pipeline_tag: {'fill-mask' if is_encoder else 'text-generation'}",
    ]
    if datasets:
        lines += ["datasets:", *(f"- {json.dumps(name)}" for name in dict.fromkeys(datasets))]
    return "\n".join([*lines, "tags:", "- kielo", "---"])


def _first_weights(
    weights: str | None, base_model: str | None, follows: str | None, row_map: RowMap | None
) -> str:
    """Name the first weights of the training, without paths of the machine that had them.

    base_model: OWNER/NAME of the weights on the hub; None for others.
    """
    if weights is None:
        return ""
    if base_model:
        said = (
            f"The training began with the weights of {_plain(base_model)}, whose licence and terms hold too."
        )
    elif follows:
        said = f"The training began with the weights of another run, {_plain(Path(follows).stem)}."
    else:
        said = (
            "The training began with weights of a folder: name them and their licence here before this model "
            "is published."
        )
    if row_map is not None:
        said += (
            f" It has a new vocabulary of {len(row_map.rows):,} rows: {row_map.copied:,} began as the row of "
            f"the same text or role, {row_map.composed:,} as means of others, and {row_map.random:,} at "
            "random."
        )
    return f"## First weights\n\n{said}"


def _languages(recipe: Recipe) -> list[str]:
    others = (code for source in recipe.corpus.sources for code in languages_of(recipe, source))
    return list(dict.fromkeys([recipe.language, *others]))


def _named_languages(recipe: Recipe) -> str:
    codes = [f"`{_plain(code)}`" for code in _languages(recipe)]
    return ("the language " if len(codes) == 1 else "the languages ") + ", ".join(codes)


def _is_from_hub(source: Source) -> bool:
    return bool(source.huggingface_dataset and not source.debian_package and not source.path)


def _model(overview: Overview | None) -> str:
    if overview is None:
        return ""
    rows = "\n".join(f"| {name} | {_plain(value)} |" for name, value in overview.rows())
    return f"## Model\n\n| | |\n|---|---|\n{rows}"


def _bits_per_byte(scores: Scores | None) -> str:
    if scores is None or not (baselines := scores.bits_per_byte.baselines()):
        return ""
    contenders = {"**this model**": scores.bits_per_byte.model}
    contenders |= {baseline_name(name, scores): bits for name, bits in baselines.items()}
    rows = "\n".join(f"| {name} | {bits:.3f} |" for name, bits in contenders.items())
    return (
        f"## Held-out bits per byte\n\nOn {scores.heldout_documents:,} held-out documents "
        f"({format_bytes(scores.heldout_bytes)}); fewer is better. The baselines were given the same "
        f"training text.\n\n| | bits per byte |\n|---|--:|\n{rows}\n\nConvention: {scores.convention}; "
        f"sequence_length {scores.sequence_length}, stride {scores.stride}." + _by_set(scores)
    )


def _by_set(scores: Scores) -> str:
    """Return a table of bits per byte by source and language; "" for a run with one source."""
    if not scores.sets:
        return ""
    rows = "\n".join(
        f"| {_plain(one.name)} | {', '.join(one.languages)} | {one.bits_per_byte:.3f} |"
        for one in scores.sets
    )
    return f"\n\n| held-out set | languages | bits per byte |\n|---|---|--:|\n{rows}"


def _parity(parity: Parity | None) -> str:
    if not parity:
        return ""
    verdict = "Passed" if parity.passed else "Not passed"
    return (
        f"## Parity\n\n{verdict}: this architecture was trained in Kielo and in Hugging Face transformers, "
        f"from the same weights on the same samples with the same settings. Over {parity.steps} "
        f"optimiser steps the losses differ by at most {parity.max_relative_loss_difference:.1e} "
        f"(relative); {parity.limit_in_words()}." + (f" {parity.source.in_words()}" if parity.source else "")
    )


def _training(recipe: Recipe, corpus: dict[str, Any] | None = None, training: Training | None = None) -> str:
    lines = []
    for source in recipe.corpus.sources:
        lines.append(f"- Source: {_plain(_source(source))}{_conversations(source)}{_rights(source)}")
    if recipe.report.text_license:
        lines.append(f"- Licence of the text: {_plain(recipe.report.text_license)}")
    if corpus:
        lines.append(
            f"- After cleaning: {format_bytes(corpus['bytes_kept'])} in {corpus['documents_kept']:,} "
            f"documents, of {format_bytes(corpus['bytes_in'])} in {corpus['documents_in']:,}"
        )
    if training and training.steps:
        last = training.steps[-1]
        tokens = f", {last.tokens:,} tokens" if last.tokens else ""
        lines.append(f"- Training: {last.step:,} optimiser steps{tokens}")
    return "## Training text\n\n" + "\n".join(lines)


def _source(source: Source) -> str:
    """Name the origin of a source, without paths of the machine that had it."""
    parts = []
    if source.debian_package:
        parts.append(f"Debian package {source.debian_package}")
    if source.huggingface_dataset:
        subset = f" ({source.huggingface_subset})" if source.huggingface_subset else ""
        parts.append(f"Hugging Face dataset {source.huggingface_dataset}{subset}")
    if source.tokens:
        parts.append(f"ready tokens {source.name}")
    if source.path:
        parts.append(f"local text {source.name or Path(source.path).name}")
    return ", or where that is missing ".join(parts)


def _conversations(source: Source) -> str:
    if source.kind != "instructions":
        return ""
    return ": conversations" + (", trained on their answers alone" if source.loss == "answers" else "")


def _rights(source: Source) -> str:
    """Return the address and the licence of the source's text, if the recipe gives them."""
    address = f"; from {_plain(source.address)}" if source.address else ""
    return address + (f"; licence: {_plain(source.licence)}" if source.licence else "")


def _chat(recipe: Recipe) -> str:
    """Return instructions for a model that was trained on conversations; "" for others."""
    if not _instructions(recipe):
        return ""
    return (
        "A part of its training text are conversations, laid out by the tokenizer's chat template:\n\n"
        '```python\nchat = [{"role": "user", "content": "…"}]\n'
        "inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, "
        f'return_tensors="pt")\nprint(tokenizer.decode({_GENERATED}))\n```'
    )


def _instructions(recipe: Recipe) -> list[Source]:
    return [source for source in recipe.corpus.sources if source.kind == "instructions"]


def _limits(recipe: Recipe) -> str:
    if _instructions(recipe):
        does = "The model has learned from conversations; its answers were not tuned to what people prefer"
    elif recipe.train.objective == "masked_tokens":
        does = "The model predicts hidden tokens; it has not been taught a task"
    else:
        does = "The model continues text; it has not been taught to follow instructions"
    return f"## Limits\n\n{does}, and what it writes may be false or repeat what its training text holds."


def _first_prompt(scores: Scores | None) -> str:
    return scores.samples[0].prompt if scores and scores.samples else "…"


def _plain(text: str) -> str:
    """Escape characters that would begin a tag, a link or a code span in Markdown or HTML."""
    return "".join("\\" + char if char in "\\`*_[]<>|" else char for char in text)
