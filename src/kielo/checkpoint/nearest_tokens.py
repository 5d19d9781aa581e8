"""Old tokens whose rows are nearest to the first rows of new ones: a row map and weights → `NearestTokens`.

What a person looks at to see that a transplant does what it should: with the tokenizer of other weights, the
neighbours make no sense. The old embedding is read once, `BLOCK_BYTES` at a time.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kielo.artifact.nearest_tokens import NearestTokens, NearToken, NewToken
from kielo.artifact.row_map import RowMap
from kielo.checkpoint.hugging_face_import import stored_embedding
from kielo.checkpoint.transplant import BLOCK_BYTES, Source, Transplant
from kielo.models.families import read_hf_config
from kielo.recipe.errors import KieloError
from kielo.tokenizer.load import TextTokenizer
from kielo.tokenizer.make_row_map import example_ids, row_in_words
from kielo.tokenizer.spelling import TokenNames

NEW_TOKENS, NEAREST = 50, 5


@dataclass(frozen=True)
class Vocabularies:
    """Two tokenizers, and the map of rows between them."""

    old: TextTokenizer
    new: TextTokenizer
    row_map: RowMap


def nearest_tokens(weights: Path, vocabularies: Vocabularies, number: int = NEW_TOKENS) -> NearestTokens:
    """Finds the `NEAREST` old tokens by cosine of `number` new ones with composed rows.

    weights: a folder in Hugging Face's form. Raises KieloError for one that cannot be read, and for an
    embedding that does not fit the map.
    """
    row_map = vocabularies.row_map
    old, new = TokenNames(vocabularies.old), TokenNames(vocabularies.new)
    source = stored_embedding(weights, read_hf_config(weights))
    ids = example_ids(row_map, number)
    cosines, near = _nearest(_first_rows(ids, row_map, source), row_map.old_vocabulary_size, source)
    found = []
    for new_id, row, old_ids in zip(ids, cosines.tolist(), near.tolist()):
        tokens = zip(map(old, old_ids), row)
        found.append(
            NewToken(
                token=new(new_id),
                made_of=row_in_words(row_map, new_id, old),
                nearest=[NearToken(token=token, cosine=cosine) for token, cosine in tokens if token],
            )
        )
    return NearestTokens(tokens=found)


def _first_rows(ids: list[int], row_map: RowMap, source: Source) -> Tensor:
    """Returns [ids, hidden]: the composed rows of the embedding, which need no first values."""
    width = source.stored.shape[1]
    shape, rows = (len(row_map.rows), width), torch.empty(len(ids), width)
    transplant = Transplant(row_map, _no_first_value)
    if complaint := transplant.misfit(shape, source.stored):
        raise KieloError(f"{source.path}: the embedding {complaint}")
    for number, new_id in enumerate(ids):
        box = (slice(new_id, new_id + 1), slice(0, width))
        transplant.fill("embed.weight", shape, rows[number : number + 1], box, source)
    return rows


def _no_first_value(name: str, *_: object) -> Tensor:
    raise AssertionError(f"{name}: a composed row needs no first value")


def _nearest(rows: Tensor, old_tokens: int, source: Source) -> tuple[Tensor, Tensor]:
    """Returns cosines and old ids, [rows, NEAREST] each, the largest cosine first."""
    width = rows.shape[1]
    most = max(1, BLOCK_BYTES // (4 * width))
    unit = torch.nn.functional.normalize(rows)
    cosines, ids = torch.empty(len(rows), 0), torch.empty(len(rows), 0, dtype=torch.int64)
    for first in range(0, old_tokens, most):
        numbers = np.arange(first, min(first + most, old_tokens))
        block = torch.nn.functional.normalize(source.read(numbers, (slice(0, width),), rows.device))
        cosines = torch.cat([cosines, unit @ block.T], dim=1)
        ids = torch.cat([ids, torch.from_numpy(numbers).expand(len(rows), -1)], dim=1)
        cosines, places = cosines.topk(min(NEAREST, cosines.shape[1]), dim=1)
        ids = ids.gather(1, places)
    return cosines, ids
