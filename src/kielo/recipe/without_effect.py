"""Keys that a recipe gives and that nothing reads: which they are, why, and what would put them in force.

A key that has an effect only under a condition is one row of `CONDITIONS`. Such a key is refused where a
person gives it (`check.py`). The recipes that Kielo writes for a run and its jobs have every value, since
stages are compared with all of them: nothing is refused there. Keys of [model] that a family lacks are not
here: `models/families.py` knows them by the families' own tables.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from pydantic import BaseModel

from kielo.recipe.learning_rate_schedules import LEARNING_RATE_SCHEDULES
from kielo.recipe.phases import FullPhase, full_phases, key_of_all_phases
from kielo.recipe.sections import Phase, Recipe
from kielo.recipe.several_languages import languages_of

# Keys of a segment of the learning rate. A phase reads them only if it begins one.
OF_A_SEGMENT = ("final_learning_rate_ratio", "schedule", "warmup_share", "decay_share")


class Idle(NamedTuple):
    """A key without effect. decided_by: the keys that decide this."""

    key: str
    decided_by: tuple[str, ...]
    message: str


class Condition(NamedTuple):
    """The condition of `keys`. why, fix: words after "has no effect" and "Fix:"."""

    keys: tuple[str, ...]
    decided_by: tuple[str, ...]
    holds: Callable[[Recipe], bool]
    why: str
    fix: str


def without_effect(recipe: Recipe) -> Iterator[Idle]:
    """Yield the keys that the recipe gives and that have no effect, each once."""
    found: dict[str, Idle] = {}
    for keys, decided_by, holds, why, fix in (*CONDITIONS, *_of_phases(recipe)):
        for key in keys:
            if is_given(recipe, key) and not holds(recipe):
                said = f"{key} = {_value(recipe, key)} has no effect {why}. Fix: {fix}, or leave the key out"
                found.setdefault(key, Idle(key, decided_by, said))
    yield from found.values()


def layout_in_force(recipe: Recipe) -> dict[str, Any]:
    """Return the values of [layout] that are no default and have an effect, for a person's recipe."""
    idle = {one.key for one in without_effect(recipe)}
    values = recipe.layout.model_dump(mode="json", exclude_defaults=True)
    return {key: value for key, value in values.items() if f"layout.{key}" not in idle}


def _is_masked(recipe: Recipe) -> bool:
    return recipe.train.objective == "masked_tokens"


def _predicts_the_next(recipe: Recipe) -> bool:
    return not _is_masked(recipe) or recipe.train.causal_share > 0


def _has_raw_text(recipe: Recipe) -> bool:
    return bool(recipe.corpus.of_raw_text.sources)


def _cleans(*kinds: str) -> Callable[[Recipe], bool]:
    """Return the question whether the recipe has a source of these kinds that it cleans."""

    def cleans(recipe: Recipe) -> bool:
        sources = recipe.corpus.of_raw_text.sources
        return any(source.kind in kinds and source.clean for source in sources)

    return cleans


def _precisions(recipe: Recipe) -> set[str | None]:
    return {recipe.train.precision, *_changes(recipe)}


def _changes(recipe: Recipe) -> set[str | None]:
    return {precision for _, precision in recipe.train.precision_changes}


def _decays(phase: FullPhase) -> bool:
    rate = phase.learning_rate
    return rate is not None and LEARNING_RATE_SCHEDULES[rate.schedule].has_decay_share


_SCHEDULES = " or ".join(f'"{name}"' for name, one in LEARNING_RATE_SCHEDULES.items() if one.has_decay_share)


def _of(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)


CONDITIONS = (
    Condition(
        ("train.masking", "train.masking_rate", "train.final_masking_rate", "evaluate.pseudo_tokens"),
        ("train.objective",), _is_masked,
        'with train.objective = "next_token", which hides no tokens',
        'train.objective = "masked_tokens"',
    ),
    Condition(
        ("evaluate.ngram_order", "evaluate.sample_tokens", "evaluate.temperature", "evaluate.top_k"),
        ("train.objective", "train.causal_share"), _predicts_the_next,
        'with train.objective = "masked_tokens": such a model is measured by hidden tokens',
        "train.causal_share above 0",
    ),
    Condition(
        ("evaluate.top_k",), ("evaluate.temperature",), lambda recipe: recipe.evaluate.temperature > 0,
        "with evaluate.temperature = 0, which takes the likeliest token", "a temperature above 0",
    ),
    Condition(
        ("evaluate.part_of_speech.from_layer", "evaluate.part_of_speech.pieces"),
        ("evaluate.part_of_speech.train",), lambda recipe: bool(recipe.evaluate.part_of_speech.train),
        "without evaluate.part_of_speech.train, the text that tags are learned from",
        "evaluate.part_of_speech.train = FILE.conllu",
    ),
    Condition(
        _of("layout", "pipeline_schedule", "pipeline_stages_per_rank", "pipeline_layers"),
        ("layout.pipeline",),
        lambda recipe: recipe.layout.pipeline > 1,
        "with layout.pipeline = 1, which is no pipeline", "layout.pipeline of 2 or more",
    ),
    Condition(
        ("layout.sequence_parallel", "layout.tensor_overlap"), ("layout.tensor",),
        lambda recipe: recipe.layout.tensor > 1,
        "with layout.tensor = 1, which splits no matrix", "layout.tensor of 2 or more",
    ),
    Condition(
        ("layout.context_attention",), ("layout.context",), lambda recipe: recipe.layout.context > 1,
        "with layout.context = 1, which splits no sequence", "layout.context of 2 or more",
    ),
    Condition(
        ("layout.zero",), ("layout.shard", "layout.context", "layout.replicate"),
        lambda recipe: (recipe.layout.shard, recipe.layout.context, recipe.layout.replicate) != (1, 1, 1),
        "with layout.shard = 1: no other rank holds a part", "layout.shard = 0",
    ),
    Condition(
        ("layout.recompute_every_layers",), ("layout.recompute",),
        lambda recipe: recipe.layout.recompute != "none",
        'with layout.recompute = "none"', "another layout.recompute",
    ),
    Condition(
        ("layout.recompute_saved_operators",), ("layout.recompute",),
        lambda recipe: recipe.layout.recompute == "operators",
        'without layout.recompute = "operators"', 'layout.recompute = "operators"',
    ),
    Condition(
        ("train.decay_share",), ("train.schedule", "phases"),
        lambda recipe: any(
            _decays(phase) and "decay_share" not in phase.given for phase in full_phases(recipe)
        ),
        f"because no segment of the learning rate with schedule = {_SCHEDULES} reads it",
        f"train.schedule = {_SCHEDULES}",
    ),
    Condition(
        _of(
            "train.fp8", "scaling", "kept_in_bf16", "head", "gathered_in_fp8", "emulate", "probe_every_steps"
        ),
        ("train.precision", "train.precision_changes"), lambda recipe: "fp8" in _precisions(recipe),
        "because no step is in fp8", 'train.precision = "fp8"',
    ),
    Condition(
        ("train.fp8.gathered_in_fp8",), ("train.fp8.scaling",),
        lambda recipe: recipe.train.fp8.scaling == "tensorwise",
        'without train.fp8.scaling = "tensorwise"', 'train.fp8.scaling = "tensorwise"',
    ),
    Condition(
        _of("train.fp8", "watch_steps", "max_loss_rise", "max_gradient_norm_rise"),
        ("train.precision_changes",), lambda recipe: "fp8" in _changes(recipe),
        "because no change to fp8 is watched", 'train.precision_changes = [[STEP, "fp8"]]',
    ),
    Condition(
        ("train.spikes.max_tries", "train.spikes.learning_rate_factor"), ("train.spikes.response",),
        lambda recipe: recipe.train.spikes.response == "go_back",
        'with train.spikes.response = "tell", which never goes back',
        'train.spikes.response = "go_back"',
    ),
    Condition(
        ("checkpoint.memory_every_steps",), ("checkpoint.every_steps",),
        lambda recipe: not recipe.checkpoint.memory_every_steps
        or recipe.checkpoint.memory_every_steps % recipe.checkpoint.every_steps > 0,
        "because each of its steps has a checkpoint", "fewer steps than checkpoint.every_steps",
    ),
    Condition(
        _of("tokenizer", "model", "vocab_size", "min_frequency", "max_sample_bytes", "temperature"),
        ("tokenizer.path",), lambda recipe: recipe.tokenizer.path is None,
        "with tokenizer.path, a ready tokenizer that is used as it is",
        "leave out tokenizer.path to learn a vocabulary",
    ),
    Condition(
        ("tokenizer.temperature",), ("corpus.sources",),
        lambda recipe: len({languages_of(recipe, source) for source in recipe.corpus.sources}) > 1,
        "because all sources are in one language", "sources of several languages",
    ),
    Condition(
        ("tokenizer.max_unknown_share",), ("tokenizer.path", "tokenizer.extend", "train.objective"),
        lambda recipe: recipe.tokenizer.ready is not None and not _is_masked(recipe),
        "because only a ready tokenizer of a decoder may lack a character",
        "tokenizer.path of a decoder's tokenizer",
    ),
    Condition(
        ("dataset.temperature",), ("corpus.sources", "phases", "dataset.mixture"),
        lambda recipe: len(recipe.corpus.sources) > 1
        and (bool(recipe.dataset.mixture) or any(not phase.mixture for phase in full_phases(recipe))),
        "because no phase has several sources without a mixture", "several corpus.sources",
    ),
    Condition(
        ("dataset.mixture_unit",), ("dataset.mixture", "phases"),
        lambda recipe: any(phase.mixture for phase in full_phases(recipe)),
        "without weights of a mixture", "dataset.mixture = {NAME = WEIGHT}",
    ),
    Condition(
        ("corpus.line_language_threshold", "corpus.document_language_threshold"), ("corpus.sources",),
        _cleans("text", "parallel"),
        "because no source of running or parallel text is cleaned", "clean = true of a source",
    ),
    Condition(
        _of(
            "corpus", "max_foreign_character_share", "min_line_characters", "min_document_characters",
            "deduplicate_lines",
        ),
        ("corpus.sources",), _cleans("text"),
        "because no source of running text is cleaned", "clean = true of a source",
    ),
    Condition(
        ("corpus.deduplicate_documents", "corpus.max_bad_share"), ("corpus.sources",), _has_raw_text,
        "because all sources are ready tokens", "a source of raw text",
    ),
    Condition(
        ("corpus.max_document_bytes",), ("corpus.sources", "evaluate.texts"),
        lambda recipe: _has_raw_text(recipe) or bool(recipe.evaluate.texts),
        "because all sources are ready tokens", "a source of raw text",
    ),
    Condition(
        _of(
            "corpus.code", "languages", "max_line_characters", "max_mean_line_characters",
            "min_alphanumeric_share", "generated_marks",
        ),
        ("corpus.sources",), _cleans("code"),
        'because no source of kind = "code" is cleaned', 'kind = "code" of a source',
    ),
)  # fmt: skip


def _of_phases(recipe: Recipe) -> Iterator[Condition]:
    """Yield the conditions of keys that phases share or have."""
    phases = full_phases(recipe)
    for name in Phase.model_fields if recipe.phases else ():
        if name in ("tokens", "decay_share"):
            continue
        yield Condition(
            (key_of_all_phases(name),), ("phases",), partial(_is_read_by, phases, name),
            "because each of [[phases]] has its own", f"phases.N.{name}",
        )  # fmt: skip
    for phase in phases:
        if "decay_share" in phase.given and phase.learning_rate and not _decays(phase):
            own = phase.key("schedule")
            yield Condition(
                (phase.key("decay_share"),), (own,), lambda _: False,
                f'with {own} = "{phase.learning_rate.schedule}"', f"{own} = {_SCHEDULES}",
            )  # fmt: skip


def _is_read_by(phases: Sequence[FullPhase], name: str, recipe: Recipe) -> bool:
    return any(
        name not in phase.given
        for phase in phases
        if phase.learning_rate or name not in ("learning_rate", *OF_A_SEGMENT)
    )


def is_given(recipe: Recipe, key: str) -> bool:
    """Return True for a key that the recipe has, also if it is the default's value."""
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
