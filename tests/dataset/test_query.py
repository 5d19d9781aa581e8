"""The documents of a step, and of sequences that cannot be read, of a few tokens by hand."""

import os
from pathlib import Path

import numpy as np
import pytest

from kielo.artifact.manifest import write_stage
from kielo.artifact.stage_json import write_json
from kielo.artifact.token_sources import TokenFiles, TokenFileSet, find_token_files
from kielo.dataset.batches import NOT_COUNTED, Batch, Batches, open_shard
from kielo.dataset.query import document_ids, documents_of_step, read_sequences
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


FIX = ". Fix: restore the file and start again; the run resumes from its newest checkpoint"


def refused(batches: Batches, samples: np.ndarray, vocab_rows: int) -> str:
    with pytest.raises(KieloError) as caught:
        read_sequences(batches, 9, samples, vocab_rows)
    return str(caught.value)


@pytest.mark.parametrize("mask_documents", [True, False])
def test_ids_without_a_row_are_refused(tmp_path, mask_documents):
    """70 is an input and a label of the sequence of tokens 8 to 11, and of no other one."""
    batches = opened(tmp_path, mask_documents)
    bad, file = sample_of(batches, 2), tmp_path / "tokens" / "a.bin"
    reason = f"{file}: has ids up to 70, but the vocabulary has 60 rows"
    assert refused(batches, SAMPLES, 60) == f"step 9: sample {bad} of a (r, s): {reason}{FIX}"
    others = np.array([sample for sample in SAMPLES if sample != bad])
    found, expected = read_sequences(batches, 9, others, 60), batches.read(others)
    assert np.array_equal(found.inputs, expected.inputs) and np.array_equal(found.labels, expected.labels)
    (tmp_path / "tokens" / "a.ids.txt").unlink()  # documents are named as far as they are known
    assert refused(batches, SAMPLES, 60) == f"step 9: sample {bad} of a: {reason}{FIX}"


def test_the_largest_id_has_a_row(tmp_path):
    """As an input and as a label: 70 is both, and 71 rows have it; one row fewer have not."""
    batches = opened(tmp_path)
    one = np.array([sample_of(batches, 2)])
    for samples in (SAMPLES, one):
        assert np.array_equal(read_sequences(batches, 9, samples, 71).inputs, batches.read(samples).inputs)
    assert "ids up to 70" in refused(batches, one, 70)
    assert read_sequences(batches, 9, np.arange(0), 1).inputs.shape == (0, 4)


class Damaged:
    """Batches of which some hold other ids than are on the disk."""

    def __init__(self, batches: Batches, inputs: list[int], labels: list[int]):
        self.order, self.names, self.shards = batches.order, batches.names, batches.shards
        self.ranges, self.folder = batches.ranges, batches.folder
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
    batches = Damaged(opened(tmp_path), inputs, labels)
    if largest is None:
        assert read_sequences(batches, 9, np.array([3, 0]), 10).inputs.tolist() == [inputs] * 2
        return
    said = refused(batches, np.array([3, 0]), 10)
    assert said.startswith("step 9: sample 3 of a (") and f"has ids up to {largest}, but" in said


@pytest.mark.parametrize(
    "error, reason",
    [
        (OSError("a.bin: ends at byte 7"), "a.bin: ends at byte 7"),
        (KieloError("a.idx: damaged"), "a.idx: damaged"),
        (
            PermissionError(13, "Permission denied", "a.bin"),
            "a.bin: Permission denied; check the permissions",
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
    said = refused(batches, SAMPLES, 71)
    assert said.startswith("step 9: sample 3 of a (") and said.endswith(f"): {reason}{FIX}")
    error = ValueError("odd")
    with pytest.raises(ValueError, match="odd"):
        read_sequences(batches, 9, SAMPLES, 71)


def test_an_error_that_does_not_come_again_is_passed(tmp_path, monkeypatch):
    batches = opened(tmp_path)
    read, expected, errors = batches.read, batches.read(SAMPLES), [OSError("a.bin: busy")]

    def failing(samples: np.ndarray) -> Batch:
        if errors:
            raise errors.pop()
        return read(samples)

    monkeypatch.setattr(batches, "read", failing)
    assert np.array_equal(read_sequences(batches, 9, SAMPLES, 71).inputs, expected.inputs) and not errors


@pytest.mark.parametrize(("number", "more"), [(5, ""), (6, ", 1 more"), (8, ", 3 more")])
def test_five_documents_are_named(tmp_path, number, more):
    write_tokens(tmp_path, {"a": [[70]] * number + [[0]]})
    names = [f"a.txt:{place}" for place in range(number)]
    (tmp_path / "tokens" / "a.ids.txt").write_text("\n".join([*names, "end"]) + "\n")
    of = phase(mixture={"a": 1.0}, sequence_length=number, sequences_per_step=1)
    said = refused(Batches(tmp_path / "tokens", 7, of, number, 0, False), np.arange(1), 60)
    assert said.startswith(f"step 9: sample 0 of a ({', '.join(names[:5])}{more}): ")


def test_ranges_of_a_stream_name_each_document_once(tmp_path):
    batches = opened(tmp_path)
    assert document_ids(batches, 0, [(5, 4), (0, 2), (7, 1)]) == ["q", "r", "p"]
    assert document_ids(batches, 0, []) == []


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
        place = {
            "tokens": 8,
            "folder": str(found.folder),
            "times_ns": [list(times) for times in found.times_ns],
        }
        stage.counts.update(sources={"own": place, "packed": {"tokens": 7}}, heldout={"tokens": 0})
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
