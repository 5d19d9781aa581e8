"""Fields of HPLT and FineWeb2: addresses, dates, scores, and sizes of clusters of near copies.

They become metadata of the documents, which filters and mixtures can use.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from kielo.artifact.json_object import JsonTable
from kielo.corpus.step import DocumentFilter, SplitDocument
from kielo.recipe.sections import Source

NOT_FINITE = "not_finite"  # scores that are NaN or infinite, by fact
LANGUAGE_SCORE, DOCUMENT_SCORE = "language_score", "document_score"
_TYPES: Mapping[str, tuple[type, ...]] = {
    "url": (str,),
    "date": (str,),
    LANGUAGE_SCORE: (float, int),
    DOCUMENT_SCORE: (float, int),
    "cluster_size": (int,),
}


@dataclass(frozen=True)
class KnownCorpus:
    """A published format. facts: key of a document's metadata → field. marks: fields of all records."""

    marks: frozenset[str]
    facts: Mapping[str, str]


_KNOWN = (
    # HPLT 2 and 3: https://hplt-project.org/datasets. Of a list the first value counts: the most probable
    # language, and the score of the whole document.
    KnownCorpus(
        frozenset({"u", "prob", "doc_scores"}),
        {
            "url": "u",
            "date": "ts",
            LANGUAGE_SCORE: "prob",
            DOCUMENT_SCORE: "doc_scores",
            "cluster_size": "cluster_size",
        },
    ),
    # FineWeb and FineWeb2: https://huggingface.co/datasets/HuggingFaceFW/fineweb-2
    KnownCorpus(
        frozenset({"url", "date", "language_score"}),
        {
            "url": "url",
            "date": "date",
            LANGUAGE_SCORE: "language_score",
            "cluster_size": "minhash_cluster_size",
        },
    ),
)


def fields_of_facts(present: Collection[str]) -> tuple[str, ...]:
    """Return the fields that hold facts in a file with the fields `present`."""
    return tuple(field for known in _KNOWN if known.marks <= set(present) for field in known.facts.values())


def facts_of(fields: JsonTable) -> JsonTable:
    """Return a record's facts for the metadata of its document.

    A fact of an unusual type is left out, and so is a score that is no finite number.
    """
    return {fact: value for fact, value in _found(fields).items() if _fits(value, _TYPES[fact])}


def not_finite(fields: JsonTable) -> tuple[str, ...]:
    """Return the facts that `facts_of` leaves out because they are NaN or infinite."""
    return tuple(fact for fact, value in _found(fields).items() if not _is_finite(value))


def _found(fields: JsonTable) -> JsonTable:
    found: JsonTable = {}
    for known in _KNOWN:
        if known.marks <= fields.keys():
            found |= {fact: _first(fields.get(field)) for fact, field in known.facts.items()}
    return found


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _fits(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool) and _is_finite(value)


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or isfinite(value)


def score_filters(source: Source) -> list[DocumentFilter]:
    asked = ((LANGUAGE_SCORE, source.min_language_score), (DOCUMENT_SCORE, source.min_document_score))
    least = [(fact, score) for fact, score in asked if score is not None]
    return [LeastScores(least)] if least else []


@dataclass
class LeastScores(DocumentFilter):
    """A filter of documents by the scores that their corpus gave them. least: key of the metadata → score."""

    name = "scores"
    least: Sequence[tuple[str, float]]

    def judge(self, document: SplitDocument) -> str | None:
        for fact, least in self.least:
            score = document.metadata.get(fact)
            if score is None:
                return f"no {fact}"
            if score < least:
                return f"{fact} under {least:g}"
        return None
