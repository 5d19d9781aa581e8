"""Texts from outside of the mixture that a run is scored on: `[[evaluate.texts]]` → held-out sets.

NAME.bin and .idx have the documents' tokens, framed as the run's documents, and NAME.jsonl.zst the documents.
Nothing is cleaned or dropped. The folder is beside the training tokens, so the texts may change in the middle
of a run.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from kielo.artifact import manifest
from kielo.artifact.documents import SUFFIX, Document, DocumentWriter
from kielo.artifact.json_object import JsonTable
from kielo.artifact.stage_counts import EvaluationTextCounts, TokenCounts
from kielo.artifact.token_shards import TokenShardWriter
from kielo.corpus.evaluation_items import evaluation_source
from kielo.corpus.raw_formats import RawSource, records
from kielo.corpus.raw_texts import parse
from kielo.dataset.document_packer import BEGINS_WITH, DocumentEncoder, empty_counts
from kielo.recipe.cards import language_code
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import EvaluationText, Recipe
from kielo.tokenizer.load import end_of_text_id, load_tokenizer, vocabulary_size

KIND, VERSION = "evaluation texts", 1


def pack_evaluation_texts(
    recipe: Recipe, tokenizer_folder: Path, folder: Path, begin: Sequence[int] = ()
) -> None:
    """Write the texts of the recipe into `folder`, unless it is current. begin: ids before documents."""
    texts = recipe.evaluate.texts
    if not texts and manifest.read_manifest(folder) is None:
        return
    sources = {text.name: evaluation_source(text) for text in texts}
    inputs = {"tokenizer": manifest.hash_manifest(tokenizer_folder)}
    for name, source in sources.items():
        hashes = [manifest.hash_file(Path(source.root) / file) for file in source.files]
        inputs[f"text {name}"] = manifest.hash_json(hashes)
    section: JsonTable = {"texts": [_settings(text) for text in texts], "language": recipe.language}
    if begin:
        section[BEGINS_WITH] = list(begin)
    if manifest.is_current(folder, KIND, VERSION, inputs, section):
        return
    with manifest.write_stage(folder, KIND, VERSION, inputs, section) as stage:
        tokenizer = load_tokenizer(tokenizer_folder)
        end, size = end_of_text_id(tokenizer), vocabulary_size(tokenizer)
        encoder, made = DocumentEncoder(recipe, tokenizer, end), {}
        for text in texts:
            counts = _pack(sources[text.name], recipe, encoder, stage.folder, begin, size)
            languages = [language_code(text.language or recipe.language)]
            made[text.name] = TokenCounts.model_validate({**counts, "languages": languages})
        stage.counts.update(EvaluationTextCounts(texts=made).content())


def _settings(text: EvaluationText) -> JsonTable:
    """Return the settings that decide how a text is read. Older manifests have no kind and loss."""
    settings = text.model_dump(mode="json") | {"text_field": text.text_field or "text"}
    return {key: settings[key] for key in settings if text.kind != "text" or key not in ("kind", "loss")}


def _documents(source: RawSource, max_bytes: int) -> Iterator[Document]:
    for record in records(source, max_bytes):
        raw = parse(record, source, max_bytes)
        file = record.path.relative_to(source.root).as_posix()
        place = {"file": file, "number": record.number} if raw.facts else {}
        yield {"id": raw.id, "text": raw.text, "source": source.name, "metadata": place | raw.facts}


def _pack(
    source: RawSource, recipe: Recipe, encoder: DocumentEncoder, folder: Path, begin: Sequence[int], size: int
) -> dict[str, int]:
    is_masked = any(text.name == source.name and text.loss == "answers" for text in recipe.evaluate.texts)
    counts = empty_counts(is_masked)
    del counts["words"]
    with ExitStack() as files:
        shard = files.enter_context(TokenShardWriter(folder / source.name, size, is_masked))
        written = files.enter_context(DocumentWriter(folder / (source.name + SUFFIX)))
        for document in _documents(source, recipe.corpus.max_document_bytes):
            (one,) = encoder.encode([document])
            if not len(one.ids):
                continue
            first = list(begin) if one.is_framed else []
            row = np.array([*first, *one.ids, encoder.end_of_text_id], dtype=np.int64)
            flags = None
            if is_masked:
                flags = np.concatenate([np.zeros(len(first), bool), one.loss_mask])
                counts["tokens_with_loss"] += int(flags.sum())
                counts["bytes_with_loss"] += one.bytes_with_loss or 0
            shard.add(row, flags)
            written.add(document)
            counts["tokens"] += len(row)
            counts["documents"] += 1
            counts["bytes"] += len(document["text"].encode("utf-8", "surrogatepass"))
        if not counts["documents"]:
            raise KieloError(f"evaluate.texts, {source.name}: {source.origin}: has no text")
    return counts
