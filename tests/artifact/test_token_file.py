"""Documents by their first tokens, from the indexes of Megatron and datatrove."""

import numpy as np

from kielo.artifact.token_file import EndsIndex, MegatronIndex


def test_documents_in_indexes_of_others() -> None:
    """First tokens of documents, empty ones too; the first document that begins at a token or after it."""
    ends = EndsIndex(np.array([3, 3, 7, 9], np.uint64))
    assert ends.num_documents == 4 and ends.starts(0, 4).tolist() == [0, 3, 3, 7]
    assert (
        ends.starts(1, 3).tolist() == [3, 3]
        and ends.starts(0, 0).tolist() == [] == ends.starts(2, 2).tolist()
    )
    assert ends.starts(0, 1).tolist() == [0] and ends.starts(0, 4).dtype == np.int64
    assert [ends.number_at(token) for token in (0, 1, 3, 4, 7, 8)] == [0, 1, 1, 3, 3, 4]
    megatron = MegatronIndex(np.array([0, 4, 10]), np.array([0, 2, 2, 3, 3]), 9, 2)
    assert megatron.num_documents == 4 and megatron.starts(0, 4).tolist() == [0, 5, 5, 9]
