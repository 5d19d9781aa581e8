"""Texts from outside of the mixture that a run is scored on: `[[evaluate.texts]]` → held-out sets.

NAME.bin .idx      tokens of the text's documents, which begin and end as those of the run
NAME.jsonl.zst     the documents

Nothing is cleaned or dropped. The folder is beside the training tokens and not part of what is trained, so a
run may get other texts in its middle.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kielo.artifact.documents import SUFFIX, DocumentWriter
from kielo.artifact.manifest import (
    hash_file,
    hash_json,
    hash_manifest,
    is_current,
    read_manifest,
    write_stage,
)
from kielo.artifact.token_shards import TokenShardWriter
from kielo.corpus.raw_formats import RawSource, formats, is_readable, records
from kielo.corpus.raw_texts import parse
from kielo.dataset.encoded_documents import BEGINS_WITH
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import EvaluationText, Recipe
from kielo.tokenizer.load import TextTokenizer, encode, end_of_text_id, load_tokenizer, vocabulary_size

KIND, VERSION = "evaluation texts", 1


def pack_evaluation_texts(
    recipe: Recipe, tokenizer_folder: Path, folder: Path, begin: Sequence[int] = ()
) -> None:
    """Writes the texts of the recipe into `folder`, unless they are there already.

    begin: the ids with which the run's documents begin.
    counts: {"texts": {name: {"tokens", "documents", "bytes", "languages"}}}. Raises KieloError for a text
    that is not there, cannot be read or is empty, naming file and line.
    """
    texts = recipe.evaluate.texts
    if not texts and read_manifest(folder) is None:
        return
    sources = {text.name: _raw_source(text) for text in texts}
    inputs = {"tokenizer": hash_manifest(tokenizer_folder)} | {
        f"text {name}": hash_json([hash_file(Path(source.root) / file) for file in source.files])
        for name, source in sources.items()
    }
    section = {"texts": [text.model_dump(mode="json") for text in texts], "language": recipe.language}
    if begin:
        section[BEGINS_WITH] = list(begin)
    if is_current(folder, KIND, VERSION, inputs, section):
        return
    with write_stage(folder, KIND, VERSION, inputs, section) as stage:
        tokenizer = load_tokenizer(tokenizer_folder)
        stage.counts["texts"] = {
            text.name: _pack(
                sources[text.name], tokenizer, stage.folder, recipe.corpus.max_document_bytes, begin
            )
            | {"languages": [text.language or recipe.language]}
            for text in texts
        }


def _raw_source(text: EvaluationText) -> RawSource:
    place, where = Path(text.path).expanduser(), f"evaluate.texts, {text.name}: {text.path}"
    if place.is_file():
        root, files = place.parent, (place.name,)
    elif place.is_dir():
        found = (path for path in sorted(place.rglob("*")) if path.is_file())
        root, files = place, tuple(path.relative_to(place).as_posix() for path in found)
    else:
        raise KieloError(f"{where}: no such file or folder")
    files = tuple(file for file in files if is_readable(Path(file), "text"))
    if not files:
        raise KieloError(f"{where}: no file of a known format; read are {formats('text')}")
    return RawSource(
        name=text.name,
        root=str(root),
        files=files,
        stamps=(),
        kind="text",
        is_cleaned=False,
        documents="lines",
        text_fields=(text.text_field,),
        max_documents=None,
        origin=text.path,
        fingerprint="",
    )


def _documents(source: RawSource, max_bytes: int) -> Iterator[dict[str, Any]]:
    for record in records(source, max_bytes):
        raw = parse(record, source, max_bytes)
        yield {"id": raw.id, "text": raw.text, "source": source.name, "metadata": {}}


def _pack(
    source: RawSource, tokenizer: TextTokenizer, folder: Path, max_bytes: int, begin: Sequence[int]
) -> dict[str, Any]:
    counts = {"tokens": 0, "documents": 0, "bytes": 0}
    end = end_of_text_id(tokenizer)
    with ExitStack() as files:
        shard = files.enter_context(TokenShardWriter(folder / source.name, vocabulary_size(tokenizer)))
        written = files.enter_context(DocumentWriter(folder / (source.name + SUFFIX)))
        for document in _documents(source, max_bytes):
            (row,) = encode(tokenizer, [document["text"]])
            if not row:
                continue
            shard.add(np.array([*begin, *row, end], dtype=np.int64))
            written.add(document)
            counts["tokens"] += len(begin) + len(row) + 1
            counts["documents"] += 1
            counts["bytes"] += len(document["text"].encode("utf-8", "surrogatepass"))
        if not counts["documents"]:
            raise KieloError(f"evaluate.texts, {source.name}: {source.origin}: holds no text")
    return counts
