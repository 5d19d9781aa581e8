"""A reader of `index.json` parses the lines of the tensors that it asks for, and no other."""

import json
from pathlib import Path

import pytest

from kielo.artifact.checkpoint_index import (
    CheckpointIndex,
    Chunk,
    PlainState,
    TensorEntry,
    chunk_key,
    entry_json,
    read_index,
    write_index,
)
from kielo.recipe.errors import KieloError

TENSORS, CHUNKS = 40, 5


def written(folder: Path) -> CheckpointIndex:
    """An index of TENSORS tensors of CHUNKS chunks each, and one tied name."""
    tensors = {}
    for number in range(TENSORS):
        name = f"model/täht {number}"
        chunks = tuple(
            Chunk((row, 0), (1, 3), f"rank_{row:05d}.safetensors", chunk_key(name, (row, 0)))
            for row in range(CHUNKS)
        )
        tensors[name] = TensorEntry("F32", (CHUNKS, 3), chunks)
    aliases = {"model/tied": "model/täht 7"}
    index = CheckpointIndex("0123456789abcdef", 100, tensors, aliases, PlainState(tokens=10**12, loss=1 / 3))
    record = write_index(folder, index, {name: entry_json(entry) for name, entry in tensors.items()})
    assert record.bytes == (folder / "index.json").stat().st_size
    return index


def test_a_rank_parses_the_entries_of_its_own_tensors(tmp_path):
    """One with 1/20 of the tensors parses 1/20 of the chunks: the other lines are spoilt here."""
    index = written(tmp_path)
    own = ["model/täht 3", "model/tied"]
    path = tmp_path / "index.json"
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == TENSORS + 2
    for number, line in enumerate(lines[1:-1]):
        if number not in (3, 7):
            lines[number + 1] = b"x" * (len(line) - 1) + b"\n"
    path.write_bytes(b"".join(lines))
    part = read_index(tmp_path, own)
    assert list(part.tensors) == ["model/täht 3", "model/täht 7"]
    assert sum(len(entry.chunks) for entry in part.tensors.values()) == TENSORS * CHUNKS // 20
    assert all(part.entry(name) == index.entry(name) for name in own)
    assert sorted(part.names()) == sorted(index.names()) and part.plain == index.plain
    assert read_index(tmp_path, ()).tensors == {}
    with pytest.raises(KieloError, match=r"index.json: not a checkpoint index"):
        read_index(tmp_path)


def test_the_whole_index_is_one_json_object_and_older_ones_are_read(tmp_path):
    """An index without lines, as Kielo wrote it before, gives the same, whole and in part."""
    index = written(tmp_path)
    assert read_index(tmp_path) == index
    part = read_index(tmp_path, ["model/täht 3"])
    path = tmp_path / "index.json"
    stored = json.loads(path.read_text())
    del stored["lines"]
    path.write_text(json.dumps(stored))
    assert read_index(tmp_path) == index
    assert read_index(tmp_path, ["model/täht 3"]) == part


@pytest.mark.parametrize("lines", [{"model/täht 3": 10**15}, {"model/täht 3": "many"}, [], {"nobody": 7}])
def test_wrong_sizes_of_lines_are_refused(tmp_path, lines):
    written(tmp_path)
    path = tmp_path / "index.json"
    head, newline, rest = path.read_bytes().partition(b', "tensors": {\n')
    path.write_bytes(json.dumps(json.loads(head + b"}") | {"lines": lines}).encode()[:-1] + newline + rest)
    with pytest.raises(KieloError, match=r"index.json: not a checkpoint index"):
        read_index(tmp_path, None)


def test_an_odd_key_of_the_plain_state_is_named(tmp_path) -> None:
    """With the index that has it; a key that this Kielo does not know stays."""
    state = PlainState.model_validate({"tokens": 5, "of_a_newer_kielo": 1})
    write_index(tmp_path, CheckpointIndex("0", 1, {}, plain=state), {})
    assert read_index(tmp_path).plain.content() == {"tokens": 5, "of_a_newer_kielo": 1}
    path = tmp_path / "index.json"
    path.write_bytes(path.read_bytes().replace(b'"tokens": 5', b'"tokens": "5"'))
    with pytest.raises(KieloError, match=r"index\.json: .*\(plain\.tokens: Input should be a valid integer"):
        read_index(tmp_path)


def test_an_index_whose_tensors_are_not_whole(tmp_path) -> None:
    """Chunks that make up no shape, and a name that is tied to nothing."""
    good = TensorEntry("F32", (2, 3), (Chunk((0, 0), (2, 3), "f", "k"),))
    for shape in ((2, 2), (3, 3)):
        bad = TensorEntry("F32", (2, 3), (Chunk((0, 0), shape, "f", "k"),))
        write_index(tmp_path, CheckpointIndex("0", 1, {}), {"a": entry_json(bad)})
        with pytest.raises(KieloError, match=r"the chunks of a do not make up its shape \[2, 3\]"):
            read_index(tmp_path)
    write_index(tmp_path, CheckpointIndex("0", 1, {}, {"b": "c"}), {"a": entry_json(good)})
    with pytest.raises(KieloError, match="b is tied to c, which does not exist"):
        read_index(tmp_path)
    write_index(tmp_path, CheckpointIndex("0", 1, {}, {"b": "a"}), {"a": entry_json(good)})
    assert read_index(tmp_path, ["b"]).entry("b") == good and read_index(tmp_path, []).unread == ("a",)
