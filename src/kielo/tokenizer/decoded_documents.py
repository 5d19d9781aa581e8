"""Text of ready token files, where a run has no corpus to measure a tokenizer on."""

from collections.abc import Iterator

from kielo.artifact.token_set import TokenSet
from kielo.artifact.token_sources import find_token_sources
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import TextTokenizer, decode, end_of_text_id, vocabulary_size

_LEAST_BYTES_OF_TOKENS = 2  # of a token on average, to look at enough of them
_MOST_EMPTY = 4096  # documents, one after another


def decoded_documents(recipe: Recipe, tokenizer: TextTokenizer, most_bytes: int) -> Iterator[str]:
    """Yields the last documents of each source of ready tokens, up to so many bytes in all.

    Raises KieloError for ids beyond the vocabulary, and for thousands of documents without a token.
    """
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
                    "sparse file that was never written; what would work: whole files"
                )
            if empty:
                continue
            if not 0 <= int(row.min()) <= int(row.max()) < size:
                raise KieloError(
                    f"corpus.sources, {name}: {files.folder}/{stream.document_name(start)} has ids "
                    f"{int(row.min())} to {int(row.max())}, and the tokenizer has 0 to {size - 1}; "
                    "what would work: tokenizer.path = the tokenizer that made these tokens, or tokens_dtype "
                    "of the source where a file does not tell"
                )
            text = decode(tokenizer, [row[row != end].tolist()])[0]
            left -= len(text.encode())
            if left < 0:
                break
            yield text
