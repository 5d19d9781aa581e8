"""Scores of a model beside baselines, which are there together or not at all; counts may be zero."""

import pytest
from pydantic import ValidationError

from kielo.artifact.scores import BitsPerByte, Scores, SetScore


def test_baselines_are_all_there_or_none_is() -> None:
    whole = {"model": 1.25, "unigram": 3.5, "xz": 2.5, "ngram": 2.0}
    assert list(BitsPerByte(**whole).baselines().items()) == [("unigram", 3.5), ("xz", 2.5), ("ngram", 2.0)]
    for missing in ("unigram", "xz", "ngram"):
        assert BitsPerByte(**whole | {missing: None}).baselines() == {}


def test_counts_are_from_zero() -> None:
    of_set = {"name": "a", "languages": [], "bits_per_byte": 1.0, "bytes": 0, "documents": 0}
    whole = {
        "model": "m", "bits_per_byte": BitsPerByte(model=1.0), "samples": [], "sampling": {},
        "heldout_bytes": 0, "heldout_documents": 0, "heldout_tokens": 0, "sequence_length": 2, "stride": 1,
        "convention": "", "heldout_documents_in_all": 0, "training_bytes": 0,
        "training_bytes_of_byte_baselines": 0, "ngram_order": 1,
    }  # fmt: skip
    for kind, values, counts in (
        (SetScore, of_set, ("bytes", "documents")),
        (Scores, whole, ("heldout_bytes", "heldout_documents", "heldout_tokens")),
    ):
        kind(**values)
        for count in counts:
            with pytest.raises(
                ValidationError, match=f"{count}\n  Input should be greater than or equal to 0"
            ):
                kind(**values | {count: -1})
