"""Documents by their first tokens, from the indexes of Megatron and datatrove, and without an index."""

import numpy as np
import pytest

from kielo.artifact.token_file import EndsIndex, MegatronIndex, OpenTokenFile, TokenFile


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
    assert megatron.starts(1, 3).tolist() == [5, 5] and megatron.starts(3, 4).tolist() == [9]


def opened(path, ids: list[int] | np.ndarray, index=None, head: bytes = b"") -> OpenTokenFile:
    """A file of uint16 ids, after `head`, in which 0 is end-of-text."""
    data = head + np.array(ids, "<u2").tobytes()
    path.write_bytes(data)
    described = TokenFile(
        name=path.name, format="npy", dtype="<u2", first_byte=len(head), tokens=len(ids), documents=None,
        bytes=len(data), index_bytes=0, fingerprint="",
    )  # fmt: skip
    return OpenTokenFile(path, described, index, 0)


def test_documents_without_an_index_begin_after_end_of_text(tmp_path) -> None:
    """In every range of the file, as counted by hand: at 0, 2, 5 and 6, and none at the end."""
    file = opened(tmp_path / "f", [5, 0, 7, 8, 0, 0, 9, 0], head=b"abcd")
    assert file.tokens[:].tolist() == [5, 0, 7, 8, 0, 0, 9, 0]
    for start in range(9):
        for end in range(start, 9):
            found = file.document_starts(start, end)
            assert found.tolist() == [at for at in (0, 2, 5, 6) if start <= at < end], (start, end)
            assert found.dtype == np.int64
    names = [file.document_name(token) for token in range(8)]
    assert names == [f"token {at}" for at in (0, 0, 2, 2, 2, 5, 6, 6)]
    names = [opened(tmp_path / "g", [0, 0, 4]).document_name(token) for token in range(3)]
    assert names == ["token 0", "token 1", "token 2"]


def test_documents_with_an_index_are_numbered(tmp_path) -> None:
    """The second has no token, and no token is in it."""
    file = opened(tmp_path / "f", range(1, 10), EndsIndex(np.array([3, 3, 7, 9], np.uint64)))
    assert file.document_starts(0, 9).tolist() == [0, 3, 3, 7] and file.document_starts(4, 8).tolist() == [7]
    names = [file.document_name(token) for token in range(9)]
    assert names == [f"document {number}" for number in (0, 0, 0, 2, 2, 2, 2, 3, 3)]


@pytest.mark.parametrize(
    ("token", "begin"),
    [(10, 0), (11, 11), (70_000, 11), (70_001, 70_001), (70_001 + 65_536, 70_001), (199_999, 70_001)],
)
def test_the_beginning_of_a_long_document_is_found(token, begin, tmp_path) -> None:
    """However far before the token it is: looked for by 65,536 tokens."""
    ids = np.ones(200_000, np.uint16)
    ids[[10, 70_000]] = 0
    assert opened(tmp_path / "f", ids).document_name(token) == f"token {begin}"
