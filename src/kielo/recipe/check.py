"""Checks that a recipe's values fit each other and the cards. A typed `Recipe` → complaints, all at once.

`resolve` checks values that depend on text or ranks.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from kielo.recipe.amounts import multiples_around, short_amount
from kielo.recipe.cards import (
    BUNDLE,
    a_new_card,
    cluster,
    clusters,
    is_own_card,
    language,
    language_code,
    languages,
    task_bundles,
    without_language_card,
)
from kielo.recipe.complaints import CONTROL, Complaint, did_you_mean, strings
from kielo.recipe.errors import KieloError
from kielo.recipe.learning_rate_schedules import LEARNING_RATE_SCHEDULES
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.phases import OF_A_SEGMENT, full_phases, skip_complaints, steps_of_run
from kielo.recipe.places import conversion, without_form
from kielo.recipe.quality_limits import limits_of, names_for_score
from kielo.recipe.sections import SHAPE_KEYS, Model, Recipe, Source
from kielo.recipe.several_languages import languages_of
from kielo.recipe.without_effect import is_given, without_effect

_SMALLEST_VOCABULARY = 258  # 256 bytes, end-of-text and padding
# Unlike words, such a name has marks around it, so it is no piece of a text.
_RESERVED = re.compile(r"<\|\S+\|>|<[^\s<>|]+>|\[[^\s\[\]]+\]")
# Keys whose values are text for a model or for people, not names or paths.
_TEXTS = ("description", "generated_marks", "license", "prompts", "templates", "text_license")


def check(
    recipe: Recipe,
    origin: Callable[[str], str],
    layer: Callable[[str], int | None] = lambda _: 0,
    filled: Recipe | None = None,
) -> list[Complaint]:
    """Return everything that is wrong.

    filled: the recipe with the usual values of an idea, whose fit is checked in place of its defaults.
    origin: the file (or --set) of a dotted key. layer: the place of the key's file in the order of overlays,
    0 for the base recipe, None for a recipe that Kielo wrote with every value. A key that has no effect
    because of a higher layer is inherited, which is no complaint.
    """
    complaints = []
    parts = (
        _plain_names,
        _names,
        _layouts,
        _sources,
        _shape,
        _model,
        _weights,
        _steps,
        _phases,
        _batch_ramp,
        _skip_steps,
    )
    for part in parts:
        for keys, message in part(filled or recipe):
            where = next((origin(key) for key in keys if origin(key) == "--set"), origin(keys[0]))
            complaints.append(Complaint(keys, f"{where}: {message}"))
    for key, decided_by, message in without_effect(recipe):
        own = layer(key)
        given = [other for other in decided_by if is_given(recipe, other)]
        if own is not None and all((layer(other) or 0) <= own for other in given):
            complaints.append(Complaint((key, *decided_by), f"{origin(key)}: {message}"))
    return complaints


Found = Iterator[tuple[tuple[str, ...], str]]


def _plain_names(recipe: Recipe) -> Found:
    """Refuse line breaks in a path, which would become lines of a job's script."""
    for key, text in strings(recipe.model_dump(exclude_defaults=True)):
        if CONTROL.search(text) and key.rpartition(".")[2].partition("[")[0] not in _TEXTS:
            message = f"{key} = {text!r} has a line break or another control character. Fix: remove it"
            yield (key.partition("[")[0],), message


def _names(recipe: Recipe) -> Found:
    if problem := _without_card("language", recipe.language):
        yield ("language",), problem
    elif any(_is_identified(source) and not source.language for source in recipe.corpus.sources):
        yield from _unknown_to_identifier(
            recipe, "", ("corpus.language_identifier", "language"), recipe.language
        )
    if recipe.cluster not in clusters() and not is_own_card(recipe.cluster):
        meant = did_you_mean(recipe.cluster, {name: [] for name in clusters()})
        yield (
            ("cluster",),
            f"cluster = {recipe.cluster!r} has no card; `kielo clusters` lists all{meant}; "
            f"{a_new_card(recipe.cluster)}",
        )


def _layouts(recipe: Recipe) -> Found:
    seen = set()
    for entry in recipe.layouts:
        if entry.cluster not in clusters() and not is_own_card(entry.cluster):
            meant = did_you_mean(entry.cluster, {name: [] for name in clusters()})
            yield (
                ("layouts",),
                f"layouts, cluster = {entry.cluster!r} has no card; `kielo clusters` lists all{meant}",
            )
        elif is_own_card(entry.cluster):
            try:
                cluster(entry.cluster)
            except KieloError as error:
                yield ("layouts",), f"layouts, {error}"
        for nodes in entry.nodes:
            if (entry.cluster, nodes) in seen:
                yield (
                    ("layouts",),
                    f"layouts: two entries name {nodes} nodes of {entry.cluster}. Fix: one of them",
                )
            seen.add((entry.cluster, nodes))


def _without_card(key: str, name: str) -> str | None:
    if name in languages():
        return None
    if not is_own_card(name):
        return f"{key} = {name!r} has no card{without_language_card(name)}"
    try:
        language(name)
    except KieloError as error:
        return f"{key} = {name!r}: {error}"
    return None


def _is_identified(source: Source) -> bool:
    return source.clean and source.kind in ("text", "parallel")


def _unknown_to_identifier(recipe: Recipe, where: str, keys: tuple[str, ...], name: str) -> Found:
    identifier, card = recipe.corpus.language_identifier, language(name)
    if not card.codes_of(identifier):
        yield (
            keys,
            f"{where}corpus.language_identifier = {identifier!r} does not know language {name!r}. Fix: "
            f"{card.other_identifiers()}",
        )


def _sources(recipe: Recipe) -> Found:
    names = [source.name for source in recipe.corpus.sources]
    for name in sorted({name for name in names if names.count(name) > 1}):
        count = names.count(name)
        yield ("corpus.sources",), f"corpus.sources: {name!r} names {count} sources. Fix: a name for each"
    for source in recipe.corpus.sources:
        yield from _languages_of_source(recipe, source)
    if (ready := recipe.corpus.token_sources) and recipe.tokenizer.path is None:
        yield (
            ("tokenizer.path", "corpus.sources"),
            f"corpus.sources, {ready[0].name}: tokens are ids of a tokenizer, which is not given. Fix: "
            "tokenizer.path = FOLDER of its tokenizer.json (RUN/tokenizer of a run)",
        )
    for key in ("dataset.mixture", "dataset.source_max_epochs"):
        for name in getattr(recipe.dataset, key.removeprefix("dataset.")):
            if name not in names:
                yield (key, "corpus.sources"), _no_source(f"{key}.{name}", names)
    taken = [*names, *(text.name for text in recipe.evaluate.texts)]
    for name in dict.fromkeys(text.name for text in recipe.evaluate.texts):
        if taken.count(name) > 1:
            yield (
                ("evaluate.texts", "corpus.sources"),
                f"evaluate.texts: {name!r} also names another text or a source. Fix: another name",
            )
    for text in recipe.evaluate.texts:
        where = f"evaluate.texts, {text.name}: language"
        if text.language and (problem := _without_card(where, text.language)):
            yield ("evaluate.texts",), problem
    yield from _bundles(recipe)
    yield from _quality(recipe)
    yield from _measures_of_encoders(recipe)
    if (
        recipe.evaluate.made_pairs
        and recipe.language in languages()
        and not language(recipe.language).has_spaces
    ):
        yield (
            ("evaluate.made_pairs", "language"),
            f"evaluate.made_pairs = {recipe.evaluate.made_pairs} needs spaces between words, and language = "
            f"{recipe.language!r} is written without them. Fix: evaluate.minimal_pairs = FILE",
        )

    if recipe.dataset.mixture and recipe.dataset.temperature != 1:
        yield (
            ("dataset.temperature", "dataset.mixture"),
            f"dataset.temperature = {recipe.dataset.temperature:g} derives weights from the sources' tokens, "
            "and dataset.mixture gives weights. Fix: leave one of them out",
        )


def _no_source(key: str, names: list[str]) -> str:
    return f"{key}: no source has this name. Fix: {', '.join(names)}"


def _quality(recipe: Recipe) -> Found:
    if recipe.corpus.quality == "none":
        return
    for source in recipe.corpus.sources:
        if source.kind == "text" and source.clean and not source.tokens:
            try:
                codes = tuple(map(language_code, languages_of(recipe, source)))
                if recipe.corpus.quality == "hplt":
                    names_for_score(codes)
                else:
                    limits_of(codes, is_cut=recipe.corpus.words == "icu")
            except KieloError as problem:
                yield (
                    ("corpus.quality", "corpus.words", "corpus.sources", "language"),
                    f"corpus.sources, {source.name}: {problem}",
                )


def _bundles(recipe: Recipe) -> Found:
    for name in recipe.evaluate.tasks:
        if name.startswith(BUNDLE) and name.removeprefix(BUNDLE) not in task_bundles():
            fit = ", ".join(BUNDLE + code for code in task_bundles())
            yield ("evaluate.tasks",), f"evaluate.tasks: no bundle is called {name!r}. Fix: {fit}"


def _measures_of_encoders(recipe: Recipe) -> Found:
    files = recipe.evaluate.own_files
    for one, other in (("train", "dev"), ("dev", "train")):
        key = f"part_of_speech.{one}"
        if key in files and f"part_of_speech.{other}" not in files:
            yield (
                (f"evaluate.{key}",),
                f"evaluate.{key} = {files[key]!r} needs a second file. Fix: "
                f"evaluate.part_of_speech.{other} = FILE.conllu",
            )
    tags = [f"evaluate.{key}" for key in files if key != "minimal_pairs"]
    if tags and recipe.train.objective == "next_token":
        path = files[tags[0].removeprefix("evaluate.")]
        yield (
            (*tags, "train.objective"),
            f"{tags[0]} = {path!r} measures encoders. Fix: leave it out, or "
            'train.objective = "masked_tokens"',
        )


def _languages_of_source(recipe: Recipe, source: Source) -> Found:
    """Yield complaints about the source's own languages. `_names` checks the recipe's."""
    where = f"corpus.sources, {source.name}: "
    for code in languages_of(recipe, source) if source.language else ():
        if problem := _without_card(f"{where}language", code):
            yield ("corpus.sources",), problem
        elif source.clean:
            keys = ("corpus.sources", "corpus.language_identifier")
            yield from _unknown_to_identifier(recipe, where, keys, code)


def _shape(recipe: Recipe) -> Found:
    model = recipe.model
    if model.weights is not None:  # the weights' config.json says all this
        return
    beside = [f"model.{key}" for key in SHAPE_KEYS if key in model.model_fields_set]
    if model.params is not None:
        if beside:
            yield (
                ("model.params", *beside),
                f"model.params = {short_amount(model.params)} makes the shape, but {', '.join(beside)} is "
                "given too. Fix: leave one out",
            )
        return
    heads, key_value_heads = model.num_attention_heads, model.num_key_value_heads
    pair = 2 if FAMILIES[model.model_type].has_rope else 1
    if model.head_dim is None and model.hidden_size % (pair * heads):
        number = "an even number of values" if pair == 2 else "a whole number of values"
        yield (
            ("model.hidden_size", "model.num_attention_heads"),
            f"model.hidden_size = {model.hidden_size} is not {number} for each of "
            f"model.num_attention_heads = {heads}. Fix: hidden_size "
            f"{max(1, model.hidden_size // (pair * heads)) * pair * heads}, or model.head_dim",
        )
    if model.head_dim is not None and model.head_dim % pair:
        yield (
            ("model.head_dim",),
            f"model.head_dim = {model.head_dim} is odd, but rotary positions rotate pairs. Fix: make it even",
        )
    if key_value_heads is not None and heads % key_value_heads:
        fit = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        yield (
            ("model.num_key_value_heads", "model.num_attention_heads"),
            f"model.num_key_value_heads = {key_value_heads} does not divide model.num_attention_heads = "
            f"{heads}. Fix: {fit}",
        )


def _model(recipe: Recipe) -> Found:
    model = recipe.model
    if model.weights is not None:
        return
    longest = max(full_phases(recipe), key=lambda phase: phase.sequence_length)
    length, key = longest.sequence_length, longest.key("sequence_length")
    positions = model.max_position_embeddings
    if positions is not None and positions < length:
        yield (
            ("model.max_position_embeddings", key),
            f"model.max_position_embeddings = {positions} is less than {key} = {length}. Fix: leave it out, "
            f"or {length} or more",
        )
    size, learnt = model.vocab_size, recipe.tokenizer.vocab_size
    if size is not None and recipe.tokenizer.path is None and size < learnt:
        yield (
            ("model.vocab_size", "tokenizer.vocab_size"),
            f"model.vocab_size = {size} cannot hold tokenizer.vocab_size = {learnt}. Fix: leave it out, or "
            f"{learnt} or more",
        )


def _weights(recipe: Recipe) -> Found:
    tokenizer, weights = recipe.tokenizer, recipe.model.weights
    if tokenizer.path is None and tokenizer.vocab_size < _SMALLEST_VOCABULARY:
        yield (
            ("tokenizer.vocab_size",),
            f"tokenizer.vocab_size = {tokenizer.vocab_size} cannot hold 256 bytes, end-of-text and padding. "
            f"Fix: {_SMALLEST_VOCABULARY} or more",
        )
    ready, key = tokenizer.ready, tokenizer.ready_key
    is_on_hub = (ready or "").startswith("hf:") and ready != "hf:"
    if ready is not None and not is_on_hub and not (Path(ready) / "tokenizer.json").is_file():
        fix = conversion(Path(ready)) or (
            ". Fix: the folder of a Hugging Face tokenizer, or leave the key out to learn one"
        )
        yield (key,), f"{key} = {ready!r}: no tokenizer.json in this folder{fix}"
    yield from _learning(recipe)
    yield from _extension(recipe)
    yield from _transplant_vectors(recipe.model)
    if recipe.train.optimiser_from_weights:
        yield from _optimiser_from_weights(recipe)
    if weights is None:
        if recipe.follows:
            yield (
                ("follows", "model.weights"),
                f"follows = {recipe.follows!r} makes weights, but model.weights is not given. Fix: "
                "model.weights = hf:FOLDER, the folder hf of its run",
            )
        if recipe.model.transplant is not None:
            yield (
                ("model.transplant",),
                f"model.transplant = {recipe.model.transplant!r} takes rows from model.weights, which is not "
                "given. Fix: model.weights = hf:FOLDER, or leave the key out",
            )
        return
    if not weights.startswith(("hf:", "megatron:")) or not without_form(weights):
        yield (
            ("model.weights",),
            f"model.weights = {weights!r} does not fit. Fix: "
            f"{'megatron:FOLDER' if weights == 'megatron:' else 'hf:' + (weights.strip() or 'FOLDER')}",
        )
    elif tokenizer.path is None and recipe.model.transplant is None:
        yield (
            ("model.weights", "tokenizer.path"),
            f"model.weights = {weights!r} come with their own vocabulary. Fix: tokenizer.path = "
            f"{weights if weights.startswith('hf:') else 'FOLDER'} or "
            'another folder or hub name of their tokenizer.json, or model.transplant = "mean" for the '
            "vocabulary that this recipe learns or extends",
        )


def _learning(recipe: Recipe) -> Found:
    tokenizer = recipe.tokenizer
    if tokenizer.model == "unigram" and tokenizer.extend is not None:
        yield (
            ("tokenizer.model", "tokenizer.extend"),
            'tokenizer.extend adds merges to a BPE vocabulary, and tokenizer.model = "unigram" has none. '
            "Fix: leave out tokenizer.model, or tokenizer.extend to learn a new vocabulary",
        )
    if tokenizer.model == "unigram" and "min_frequency" in tokenizer.model_fields_set:
        yield (
            ("tokenizer.min_frequency", "tokenizer.model"),
            'tokenizer.min_frequency is for merges; tokenizer.model = "unigram" has none. Fix: leave it out',
        )
    reserved = tokenizer.reserved_tokens
    if reserved and tokenizer.ready is not None:
        yield (
            ("tokenizer.reserved_tokens", tokenizer.ready_key),
            "tokenizer.reserved_tokens belong to a learned vocabulary, but "
            f"{tokenizer.ready_key} names a ready one. Fix: leave one of the keys out",
        )
    for name in reserved:
        if reserved.count(name) > 1 or not _RESERVED.fullmatch(name):
            yield (
                ("tokenizer.reserved_tokens",),
                f"tokenizer.reserved_tokens: {name!r} does not fit. Fix: names such as <|tool|> "
                "or [TOOL], each once",
            )
            return


def _extension(recipe: Recipe) -> Found:
    tokenizer, sources = recipe.tokenizer, [source.name for source in recipe.corpus.sources]
    if tokenizer.path is not None and tokenizer.extend is not None:
        yield (
            ("tokenizer.path", "tokenizer.extend"),
            "tokenizer.path keeps a tokenizer as it is, and tokenizer.extend gives it more tokens. "
            "Fix: one of them",
        )
    unchanged = tokenizer.unchanged_sources
    if unchanged and tokenizer.extend is None:
        yield (
            ("tokenizer.unchanged_sources",),
            "tokenizer.unchanged_sources keep their encoding by tokenizer.extend, which is not given. "
            "Fix: tokenizer.extend, or leave the key out",
        )
    elif unknown := sorted(set(unchanged) - set(sources)):
        yield (
            ("tokenizer.unchanged_sources", "corpus.sources"),
            f"tokenizer.unchanged_sources: no source has the name {unknown[0]!r}. Fix: {', '.join(sources)}",
        )
    elif unchanged and not set(sources) - set(unchanged):
        yield (
            ("tokenizer.unchanged_sources",),
            "tokenizer.unchanged_sources has all sources: no text for new tokens. Fix: leave one out",
        )


def _transplant_vectors(model: Model) -> Found:
    keys = ("model.transplant", "model.transplant_vectors")
    if model.transplant == "focus" and model.transplant_vectors is None:
        yield (
            keys,
            'model.transplant = "focus" weights old rows by vectors of the new tokens. Fix: '
            'model.transplant_vectors = FILE (.vec or .npz), or model.transplant = "mean"',
        )
    elif model.transplant != "focus" and model.transplant_vectors is not None:
        yield (
            keys,
            f"model.transplant_vectors = {model.transplant_vectors!r} is only read with model.transplant = "
            '"focus". Fix: set it, or leave the key out',
        )


def _optimiser_from_weights(recipe: Recipe) -> Found:
    """Refuse moments that no weights can give, or that would not be this run's own."""
    key, weights = "train.optimiser_from_weights", recipe.model.weights
    if not (weights or "").startswith("megatron:"):
        yield (
            (key, "model.weights"),
            f"{key} = true with model.weights = {weights!r}: only Megatron's checkpoints have moments. Fix: "
            f"model.weights = megatron:FOLDER, or {key} = false",
        )
    others: dict[str, object] = {
        "model.transplant": recipe.model.transplant,
        "train.trainable": list(next((one.trainable for one in full_phases(recipe) if one.trainable), ())),
        "train.optimiser": None if recipe.train.optimiser == "adamw" else recipe.train.optimiser,
    }
    for other, value in others.items():
        if value:
            yield (
                (key, other),
                f"{key} = true cannot be combined with {other} = {value!r}: its moments are of AdamW, of all "
                f"parameters and all tokens. Fix: {key} = false",
            )


def _steps(recipe: Recipe) -> Found:
    for phase in full_phases(recipe):
        asked, length = phase.tokens_per_step, phase.sequence_length
        names = ("tokens_per_step", "sequence_length", "tokens")
        step_key, length_key, tokens_key = map(phase.key, names)
        if asked % length:
            yield (step_key, length_key), _no_multiple(step_key, asked, length_key, length)
        if phase.tokens < asked:
            yield (
                (tokens_key, step_key),
                f"{tokens_key} = {phase.tokens} is less than one step of {step_key} = {asked}. "
                f"Fix: {asked} or more",
            )


def _no_multiple(key: str, number: int, unit_key: str, unit: int) -> str:
    fit = " or ".join(map(str, multiples_around(number, unit)))
    return f"{key} = {number} is no multiple of {unit_key} = {unit}. Fix: {fit}"


def _phases(recipe: Recipe) -> Found:
    train, total = recipe.train, sum(phase.tokens for phase in recipe.phases)
    longest = max(full_phases(recipe), key=lambda phase: phase.sequence_length)
    names = [source.name for source in recipe.corpus.sources]
    if recipe.phases and train.tokens not in (None, total):
        yield (
            ("train.tokens", "phases"),
            f"train.tokens = {train.tokens} is not the sum of the phases' tokens, {total}. Fix: leave "
            "train.tokens out",
        )
    for phase in full_phases(recipe):
        key, length = phase.key("sequence_length"), phase.sequence_length
        if longest.sequence_length % length:
            longest_key, below = longest.key("sequence_length"), longest.sequence_length // length * length
            yield (
                (key, longest_key),
                f"{key} = {length} does not divide the longest of the run, {longest_key} = "
                f"{longest.sequence_length}, so text would be lost between phases. Fix: "
                f"{longest_key} = {below} or {below + length}",
            )
        for name in set(phase.mixture) - set(names) if "mixture" in phase.given else ():
            yield (
                (phase.key("mixture"), "corpus.sources"),
                _no_source(f"{phase.key('mixture')}.{name}", names),
            )
        of_a_segment = [name for name in OF_A_SEGMENT if name in phase.given]
        if phase.learning_rate is None and of_a_segment:
            own = phase.key(of_a_segment[0])
            yield (
                (own, "phases"),
                f"{own} belongs to a new segment of the learning rate, but phases.{phase.number} begins "
                f"none. Fix: phases.{phase.number}.learning_rate, or leave the key out",
            )
        rate = phase.learning_rate
        if rate is None or not LEARNING_RATE_SCHEDULES[rate.schedule].has_decay_share:
            continue
        if rate.warmup_share + rate.decay_share > 1:
            warmup_key, decay_key = phase.key("warmup_share"), phase.key("decay_share")
            yield (
                (decay_key, warmup_key),
                f"{warmup_key} = {rate.warmup_share} and {decay_key} = {rate.decay_share} are more than the "
                f"whole segment. Fix: a decay_share of at most {1 - rate.warmup_share:g}",
            )


def _batch_ramp(recipe: Recipe) -> Found:
    ramp, phase = recipe.train.batch_ramp, full_phases(recipe)[0]
    if ramp is None:
        return
    length = phase.sequence_length
    for name in ("first_tokens_per_step", "step_tokens"):
        key, size, length_key = f"train.batch_ramp.{name}", getattr(ramp, name), phase.key("sequence_length")
        if size % length:
            yield (key, length_key), _no_multiple(key, size, length_key, length)
    full_key, growth = phase.key("tokens_per_step"), phase.tokens_per_step - ramp.first_tokens_per_step
    if growth <= 0 or growth % ramp.step_tokens and not ramp.step_tokens % length:
        last = ramp.first_tokens_per_step + max(1, growth // ramp.step_tokens) * ramp.step_tokens
        yield (
            ("train.batch_ramp.step_tokens", full_key),
            f"train.batch_ramp grows from {ramp.first_tokens_per_step} by {ramp.step_tokens} tokens a step "
            f"and does not arrive at {full_key} = {phase.tokens_per_step}. Fix: {full_key} = {last}",
        )
    follows_from_text = recipe.train.tokens is None and not recipe.phases
    if ramp.tokens >= phase.tokens and not follows_from_text:
        yield (
            ("train.batch_ramp.tokens", phase.key("tokens")),
            f"train.batch_ramp.tokens = {ramp.tokens} does not end before {phase.key('tokens')} = "
            f"{phase.tokens} does. Fix: fewer tokens of the ramp, or more of the phase",
        )


def _skip_steps(recipe: Recipe) -> Found:
    for first, last in recipe.train.skip_steps:
        if last < first:
            yield (
                ("train.skip_steps",),
                f"train.skip_steps: [{first}, {last}] ends before it begins. Fix: [{last}, {first}]",
            )
            return
    if recipe.train.skip_steps and not any(_batch_ramp(recipe)) and (total_steps := steps_of_run(recipe)):
        for message in skip_complaints(recipe.train.skip_steps, total_steps):
            yield ("train.skip_steps", full_phases(recipe)[-1].key("tokens")), message
