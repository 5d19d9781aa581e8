"""Sequences that cannot be read, and the documents of those that can, of a few tokens by hand."""

import os
from pathlib import Path

import numpy as np
import pytest

from kielo.artifact.manifest import write_stage
from kielo.artifact.stage_json import write_json
from kielo.artifact.token_sources import TokenFiles, TokenFileSet, find_token_files
from kielo.dataset.batches import NOT_COUNTED, Batch, Batches, Unreadable, open_shard
from kielo.dataset.query import document_ids, documents_of_step
from kielo.dataset.readable import read_sequences, without_sequences
from kielo.recipe.errors import KieloError
from tests.dataset.test_batches import phase, write_tokens

# Five sequences of 4 tokens, of which the third has an id beyond 59.
ROWS = [[1, 2, 3, 0], [4, 5, 0], [6, 20, 70, 0], [7, 8, 9, 10, 11, 12, 13, 14, 0]]
SAMPLES = np.arange(5)


def opened(folder: Path, mask_documents: bool = True) -> Batches:
    write_tokens(folder, {"a": ROWS, "b": [[20, 21, 22, 23, 24, 0]] * 3})
    for name, ids in (("a", "p q r s"), ("b", "x y z")):
        (folder / "tokens" / f"{name}.ids.txt").write_text("\n".join(ids.split()) + "\n")
    of = phase(mixture={"a": 1.0}, sequence_length=4, sequences_per_step=5)
    return Batches(folder / "tokens", 7, of, 4, 0, mask_documents)


def sample_of(batches: Batches, sequence: int) -> int:
    """Returns the sample of the first epoch that is this sequence."""
    return batches.order.locate(SAMPLES).sequence.tolist().index(sequence)


@pytest.mark.parametrize("mask_documents", [True, False])
def test_ids_without_a_row_leave_one_sequence_empty(tmp_path, mask_documents):
    """70 is an input and a label of the sequence of tokens 8 to 11, and of no other one."""
    batches = opened(tmp_path, mask_documents)
    sound, bad = batches.read(SAMPLES), sample_of(batches, 2)
    found = read_sequences(batches, SAMPLES, 60)
    expected = Unreadable(bad, "a", ((8, 4),), ("r", "s"), "has ids up to 70, but the vocabulary has 60 rows")
    assert found.unreadable == (expected,)
    assert found.samples.tolist() == [0, 1, 2, 3, 4]
    others = [row for row in range(5) if row != bad]
    for name in ("inputs", "labels", "documents"):
        values, whole = getattr(found, name), getattr(sound, name)
        if name == "documents" and not mask_documents:
            assert values is None
            continue
        assert values.dtype == whole.dtype and values.shape == (5, 4)
        assert values[bad].tolist() == [0, 0, 0, 0]
        assert np.array_equal(values[others], whole[others])


def test_the_largest_id_has_a_row(tmp_path):
    """As an input and as a label: 70 is both, and 71 rows have it; one row fewer have not."""
    batches = opened(tmp_path)
    one = np.array([sample_of(batches, 2)])
    assert read_sequences(batches, SAMPLES, 71).unreadable == ()
    assert read_sequences(batches, one, 71).unreadable == ()
    assert len(read_sequences(batches, one, 70).unreadable) == 1
    assert read_sequences(batches, np.arange(0), 1).inputs.shape == (0, 4)


class Damaged:
    """Batches of which some hold other ids than are on the disk."""

    def __init__(self, batches: Batches, inputs: list[int], labels: list[int]):
        self.order, self.names, self.shards = batches.order, batches.names, batches.shards
        self.phase, self.ranges, self.folder, self.mask_documents = (
            batches.phase, batches.ranges, batches.folder, False
        )  # fmt: skip
        self._rows = np.array([inputs]), np.array([labels])

    def read(self, samples: np.ndarray) -> Batch:
        inputs, labels = (np.repeat(row, len(samples), axis=0) for row in self._rows)
        return Batch(inputs, labels, None, samples)


@pytest.mark.parametrize(
    "inputs, labels, largest",
    [
        ([3, 9, 4, 9], [9, NOT_COUNTED, 9, 0], None),
        ([3, 10, 4, 9], [9, 9, 9, 9], 10),
        ([3, 9, 4, 9], [9, 9, 11, 9], 11),
        ([3, -1, 4, 5], [9, 9, 9, 9], 9),
        ([3, 9, 4, 9], [9, -1, 9, 7], 9),
        ([0, 0, 0, 0], [NOT_COUNTED] * 4, None),
    ],
)
def test_ids_outside_by_their_borders(tmp_path, inputs, labels, largest):
    """Of ten rows 0 to 9 are inside, and -100 is no label; the reason names the largest id of the sample."""
    found = read_sequences(Damaged(opened(tmp_path), inputs, labels), np.array([0, 3]), 10)
    if largest is None:
        assert found.unreadable == () and found.inputs.tolist() == [inputs] * 2
        return
    assert [one.sample for one in found.unreadable] == [0, 3]
    reason = f"has ids up to {largest}, but the vocabulary has 10 rows"
    assert {one.reason for one in found.unreadable} == {reason}
    assert found.inputs.tolist() == found.labels.tolist() == [[0, 0, 0, 0]] * 2


@pytest.mark.parametrize(
    "error, reason",
    [
        (OSError("a.bin: ends at byte 7"), "a.bin: ends at byte 7"),
        (KieloError("a.idx: damaged"), "a.idx: damaged"),
        (
            PermissionError(13, "Permission denied", "a.bin"),
            "a.bin: Permission denied; see who may read and write there",
        ),
    ],
)
def test_what_a_file_says_is_the_reason(tmp_path, monkeypatch, error, reason):
    """In words, where there are any for such an error; other errors are not held back."""
    batches = opened(tmp_path)
    read = batches.read

    def failing(samples: np.ndarray) -> Batch:
        if 3 in samples:
            raise error
        return read(samples)

    monkeypatch.setattr(batches, "read", failing)
    (one,) = read_sequences(batches, SAMPLES, 71).unreadable
    assert (one.sample, one.source, one.reason) == (3, "a", reason)
    error = ValueError("odd")
    with pytest.raises(ValueError, match="odd"):
        read_sequences(batches, SAMPLES, 71)


def test_documents_are_named_as_far_as_they_are_known(tmp_path):
    """Without the list of ids there are none; ranges of a stream name each document once, in their order."""
    batches = opened(tmp_path)
    assert document_ids(batches, 0, [(5, 4), (0, 2), (7, 1)]) == ["q", "r", "p"]
    assert document_ids(batches, 0, []) == []
    (tmp_path / "tokens" / "a.ids.txt").unlink()
    (one,) = read_sequences(batches, SAMPLES, 60).unreadable
    assert one.documents == () and one.ranges == ((8, 4),)


def test_sequences_are_emptied_by_their_samples():
    """A copy: the batch stays as it is, and is given back where none of its samples is asked for."""
    inputs, labels = np.array([[1, 2], [3, 4], [5, 6]]), np.array([[2, 3], [4, NOT_COUNTED], [6, 7]])
    batch = Batch(inputs, labels, np.array([[0, 1], [0, 0], [0, 1]]), np.array([30, 10, 20]))
    assert without_sequences(batch, {0, 1, 2}, 9) is batch
    found = without_sequences(batch, {20, 30, 40}, 9)
    assert found.inputs.tolist() == [[9, 9], [3, 4], [9, 9]]
    assert found.labels.tolist() == [[NOT_COUNTED] * 2, [4, NOT_COUNTED], [NOT_COUNTED] * 2]
    assert found.documents.tolist() == [[0, 0], [0, 0], [0, 0]]
    assert found.samples.tolist() == [30, 10, 20]
    assert inputs.tolist() == [[1, 2], [3, 4], [5, 6]] and batch.documents.tolist() == [
        [0, 1],
        [0, 0],
        [0, 1],
    ]
    assert without_sequences(Batch(inputs, labels, None, np.arange(3)), {1}, 9).documents is None


def test_documents_of_files_that_are_read_in_place(tmp_path):
    """Named by file and first token, beside a source with ids; each part has its own tokens and source."""
    (tmp_path / "theirs").mkdir()
    stream = np.array([1, 2, 0, 3, 4, 5, 0, 6, 0], "<u2")
    stream.tofile(tmp_path / "theirs" / "flat.npy")
    found = find_token_files("own", str(tmp_path / "theirs"), 2)
    write_tokens(tmp_path, {"packed": [[11, 12, 0], [13, 14, 15, 0]]}, {"packed": [[0, 1, 1], [1, 1, 0, 1]]})
    shards = {path.name: path.read_bytes() for path in (tmp_path / "tokens").glob("packed.*")}
    with write_stage(tmp_path / "tokens", "tokens", 1, {}, {}) as stage:
        for name, content in shards.items():
            (stage.folder / name).write_bytes(content)
        (stage.folder / "packed.ids.txt").write_text("m\nn\n")
        of = TokenFileSet(files=found.files, training_tokens=8)
        write_json(stage.folder, TokenFiles(end_of_text_id=0, sources={"own": of}))
        place = {"folder": str(found.folder), "times_ns": [list(times) for times in found.times_ns]}
        stage.counts.update(sources={"own": place, "packed": {}}, heldout={"documents": 0})
    for file_bytes in (b"\1\0\2\0" * 4, stream.tobytes()):  # another file, and it again
        (tmp_path / "theirs" / "flat.npy").write_bytes(file_bytes)
        os.utime(tmp_path / "theirs" / "flat.npy", ns=found.times_ns[0] * 2)
        if file_bytes != stream.tobytes():
            with pytest.raises(KieloError, match="flat.npy: changed since the pack stage described it"):
                open_shard(tmp_path / "tokens", "own")
    of = phase(mixture={"own": 1.0, "packed": 1.0}, sequence_length=5, sequences_per_step=4)
    rows = documents_of_step(tmp_path / "tokens", 7, of, 5, 0, 1, lambda ids: " ".join(map(str, ids)))
    shown = ("source", "document", "tokens", "with_loss", "text")
    assert {tuple(row[key] for key in shown) for row in rows} == {
        ("own", "flat.npy: token 0", 3, 3, "1 2 0"), ("own", "flat.npy: token 3", 2, 2, "3 4"),
        ("own", "flat.npy: token 3", 2, 2, "5 0"), ("packed", "m", 3, 2, "11 12 0"),
        ("packed", "n", 2, 2, "13 14"), ("packed", "n", 1, 0, "15"),
    }  # fmt: skip
