"""Do a recipe's values fit each other, and the cards? A typed `Recipe` → complaints, all at once.

Only what can be known before any text was read; numbers that depend on the text or on the ranks are `plan`'s.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from kielo.recipe.cards import clusters, language, languages
from kielo.recipe.complaints import Complaint
from kielo.recipe.sections import Recipe

_BYTES_AND_END_OF_TEXT = 257  # a byte-level vocabulary begins with the 256 bytes and one special token


def check(recipe: Recipe, origin: Callable[[str], str]) -> list[Complaint]:
    """Everything that is wrong; `origin` says which file (or --set) a dotted key came from."""
    complaints = []
    for part in (_names, _sources, _model, _weights, _steps):
        for keys, message in part(recipe):
            where = next((origin(key) for key in keys if origin(key) == "--set"), origin(keys[0]))
            complaints.append(Complaint(keys, f"{where}: {message}"))
    return complaints


Found = Iterator[tuple[tuple[str, ...], str]]


def _names(recipe: Recipe) -> Found:
    if recipe.language not in languages():
        yield ("language",), f"language = {recipe.language!r} has no card; known: {', '.join(languages())}"
    elif recipe.corpus.language_identifier not in language(recipe.language).identifier_codes:
        known = ", ".join(language(recipe.language).identifier_codes)
        yield (
            ("corpus.language_identifier", "language"),
            f"corpus.language_identifier = {recipe.corpus.language_identifier!r} does not know language "
            f"{recipe.language!r}; what would work: {known}",
        )
    if recipe.cluster not in clusters():
        yield ("cluster",), f"cluster = {recipe.cluster!r} has no card; known: {', '.join(clusters())}"


def _sources(recipe: Recipe) -> Found:
    names = [source.name for source in recipe.corpus.sources]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield ("corpus.sources",), f"corpus.sources: {name!r} names {names.count(name)} sources; give each its own name"
    for name in recipe.dataset.mixture:
        if name not in names:
            yield (
                ("dataset.mixture", "corpus.sources"),
                f"dataset.mixture.{name}: no source has this name; the sources are {', '.join(names)}",
            )


def _model(recipe: Recipe) -> Found:
    model = recipe.model
    if model.weights is not None:  # the weights' config.json says all this
        return
    heads, key_value_heads = model.num_attention_heads, model.num_key_value_heads
    if model.head_dim is None and model.hidden_size % (2 * heads):
        yield (
            ("model.hidden_size", "model.num_attention_heads"),
            f"model.hidden_size = {model.hidden_size} is not an even number of values for each of "
            f"model.num_attention_heads = {heads}; what would work: hidden_size "
            f"{max(1, model.hidden_size // (2 * heads)) * 2 * heads}, or model.head_dim set to an even number",
        )
    if model.head_dim is not None and model.head_dim % 2:
        yield ("model.head_dim",), f"model.head_dim = {model.head_dim} is odd, but rotary positions turn pairs; make it even"
    if key_value_heads is not None and heads % key_value_heads:
        fit = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        yield (
            ("model.num_key_value_heads", "model.num_attention_heads"),
            f"model.num_key_value_heads = {key_value_heads} does not divide model.num_attention_heads = {heads}; "
            f"what would work: {fit}",
        )
    length, positions = recipe.dataset.sequence_length, model.max_position_embeddings
    if positions is not None and positions < length:
        yield (
            ("model.max_position_embeddings", "dataset.sequence_length"),
            f"model.max_position_embeddings = {positions} is less than dataset.sequence_length = {length}; "
            f"leave it out, or make it {length} or more",
        )
    size, learnt = model.vocab_size, recipe.tokenizer.vocab_size
    if size is not None and recipe.tokenizer.path is None and size < learnt:
        yield (
            ("model.vocab_size", "tokenizer.vocab_size"),
            f"model.vocab_size = {size} cannot hold tokenizer.vocab_size = {learnt}; leave it out, or make it "
            f"{learnt} or more",
        )


def _weights(recipe: Recipe) -> Found:
    tokenizer, weights = recipe.tokenizer, recipe.model.weights
    if tokenizer.path is None and tokenizer.vocab_size < _BYTES_AND_END_OF_TEXT:
        yield (
            ("tokenizer.vocab_size",),
            f"tokenizer.vocab_size = {tokenizer.vocab_size} does not hold the 256 bytes and the end of text; "
            f"what would work: {_BYTES_AND_END_OF_TEXT} or more",
        )
    if tokenizer.path is not None and not (Path(tokenizer.path) / "tokenizer.json").is_file():
        yield (
            ("tokenizer.path",),
            f"tokenizer.path = {tokenizer.path!r}: no tokenizer.json in this folder; give a Hugging Face tokenizer's "
            "folder, or leave the key out to train one",
        )
    if weights is None:
        return
    if not weights.startswith("hf:") or weights == "hf:":
        yield ("model.weights",), f"model.weights = {weights!r} does not fit; what would work: hf:FOLDER"
    elif tokenizer.path is None:
        yield (
            ("model.weights", "tokenizer.path"),
            f"model.weights = {weights!r} come with their own vocabulary; set tokenizer.path to the folder of their "
            f"tokenizer.json (often {weights.removeprefix('hf:')})",
        )


def _steps(recipe: Recipe) -> Found:
    train, length = recipe.train, recipe.dataset.sequence_length
    if train.tokens_per_step % length:
        below = train.tokens_per_step // length * length
        fit = [str(number) for number in (below, below + length) if number]
        yield (
            ("train.tokens_per_step", "dataset.sequence_length"),
            f"train.tokens_per_step = {train.tokens_per_step} is no multiple of dataset.sequence_length = {length}; "
            f"what would work: {' or '.join(fit)}",
        )
    if train.tokens < train.tokens_per_step:
        yield (
            ("train.tokens", "train.tokens_per_step"),
            f"train.tokens = {train.tokens} is less than one step of train.tokens_per_step = {train.tokens_per_step}; "
            f"what would work: {train.tokens_per_step} or more",
        )
    if train.schedule == "wsd" and train.warmup_share + train.decay_share > 1:
        yield (
            ("train.decay_share", "train.warmup_share"),
            f"train.warmup_share = {train.warmup_share} and train.decay_share = {train.decay_share} are more than the "
            f"whole run; what would work: a decay_share of at most {1 - train.warmup_share:g}",
        )
