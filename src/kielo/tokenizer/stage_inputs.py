"""Inputs of the tokenizer stage beside the text: a ready tokenizer, the tokenizer of the weights, vectors."""

from collections.abc import Iterator
from pathlib import Path

import xxhash

from kielo.artifact.prefetched import prefetched_folder
from kielo.artifact.token_set import TokenSet
from kielo.artifact.token_sources import find_token_sources
from kielo.artifact.weights_folder import is_on_hub, resolve_tokenizer, resolve_weights, weights_here
from kielo.recipe.errors import KieloError
from kielo.recipe.places import conversion
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import (
    TOKENIZER_FILE,
    TextTokenizer,
    decode,
    end_of_text_id,
    main_files,
    vocabulary_size,
)
from kielo.tokenizer.make_row_map import check_form

_LEAST_BYTES_OF_TOKENS = 2  # of a token on average, to look at enough tokens
_MOST_EMPTY = 4096  # documents, one after another


def decoded_documents(recipe: Recipe, tokenizer: TextTokenizer, most_bytes: int) -> Iterator[str]:
    """Yield the last documents of each source of ready tokens, at most `most_bytes` in all."""
    size, end = vocabulary_size(tokenizer), end_of_text_id(tokenizer)
    found = find_token_sources(recipe, size)
    for name, files in found.items():
        stream = TokenSet(files.folder, files.files, sum(file.tokens for file in files.files), end)
        left, empty = most_bytes // len(found), 0
        for start, stop in stream.document_ranges(max(0, stream.num_tokens - left // _LEAST_BYTES_OF_TOKENS)):
            row = stream.read(start, stop - start)
            empty = 0 if (row != end).any() else empty + 1
            if empty > _MOST_EMPTY:
                raise KieloError(
                    f"corpus.sources, {name}: {files.folder}/{stream.document_name(start)} and "
                    f"{_MOST_EMPTY:,} documents before it have no token but {end}, end-of-text, as in a "
                    "sparse file that was never written. Fix: complete files"
                )
            if empty:
                continue
            if not 0 <= int(row.min()) <= int(row.max()) < size:
                raise KieloError(
                    f"corpus.sources, {name}: {files.folder}/{stream.document_name(start)} has ids "
                    f"{int(row.min())} to {int(row.max())}, and the tokenizer has 0 to {size - 1}. "
                    "Fix: tokenizer.path = the tokenizer that made these tokens, or the source's "
                    "tokens_dtype if its files do not tell"
                )
            text = decode(tokenizer, [row[row != end].tolist()])[0]
            left -= len(text.encode())
            if left < 0:
                break
            yield text


def check_inputs(recipe: Recipe) -> None:
    ready, weights = recipe.tokenizer.ready, recipe.model.weights
    offline = prefetched_folder() is not None  # only then is the hub's part asked for now
    is_folder = "/" in (ready or "") and not is_on_hub(ready)  # the hub has names without "/" too
    if ready and (offline or is_folder):
        ready_files(resolve_tokenizer(ready), recipe.tokenizer.ready_key)
    if weights and (offline or not is_on_hub(weights) or weights_here(weights)):
        resolve_weights(weights)
        tokenizer_of_weights(recipe)


def check_vectors(recipe: Recipe) -> None:
    if path := transplant_vectors(recipe):
        check_form(path)


def ready_files(folder: Path, key: str) -> list[Path]:
    if not (folder / TOKENIZER_FILE).is_file():
        fix = conversion(folder) or ". Fix: a folder in Hugging Face form"
        raise KieloError(f"{key} = {str(folder)!r}: no {TOKENIZER_FILE} there{fix}")
    return [folder / name for name in main_files(folder)]


def tokenizer_of_weights(recipe: Recipe) -> Path | None:
    """Return the folder of the tokenizer that a transplant replaces, or None. Fetch weights on the hub."""
    if recipe.model.transplant is None or recipe.model.weights is None:
        return None
    folder = resolve_weights(recipe.model.weights)
    if not (folder / TOKENIZER_FILE).is_file():
        raise KieloError(
            f"model.weights = {recipe.model.weights!r}: {folder} has no {TOKENIZER_FILE}, and "
            "model.transplant needs the vocabulary of the weights"
            + (conversion(folder) or f". Fix: their {TOKENIZER_FILE} in that folder")
        )
    return folder


def transplant_vectors(recipe: Recipe) -> Path | None:
    if recipe.model.transplant_vectors is None:
        return None
    path = Path(recipe.model.transplant_vectors).expanduser()
    if not path.is_file():
        raise KieloError(
            f"model.transplant_vectors = {recipe.model.transplant_vectors!r}: no such file. Fix: "
            'vectors of tokens as .vec or .npz, or model.transplant = "mean", which needs none'
        )
    return path


def place_by_hash(text: str) -> float:
    """Return a number in [0, 1) from the text alone (xxh3-64 of its UTF-8), spread evenly over texts."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")) / 2**64


def is_heldout(text: str, share: float) -> bool:
    """Return True for about `share` of all texts, which neither the vocabulary nor the model learns from."""
    return place_by_hash(text) < share
