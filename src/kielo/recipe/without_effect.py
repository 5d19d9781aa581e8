"""Keys that a recipe gives and that nothing reads, with the reason and the fix.

A key that has an effect only under a condition is a row of `CONDITIONS`. `check.py` refuses it if a person
gives it. Recipes that Kielo writes for a run and its jobs have every value, so nothing is refused there.
`models/families.py` refuses keys of [model] that a family lacks.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from pydantic import BaseModel

from kielo.recipe.learning_rate_schedules import LEARNING_RATE_SCHEDULES
from kielo.recipe.phases import OF_A_SEGMENT, FullPhase, full_phases, key_of_all_phases
from kielo.recipe.sections import Phase, Recipe
from kielo.recipe.several_languages import languages_of
from kielo.recipe.toml_text import TomlTable


class Idle(NamedTuple):
    """A key without effect, and the keys that decide this."""

    key: str
    decided_by: tuple[str, ...]
    message: str


class Condition(NamedTuple):
    """The condition of `keys`. advice: the words after "has no effect"."""

    keys: tuple[str, ...]
    decided_by: tuple[str, ...]
    holds: Callable[[Recipe], bool]
    advice: str


def without_effect(recipe: Recipe) -> Iterator[Idle]:
    """Yield the keys that the recipe gives and that have no effect, each once."""
    found: dict[str, Idle] = {}
    for keys, decided_by, holds, advice in (*CONDITIONS, *_of_phases(recipe)):
        for key in keys:
            if is_given(recipe, key) and not holds(recipe):
                said = f"{key} = {_value(recipe, key)} has no effect {advice}, or leave the key out"
                found.setdefault(key, Idle(key, decided_by, said))
    yield from found.values()


def layout_in_force(recipe: Recipe) -> TomlTable:
    idle = {found.key for found in without_effect(recipe)}
    values = recipe.layout.model_dump(mode="json", exclude_defaults=True)
    return {key: value for key, value in values.items() if f"layout.{key}" not in idle}


def _is_masked(recipe: Recipe) -> bool:
    return recipe.train.objective == "masked_tokens"


def _has_raw_text(recipe: Recipe) -> bool:
    return bool(recipe.corpus.of_raw_text.sources)


def _cleans(*kinds: str) -> Callable[[Recipe], bool]:
    def cleans(recipe: Recipe) -> bool:
        sources = recipe.corpus.of_raw_text.sources
        return any(source.kind in kinds and source.clean for source in sources)

    return cleans


def _changes(recipe: Recipe) -> set[str | None]:
    return {precision for _, precision in recipe.train.precision_changes}


def _decays(phase: FullPhase) -> bool:
    rate = phase.learning_rate
    return rate is not None and LEARNING_RATE_SCHEDULES[rate.schedule].has_decay_share


_SCHEDULES = " or ".join(f'"{name}"' for name, of in LEARNING_RATE_SCHEDULES.items() if of.has_decay_share)


def _row(keys: str, decided_by: str, holds: Callable[[Recipe], bool], advice: str) -> Condition:
    return Condition(tuple(keys.split()), tuple(decided_by.split()), holds, advice)


CONDITIONS = (
    _row(
        "train.masking train.masking_rate train.final_masking_rate evaluate.pseudo_tokens",
        "train.objective",
        _is_masked,
        'with train.objective = "next_token", which hides no tokens. Fix: train.objective = "masked_tokens"',
    ),
    _row(
        "evaluate.ngram_order evaluate.sample_tokens evaluate.temperature evaluate.top_k evaluate.made_pairs "
        "evaluate.fluency_texts",
        "train.objective train.causal_share",
        lambda recipe: not _is_masked(recipe) or recipe.train.causal_share > 0,
        'with train.objective = "masked_tokens": such a model is measured by hidden tokens. '
        "Fix: train.causal_share above 0",
    ),
    _row(
        "evaluate.tasks",
        "train.objective train.causal_share",
        lambda recipe: not _is_masked(recipe) or recipe.train.causal_share > 0 or not recipe.evaluate.tasks,
        'with train.objective = "masked_tokens": tasks ask for the likelihood of continuations. '
        "Fix: train.causal_share above 0",
    ),
    _row(
        "evaluate.shots evaluate.task_limit evaluate.task_seed evaluate.task_chat evaluate.task_folders",
        "evaluate.tasks",
        lambda recipe: bool(recipe.evaluate.tasks),
        'without evaluate.tasks. Fix: evaluate.tasks = ["NAME"]',
    ),
    _row(
        "evaluate.every_steps",
        "evaluate.tasks train.objective",
        lambda recipe: (
            not recipe.evaluate.every_steps or (bool(recipe.evaluate.tasks) and not _is_masked(recipe))
        ),
        "without evaluate.tasks that the model in training is asked. Fix: evaluate.every_steps = 0",
    ),
    _row(
        "evaluate.top_k",
        "evaluate.temperature",
        lambda recipe: recipe.evaluate.temperature > 0,
        "with evaluate.temperature = 0, which takes the likeliest token. Fix: a temperature above 0",
    ),
    _row(
        "evaluate.part_of_speech.from_layer evaluate.part_of_speech.pieces",
        "evaluate.part_of_speech.train",
        lambda recipe: bool(recipe.evaluate.part_of_speech.train),
        "without evaluate.part_of_speech.train, the text that tags are learned from. "
        "Fix: evaluate.part_of_speech.train = FILE.conllu",
    ),
    _row(
        "layout.pipeline_schedule layout.pipeline_stages_per_rank layout.pipeline_layers",
        "layout.pipeline",
        lambda recipe: recipe.layout.pipeline > 1,
        "with layout.pipeline = 1, which is no pipeline. Fix: layout.pipeline of 2 or more",
    ),
    _row(
        "layout.sequence_parallel layout.tensor_overlap",
        "layout.tensor",
        lambda recipe: recipe.layout.tensor > 1,
        "with layout.tensor = 1, which splits no matrix. Fix: layout.tensor of 2 or more",
    ),
    _row(
        "layout.context_attention",
        "layout.context",
        lambda recipe: recipe.layout.context > 1,
        "with layout.context = 1, which splits no sequence. Fix: layout.context of 2 or more",
    ),
    _row(
        "layout.alibi_kernel",
        "model.model_type",
        lambda recipe: recipe.model.model_type == "bloom",
        'because only model.model_type = "bloom" has ALiBi. Fix: model.model_type = "bloom"',
    ),
    _row(
        "layout.zero",
        "layout.shard layout.context layout.replicate",
        lambda recipe: (recipe.layout.shard, recipe.layout.context, recipe.layout.replicate) != (1, 1, 1),
        "with layout.shard = 1: no other rank holds a part. Fix: layout.shard = 0",
    ),
    _row(
        "layout.recompute_every_layers",
        "layout.recompute",
        lambda recipe: recipe.layout.recompute != "none",
        'with layout.recompute = "none". Fix: another layout.recompute',
    ),
    _row(
        "layout.recompute_saved_operators",
        "layout.recompute",
        lambda recipe: recipe.layout.recompute == "operators",
        'without layout.recompute = "operators". Fix: layout.recompute = "operators"',
    ),
    _row(
        "train.decay_share",
        "train.schedule phases",
        lambda recipe: any(
            _decays(phase) and "decay_share" not in phase.given for phase in full_phases(recipe)
        ),
        f"because no segment of the learning rate with schedule = {_SCHEDULES} reads it. "
        f"Fix: train.schedule = {_SCHEDULES}",
    ),
    _row(
        "train.fp8.scaling train.fp8.kept_in_bf16 train.fp8.head train.fp8.gathered_in_fp8 "
        "train.fp8.emulate train.fp8.probe_every_steps",
        "train.precision train.precision_changes",
        lambda recipe: "fp8" in {recipe.train.precision, *_changes(recipe)},
        'because no step is in fp8. Fix: train.precision = "fp8"',
    ),
    _row(
        "train.fp8.gathered_in_fp8",
        "train.fp8.scaling",
        lambda recipe: recipe.train.fp8.scaling == "tensorwise",
        'without train.fp8.scaling = "tensorwise". Fix: train.fp8.scaling = "tensorwise"',
    ),
    _row(
        "train.fp8.watch_steps train.fp8.max_loss_rise train.fp8.max_gradient_norm_rise",
        "train.precision_changes",
        lambda recipe: "fp8" in _changes(recipe),
        'because no change to fp8 is watched. Fix: train.precision_changes = [[STEP, "fp8"]]',
    ),
    _row(
        "train.spikes.max_tries train.spikes.learning_rate_factor",
        "train.spikes.response",
        lambda recipe: recipe.train.spikes.response == "go_back",
        'with train.spikes.response = "tell", which never goes back. Fix: train.spikes.response = "go_back"',
    ),
    _row(
        "checkpoint.memory_every_steps",
        "checkpoint.every_steps",
        lambda recipe: (
            not recipe.checkpoint.memory_every_steps
            or recipe.checkpoint.memory_every_steps % recipe.checkpoint.every_steps > 0
        ),
        "because each of its steps has a checkpoint. Fix: fewer steps than checkpoint.every_steps",
    ),
    _row(
        "tokenizer.model tokenizer.vocab_size tokenizer.min_frequency tokenizer.max_sample_bytes "
        "tokenizer.temperature",
        "tokenizer.path",
        lambda recipe: recipe.tokenizer.path is None,
        "with tokenizer.path, a ready tokenizer that is used as it is. "
        "Fix: leave out tokenizer.path to learn a vocabulary",
    ),
    _row(
        "tokenizer.temperature",
        "corpus.sources",
        lambda recipe: len({languages_of(recipe, source) for source in recipe.corpus.sources}) > 1,
        "because all sources are in one language. Fix: sources of several languages",
    ),
    _row(
        "tokenizer.max_unknown_share",
        "tokenizer.path tokenizer.extend train.objective",
        lambda recipe: recipe.tokenizer.ready is not None and not _is_masked(recipe),
        "because only a ready tokenizer of a decoder can lack a character. "
        "Fix: tokenizer.path of a decoder's tokenizer",
    ),
    _row(
        "dataset.temperature",
        "corpus.sources phases dataset.mixture",
        lambda recipe: (
            len(recipe.corpus.sources) > 1
            and (bool(recipe.dataset.mixture) or any(not phase.mixture for phase in full_phases(recipe)))
        ),
        "because no phase has several sources without a mixture. Fix: several corpus.sources",
    ),
    _row(
        "dataset.mixture_unit",
        "dataset.mixture phases",
        lambda recipe: any(phase.mixture for phase in full_phases(recipe)),
        "without weights of a mixture. Fix: dataset.mixture = {NAME = WEIGHT}",
    ),
    _row(
        "corpus.line_language_threshold corpus.document_language_threshold",
        "corpus.sources",
        _cleans("text", "parallel"),
        "because no source of running or parallel text is cleaned. Fix: clean = true of a source",
    ),
    _row(
        "corpus.max_foreign_character_share corpus.min_line_characters corpus.min_document_characters "
        "corpus.deduplicate_lines corpus.quality corpus.repair_encoding corpus.mask_personal_data "
        "corpus.damage corpus.own_steps corpus.near_copies",
        "corpus.sources",
        _cleans("text"),
        "because no source of running text is cleaned. Fix: clean = true of a source",
    ),
    _row(
        "corpus.near_copies_keep",
        "corpus.near_copies",
        lambda recipe: recipe.corpus.near_copies != "none",
        'with corpus.near_copies = "none". Fix: corpus.near_copies = "fineweb2"',
    ),
    _row(
        "corpus.deduplicate_documents corpus.max_bad_share corpus.words corpus.decontaminate corpus.engine",
        "corpus.sources",
        _has_raw_text,
        "because all sources are ready tokens. Fix: a source of raw text",
    ),
    _row(
        "corpus.max_document_bytes",
        "corpus.sources evaluate.texts",
        lambda recipe: _has_raw_text(recipe) or bool(recipe.evaluate.texts),
        "because all sources are ready tokens. Fix: a source of raw text",
    ),
    _row(
        "corpus.code.languages corpus.code.max_line_characters corpus.code.max_mean_line_characters "
        "corpus.code.min_alphanumeric_share corpus.code.generated_marks",
        "corpus.sources",
        _cleans("code"),
        'because no source of kind = "code" is cleaned. Fix: kind = "code" of a source',
    ),
)


def _of_phases(recipe: Recipe) -> Iterator[Condition]:
    """Yield the conditions of keys of phases, and of keys that all phases share."""
    phases = full_phases(recipe)
    for name in Phase.model_fields if recipe.phases else ():
        if name not in ("tokens", "decay_share"):
            advice = f"because each of [[phases]] has its own. Fix: phases.N.{name}"
            yield _row(key_of_all_phases(name), "phases", partial(_is_read_by, phases, name), advice)
    for phase in phases:
        if "decay_share" in phase.given and phase.learning_rate and not _decays(phase):
            own = phase.key("schedule")
            advice = f'with {own} = "{phase.learning_rate.schedule}". Fix: {own} = {_SCHEDULES}'
            yield _row(phase.key("decay_share"), own, lambda _: False, advice)


def _is_read_by(phases: Sequence[FullPhase], name: str, recipe: Recipe) -> bool:
    return any(
        name not in phase.given
        for phase in phases
        if phase.learning_rate or name not in ("learning_rate", *OF_A_SEGMENT)
    )


def is_given(recipe: Recipe, key: str) -> bool:
    """Return True for a key that the recipe gives, even with the default value."""
    above, _, last = key.rpartition(".")
    return last in _at(recipe, above).model_fields_set


def _value(recipe: Recipe, key: str) -> str:
    above, _, last = key.rpartition(".")
    return json.dumps(_at(recipe, above).model_dump(mode="json")[last], ensure_ascii=False)


def _at(recipe: Recipe, path: str) -> BaseModel:
    found: Any = recipe
    for part in path.split(".") if path else ():
        found = found[int(part) - 1] if part.isdecimal() else getattr(found, part)
    return found
