"""Files of stages and checkpoints beside bytes, names, tables and messages that are known by hand."""

import codecs
import errno
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
from pydantic import ValidationError

from kielo.artifact import block_digests, chronicle, documents, manifest, token_shards
from kielo.artifact.alerts import ALERTS_NAME, append_alert
from kielo.artifact.attempts import Beginning, End, append, read_attempts, read_lines
from kielo.artifact.block_digests import BlockDigests, first_wrong_block
from kielo.artifact.checkpoint_faults import FaultyCheckpoint, another_version, fault_of_reading, find_fault
from kielo.artifact.checkpoint_folder import (
    rank_file_name,
    rank_of,
    run_around,
    step_folder_name,
    step_folders,
    step_of,
)
from kielo.artifact.checkpoint_index import (
    CheckpointIndex,
    Chunk,
    TensorEntry,
    chunk_key,
    entry_json,
    read_index,
    write_index,
)
from kielo.artifact.checkpoint_inspection import (
    checkpoints_folder,
    describe_checkpoint,
    describe_tensors,
    find_checkpoints,
    newest_whole,
    refuse_no_checkpoint,
    state_after_verification,
)
from kielo.artifact.checkpoint_manifest import read_checkpoint_manifest, write_checkpoint_manifest
from kielo.artifact.documents import ZSTD_READ_BYTES, other_encoding, split_lines
from kielo.artifact.documents import read_lines as read_text_lines
from kielo.artifact.manifest import check_sizes, hash_json, is_current, read_manifest, write_stage
from kielo.artifact.masked_scores import (
    Accuracy,
    FilledMask,
    Filling,
    MaskedScores,
    PairAccuracy,
    PartOfSpeechScores,
    PseudoBitsPerByte,
)
from kielo.artifact.metrics import (
    Fp8GradientProbe,
    HeldOutLoss,
    LeftOutSequence,
    PassedOver,
    PrecisionChange,
    PrecisionVerdict,
    Row,
    Spike,
    TrainingStep,
    describe_odd,
    read_row,
    split_metrics,
    write_row,
)
from kielo.artifact.own_text import is_own_text, marked, refuse_other_json, refuse_other_text
from kielo.artifact.parity import ROUNDING_FACTOR, Losses, Parity, loss_limits
from kielo.artifact.run_format import migrated_identity, migrated_run
from kielo.artifact.token_file import EndsIndex, MegatronIndex
from kielo.artifact.token_file_formats import describe
from kielo.artifact.token_set import MOST_OPEN_FILES
from kielo.artifact.token_shards import TokenShard, TokenShardWriter
from kielo.artifact.whole_checkpoints import list_checkpoints
from kielo.recipe.errors import KieloError


def digests(*blocks: bytes) -> list[str]:
    return [xxhash.xxh3_64_hexdigest(block) for block in blocks]


def test_digests_of_blocks(tmp_path, monkeypatch) -> None:
    """However the bytes come; a last block may be shorter, none is empty; the first other one is named."""
    monkeypatch.setattr(block_digests, "BLOCK_BYTES", 4)
    for parts in ((b"abcdefghij",), (b"ab", b"cdef", b"", b"ghij"), (b"abcd", b"efgh", b"ij")):
        found = BlockDigests()
        for part in parts:
            found.update(part)
        assert found.hexdigests() == digests(b"abcd", b"efgh", b"ij")
    assert BlockDigests().hexdigests() == []
    whole = BlockDigests()
    whole.update(b"abcdefgh")
    assert whole.hexdigests() == digests(b"abcd", b"efgh")
    path = tmp_path / "file"
    path.write_bytes(b"abcdefghij")
    sound = digests(b"abcd", b"efgh", b"ij")
    assert first_wrong_block(path, sound) is None
    assert first_wrong_block(path, [sound[0], "0", sound[2]]) == 1
    assert first_wrong_block(path, sound[:2]) == 2 and first_wrong_block(path, [*sound, "0"]) == 3


def checkpoint(folder: Path, step: int = 1, save_id: str = "0" * 16, **plain) -> Path:
    """A checkpoint of one file with a header, two tensors and a tied one."""
    folder.mkdir(parents=True)
    header = json.dumps({"__metadata__": {"save_id": save_id}}).encode()
    content = len(header).to_bytes(8, "little") + header + b"data"
    (folder / "rank_00000.safetensors").write_bytes(content)
    blocks = BlockDigests()
    blocks.update(content)
    files = {
        "rank_00000.safetensors": {
            "bytes": len(content), "xxh3_64_blocks": blocks.hexdigests(), "save_id": save_id
        }
    }  # fmt: skip
    tensors = {
        name: TensorEntry(dtype, shape, tuple(
            Chunk((at, *[0] * (len(shape) - 1)), (size, *shape[1:]), "rank_00000.safetensors",
                  chunk_key(name, (at,)))
            for at, size in chunks
        ))
        for name, dtype, shape, chunks in (
            ("model/a", "BF16", (3, 2), ((0, 2), (2, 1))), ("model/b", "F32", (5,), ((0, 5),)),
            ("model/c", "BF16", (4,), ((0, 4),)), ("optimiser/a", "F8_E4M3", (3, 2), ((0, 3),)),
            ("optimiser/m", "BOOL", (7,), ((0, 7),)),
        )
    }  # fmt: skip
    index = CheckpointIndex(save_id, step, tensors, {"model/tied": "model/b"}, {"step": step, **plain})
    entries = {name: entry_json(entry) for name, entry in tensors.items()}
    files["index.json"] = write_index(folder, index, entries)
    write_checkpoint_manifest(folder, index, files, 100, 1.23456)
    return folder


def test_faults_of_files(tmp_path, monkeypatch) -> None:
    """Each with its file and place; sizes alone where no checksums are asked for."""
    monkeypatch.setattr(block_digests, "BLOCK_BYTES", 16)
    folder, name = checkpoint(tmp_path / "step_00000001"), "rank_00000.safetensors"
    files, path = (
        read_checkpoint_manifest(folder).files,
        tmp_path / "step_00000001" / "rank_00000.safetensors",
    )
    whole = path.read_bytes()
    size = len(whole)

    def fault(checksums: bool = True) -> str | None:
        found = find_fault(folder, [name], files, checksums)
        return found and str(found)

    assert find_fault(folder, sorted(files), files) is None and fault() is None
    path.write_bytes(whole[:-1] + b"x")
    last = (size - 1) // 16
    assert fault() == (
        f"damaged: {name} is not what was written: block {last} (bytes {16 * last} to {size - 1}) has "
        f"another "
        "checksum"
    )
    assert fault(checksums=False) is None
    path.write_bytes(whole[:17] + b"X" + whole[18:])
    assert "block 1 (bytes 16 to 31) has another checksum" in fault()
    path.write_bytes(whole[:-1])
    short = f"is {size - 1} bytes long instead of {size}"
    assert fault(checksums=False) == f"damaged: {name} {short}"
    stale = whole.replace(b"0" * 16, b"1" * 16)
    path.write_bytes(stale)
    of_another = f"is of another save ({'1' * 16} instead of {'0' * 16})"
    assert fault(checksums=False) == f"damaged: {name} {of_another}"
    path.write_bytes(stale[:-1])
    assert fault() == f"damaged: {name} {of_another}, and {short}"
    path.write_bytes(whole.replace(b"save_id", b"save_ix"))
    assert fault(checksums=False) == f"damaged: {name} does not say of which save it is"
    path.write_bytes((100_000_001).to_bytes(8, "little") + whole[8:])
    assert fault(checksums=False) == f"damaged: {name} does not say of which save it is"
    path.unlink()
    assert fault() == f"damaged: {name} is missing"
    assert str(find_fault(folder, ["other"], files)) == "damaged: other is not listed in manifest.json"
    assert fault_of_reading("f", OSError(errno.EIO, "broken")).kind == "unreadable"
    assert str(another_version("f", 3, ", by x")) == (
        "of another version: f is of version 3, by x, and this Kielo reads version 2; go on with the Kielo "
        "that "
        "wrote it"
    )


def test_names_of_checkpoints(tmp_path) -> None:
    """Eight digits or more; folders alone, newest first."""
    assert [step_folder_name(step) for step in (1, 123456789)] == ["step_00000001", "step_123456789"]
    assert (rank_file_name(12), rank_of("rank_00012.safetensors"), rank_of("index.json")) == (
        "rank_00012.safetensors", 12, None,
    )  # fmt: skip
    names = {"step_00000010": 10, "step_0000001": None, "step_00000010.damaged": None, "newest": None}
    assert {name: step_of(tmp_path / name) for name in names} == names
    for name in ("step_00000010", "step_00000002", "step_100000000", "step_00000001.damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000007").touch()
    assert [step_of(path) for path in step_folders(tmp_path)] == [100000000, 10, 2]
    assert step_folders(tmp_path / "gone") == [] == step_folders(tmp_path / "step_00000007")
    (tmp_path / "run" / "train" / "checkpoints" / "step_00000001").mkdir(parents=True)
    inside = tmp_path / "run" / "train" / "checkpoints" / "step_00000001"
    assert run_around(inside) == (tmp_path / "run").resolve() and run_around(tmp_path) is None


def test_a_checkpoint_is_described(tmp_path) -> None:
    """Parts by dtype with elements and bytes; tied tensors once; files with their sizes."""
    of_run = tmp_path / "run" / "train" / "checkpoints"
    first = checkpoint(of_run / "step_00000001", tokens=10, loss=2.5)
    second = checkpoint(of_run / "step_00000002", 2)
    told = describe_checkpoint(first)
    assert told["parts"] == [
        {"part": "model", "dtype": "BF16", "tensors": 2, "elements": 10, "bytes": 20},
        {"part": "model", "dtype": "F32", "tensors": 1, "elements": 5, "bytes": 20},
        {"part": "optimiser", "dtype": "BOOL", "tensors": 1, "elements": 7, "bytes": 7},
        {"part": "optimiser", "dtype": "F8_E4M3", "tensors": 1, "elements": 6, "bytes": 6},
    ]
    shown = ("state", "step", "tokens", "samples", "loss", "save_id", "recipe")
    assert {key: told[key] for key in shown} == {
        "state": "complete", "step": 1, "tokens": 10, "samples": None, "loss": 2.5, "save_id": "0" * 16,
        "recipe": None,
    }  # fmt: skip
    assert told["files"] == {
        path.name: path.stat().st_size for path in first.iterdir() if path.name != "manifest.json"
    }
    rows = describe_tensors(first)
    assert rows[0] == {"name": "model/a", "dtype": "BF16", "shape": [3, 2], "chunks": 2, "tied_to": None}
    assert rows[-1] == {"name": "model/tied", "dtype": "F32", "shape": [5], "chunks": 1, "tied_to": "model/b"}
    (of_run / "newest").symlink_to("step_00000002")
    for place in (tmp_path / "run", tmp_path / "run" / "train", of_run):
        assert checkpoints_folder(place) == of_run and find_checkpoints(place) == [second, first]
    assert find_checkpoints(first) == [first] and find_checkpoints(of_run / "newest") == [second]
    for action in (find_checkpoints, refuse_no_checkpoint):
        with pytest.raises(KieloError, match="checkpoint"):
            action(tmp_path)
    refuse_no_checkpoint(first)
    size = sum(path.stat().st_size for path in first.iterdir())
    for checksums, state in ((True, "verified"), (False, "complete")):
        row = list_checkpoints(of_run, checksums)[1]
        assert row.pop("written_at").endswith("+00:00")
        assert row == {
            "name": first.name,
            "step": 1,
            "tokens": 10,
            "loss": 2.5,
            "bytes": size,
            "state": state,
        }
    (second / "index.json").unlink()
    assert newest_whole([second, first]) == first and newest_whole([second]) == second
    assert list_checkpoints(of_run)[0]["state"] == "damaged: index.json is missing"
    damaged, unreadable = (
        fault_of_reading("a", FileNotFoundError()),
        fault_of_reading("b", OSError(5, "broken")),
    )
    assert state_after_verification([]) == "verified"
    assert state_after_verification([unreadable, damaged]).startswith(
        "damaged: a is missing; b: broken (EIO)"
    )


def test_a_manifest_of_another_step_or_with_a_flipped_bit(tmp_path) -> None:
    folder = checkpoint(tmp_path / "step_00000001")
    found = read_checkpoint_manifest(folder)
    assert (found.kind, found.version, found.wall_seconds) == ("checkpoint", 2, 1.235)
    assert found.counts == {"step": 1, "tensor_bytes": 100, "save_id": "0" * 16}
    moved = folder.rename(tmp_path / "step_00000002")
    with pytest.raises(FaultyCheckpoint, match="is the manifest of another checkpoint, that of step 1"):
        read_checkpoint_manifest(moved)
    copied = moved.rename(tmp_path / "mine")
    assert read_checkpoint_manifest(copied).counts["step"] == 1
    text = (copied / "manifest.json").read_text()
    for wrong in (
        text.replace('"step": 1', '"step": 2'),
        text + " ",
        text.replace('"version": 2', '"version": 3'),
    ):
        (copied / "manifest.json").write_text(wrong)
        with pytest.raises(FaultyCheckpoint, match="is not what was written .its own checksum differs"):
            read_checkpoint_manifest(copied)


def test_an_index_whose_tensors_are_not_whole(tmp_path) -> None:
    """Chunks that make up no shape, and a name that is tied to nothing."""
    good = TensorEntry("F32", (2, 3), (Chunk((0, 0), (2, 3), "f", "k"),))
    for shape in ((2, 2), (3, 3)):
        bad = TensorEntry("F32", (2, 3), (Chunk((0, 0), shape, "f", "k"),))
        write_index(tmp_path, CheckpointIndex("0", 1, {}), {"a": entry_json(bad)})
        with pytest.raises(KieloError, match=r"the chunks of a do not make up its shape \[2, 3\]"):
            read_index(tmp_path)
    write_index(tmp_path, CheckpointIndex("0", 1, {}, {"b": "c"}), {"a": entry_json(good)})
    with pytest.raises(KieloError, match="b is tied to c, which is not there"):
        read_index(tmp_path)
    write_index(tmp_path, CheckpointIndex("0", 1, {}, {"b": "a"}), {"a": entry_json(good)})
    assert read_index(tmp_path, ["b"]).entry("b") == good and read_index(tmp_path, []).unread == ("a",)


def test_small_files_of_a_stage_are_hashed_and_large_ones_are_not(tmp_path, monkeypatch) -> None:
    """At the border and above it; a changed size counts for both, and a file not listed is refused."""
    monkeypatch.setattr(manifest, "HASHED_BYTES", 4)
    for content, other, is_noticed in (
        (b"abcd", b"abcx", True),
        (b"abcde", b"abcdx", False),
        (b"abcde", b"abcd", True),
    ):
        folder = tmp_path / f"{content.decode()}{other.decode()}"
        with write_stage(folder, "trial", 1, {}, {}) as stage:
            (stage.folder / "a").write_bytes(content)
        (folder / "a").write_bytes(other)
        assert is_current(folder, "trial", 1, {}, {}) is not is_noticed
    listed = read_manifest(folder)
    with pytest.raises(KieloError, match="a: it has 4 bytes, and the stage wrote 5; put the file back"):
        check_sizes(folder, listed, ["a"])
    with pytest.raises(KieloError, match="b: is not listed in manifest.json"):
        check_sizes(folder, listed, ["b"])
    (folder / "a").unlink()
    with pytest.raises(KieloError, match="a: it is missing, and the stage wrote 5"):
        check_sizes(folder, listed, ["a"])
    assert hash_json({"b": [1, "é"], "a": None}) == xxhash.xxh3_128_hexdigest(
        '{"a":null,"b":[1,"é"]}'.encode()
    )


def test_a_text_of_kielos_own(tmp_path) -> None:
    """Its last line has the checksum of all before it; a link, a folder and a change are not its own."""
    path, text = tmp_path / "a.md", "one\ntwo\n"
    path.write_text(marked(text))
    line = "written by kielo, which replaces this file while the text above has the xxh3_128 "
    assert path.read_text() == f"{text}<!-- {line}{xxhash.xxh3_128_hexdigest(text.encode())} -->\n"
    assert is_own_text(path) and marked("", "# {}").startswith("# written by kielo")
    refuse_other_text(path)
    refuse_other_text(tmp_path / "gone")
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "empty").write_text(marked(""))
    assert (
        not is_own_text(tmp_path / "link") and not is_own_text(tmp_path) and is_own_text(tmp_path / "empty")
    )
    for wrong in (marked(text).replace("two", "tow"), marked(text) + "more\n", marked(text)[:-1], "", text):
        path.write_text(wrong)
        assert not is_own_text(path)
        with pytest.raises(KieloError, match="a.md: is there already, and Kielo did not write it or"):
            refuse_other_text(path)
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    with pytest.raises(KieloError, match="a symbolic link that leads nowhere"):
        refuse_other_text(tmp_path / "dangling")
    for content, is_fine in (
        ('{"key": 1}', True),
        ('{"other": 1}', False),
        ("[1]", False),
        ("5", False),
        ("{", False),
    ):
        path.write_text(content)
        if is_fine:
            refuse_other_json(path, "key")
        else:
            with pytest.raises(KieloError, match="Kielo did not write it"):
                refuse_other_json(path, "key")
    refuse_other_json(tmp_path / "gone", "key")


def test_lines_up_to_a_limit(tmp_path) -> None:
    """A line of so many bytes is read, one more is None, in one block or in several; a mark is no text."""
    for blocks in (
        [b"abcd\nabcde\nabcd"],
        [b"ab", b"cd\nabc", b"de\na", b"bcd"],
        [b"abcd\nabcd", b"e\nabcd"],
    ):
        assert list(split_lines(blocks, 4)) == [b"abcd", None, b"abcd"]
    assert list(split_lines([b"a\n\nabcde"], 4)) == [b"a", b"", None] and list(split_lines([b""])) == []
    path = tmp_path / "a.txt"
    path.write_bytes(codecs.BOM_UTF8 + b"one\r\n\ntwo")
    assert list(read_text_lines(path)) == [(1, b"one"), (2, b""), (3, b"two")]
    path.write_text("one", encoding="utf-16")
    with pytest.raises(
        KieloError, match="a.txt: UTF-16LE text, and UTF-8 is expected; .* -f UTF-16LE -t UTF-8"
    ):
        list(read_text_lines(path))
    assert documents.READ_BYTES == 1 << 18


@pytest.mark.parametrize("name", ["UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE"])
def test_an_encoding_is_known_by_its_mark_and_by_its_zero_bytes(name) -> None:
    text = "Kord elas kuningas"
    mark = getattr(codecs, f"BOM_{name.replace('-', '').replace('LE', '_LE').replace('BE', '_BE')}")
    assert other_encoding(text.encode(name)) == name and other_encoding(mark + "õ".encode(name)) == name
    assert other_encoding(text.encode()) is None and other_encoding(b"\0\0") is None
    half = b"a\0a\0" * 2 + b"aaaa" * 2  # as many zeros as letters in their place say nothing
    assert other_encoding(half) is None and other_encoding(half + b"a\0a\0") == "UTF-16LE"


def identity_0() -> dict:
    return {
        "name": "x",
        "mask_documents": True,
        "weight_decay": 0.1,
        "phases": [{"mixture": {"a": 1, "b": 1}}],
    }


def test_formats_of_earlier_versions() -> None:
    """Keys move to the tables of their sections; phases say how samples are shared out; no key is lost."""
    assert migrated_identity(identity_0(), "f") == {
        "format_version": 2, "name": "x", "dataset": {"mask_documents": True}, "train": {"weight_decay": 0.1},
        "phases": [{"mixture": {"a": 1, "b": 1}, "mixture_order": "blocks_of_256"}],
    }  # fmt: skip
    one = {"format_version": 1, "phases": [{"mixture": {"a": 1}}, {}]}
    assert migrated_identity(one, "f")["phases"] == [
        {"mixture": {"a": 1}, "mixture_order": "every_sample"}, {"mixture_order": "every_sample"},
    ]  # fmt: skip
    placement = {
        "ranks": 4, "pipeline": 2, "pipeline_layers": [1, 2, 3, 4], "log_every_steps": 5,
        "checkpoint_every_steps": 7, "keep_newest": 2,
    }  # fmt: skip
    assert migrated_run({"identity": identity_0(), "placement": placement}, "f")["placement"] == {
        "ranks": 4, "train": {"log_every_steps": 5}, "checkpoint": {"every_steps": 7, "keep_newest": 2},
        "layout": {"compile": False, "recompute_saved_operators": [], "pipeline": 2,
                   "pipeline_layers": [1, 2, 3, 4], "pipeline_stages_per_rank": 2},
    }  # fmt: skip
    alone = migrated_run({"identity": {}, "placement": {"pipeline": 1, "pipeline_layers": [4]}}, "f")
    assert alone["placement"]["layout"] == {"compile": False, "recompute_saved_operators": [], "pipeline": 1}
    now = {"format_version": 2, "identity": {"phases": []}, "placement": {"a": 1}}
    assert migrated_run(now, "f") == {"identity": {"phases": []}, "placement": {"a": 1}}
    with pytest.raises(KieloError, match="f: is of format version 3, and this Kielo reads versions up to 2"):
        migrated_identity({"format_version": 3}, "f")
    for wrong in (-1, "1", 0.5):
        with pytest.raises(KieloError, match="format_version = .* is no version of the format"):
            migrated_identity({"format_version": wrong}, "f")
    with pytest.raises(KieloError, match="is not of format version 0"):
        migrated_run({"identity": {}}, "f")
    with pytest.raises(KieloError, match="describes no run, but holds 5"):
        migrated_identity(5, "f")


ROWS = {
    TrainingStep: '"loss": 1.0, "tokens_per_second": 1.0, "seconds": 1.0',
    HeldOutLoss: '"heldout_loss": null',
    PassedOver: '"passed_over_from": 1', Fp8GradientProbe: '"fp8_gradient_cosine": 0.5',
    Spike: '"spike_from": 1, "spike_to": 2, "outcome": "told", "highest_loss": 1.0, "usual_loss": 1.0, '
    '"highest_loss_step": 1',
    LeftOutSequence: '"left_out_sample": 1, "source": "a", "reason": "b"',
    PrecisionChange: '"precision": "bf16"',
    PrecisionVerdict: '"precision": "bf16", "precision_from": 1, "outcome": "kept", "loss_rise": 0.1, '
    '"gradient_norm_rise": 0.1',
    Row: '"other": 1',
}  # fmt: skip


def test_rows_of_a_log(tmp_path) -> None:
    """Each kind by its key; what is no number is null; half a line at the end is not odd, a person's is."""
    for kind, keys in ROWS.items():
        assert type(read_row(f'{{"step": 3, {keys}}}'.encode())) is kind
    for line in (b"", b"[1]", b'{"loss": 1.0}', b'{"step": "3"}', b'{"step": 3, "loss": "x"}'):
        assert read_row(line) is None
    row = TrainingStep(step=3, loss=float("nan"), tokens_per_second=float("inf"), seconds=1.0)
    assert write_row(row) == '{"step": 3, "loss": null, "tokens_per_second": null, "seconds": 1.0}\n'
    path, whole = tmp_path / "metrics.jsonl", '{"step": 3, "other": 1}'
    for half in ("", '{"st', '{"step": 4, "lo'):
        path.write_text(f"{whole}\n{half}")
        rows, odd = split_metrics(path)
        assert [line for _, line in rows] == [whole.encode()] and odd == []
    path.write_text(f'mine\n{whole}\n\n{{"step": 4, "lo\n  \nno')
    assert split_metrics(path)[1] == [(1, b"mine"), (4, b'{"step": 4, "lo'), (6, b"no")]
    assert split_metrics(tmp_path / "gone") == ([], [])
    assert describe_odd([(4, b"")]) == "1 line is no row of a run (number 4)"
    odd = [(number, b"") for number in range(1, 12)]
    assert describe_odd(odd[:10]) == "10 lines are no row of a run (number 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)"
    assert describe_odd(odd) == "11 lines are no row of a run (number 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, …)"


def test_lines_of_attempts_and_alerts(tmp_path) -> None:
    """After half a line a new one begins; a person's lines are passed over."""
    begin = Beginning(
        began_at="2026-11-23T10:00:00+00:00", from_step=0, ranks=1, hosts=["a"], versions={}, seen_step=None,
        seen_at=None, changes=[],
    )  # fmt: skip
    end = End(ended_at="2026-11-23T11:00:00+00:00", outcome="failed", step=None, message="õ")
    append(tmp_path, begin)
    with open(tmp_path / "attempts.jsonl", "a") as file:
        file.write('mine\n[1]\n{"ended_at": 5}\n{"began')
    append(tmp_path, end)
    assert read_attempts(tmp_path) == [begin, end]
    assert (
        (tmp_path / "attempts.jsonl")
        .read_text()
        .endswith('{"began\n' + json.dumps(end.content(), ensure_ascii=False) + "\n")
    )
    append_alert(tmp_path / ALERTS_NAME, 7, "õ")
    (line,) = read_lines(tmp_path / ALERTS_NAME)
    assert (line["step"], line["message"]) == (7, "õ") and read_lines(tmp_path / "gone") == []


def begun(minute: int, **more) -> Beginning:
    values = {
        "began_at": f"2026-11-23T10:{minute:02d}:00+00:00", "from_step": 0, "ranks": 1200, "hosts": ["a"],
        "versions": {}, "seen_step": None, "seen_at": None, "changes": [],
    }  # fmt: skip
    return Beginning.model_validate(values | more)


def test_a_whole_chronicle(tmp_path) -> None:
    """One attempt that runs: nine hosts, each kind of event, text cut at 400 characters, the last alerts."""
    hosts = [f"n{number}" for number in range(9)]
    append(tmp_path, begun(0, from_step=1000, hosts=[*hosts, "n0"]))
    rows = [
        PassedOver(step=1010, passed_over_from=1005, passed_over_for="spike", tokens=100),
        Spike(step=1011, spike_from=1008, spike_to=1009, outcome="told", highest_loss=3.14159, usual_loss=2.0,
              highest_loss_step=1008),
        Spike(step=1012, spike_from=1, spike_to=2, outcome="passed", highest_loss=None, usual_loss=2.0,
              highest_loss_step=1),
        LeftOutSequence(step=1013, left_out_sample=1234, source="a", documents=["x", "y"], reason="cut"),
        LeftOutSequence(step=1014, left_out_sample=5, source="b", reason="gone"),
        PrecisionVerdict(step=1015, precision="fp8", precision_from=1001, outcome="kept", loss_rise=None,
                         gradient_norm_rise=None),
        PrecisionChange(step=1016, precision="bf16"),
        TrainingStep(step=1017, tokens=400, loss=1.0, tokens_per_second=2.0, seconds=1.0),
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(map(write_row, rows)))
    times = ["2026-11-23T10:00:01+00:00"] * 201
    alerts = [{"time": time, "step": number, "message": f"m{number}"} for number, time in enumerate(times)]
    (tmp_path / ALERTS_NAME).write_text("".join(json.dumps(alert) + "\n" for alert in alerts))
    tables = chronicle.chronicle(tmp_path)
    assert [table.title for table in tables] == [
        "Time", "Attempts", "Spikes, and what was passed over or left out", "Alerts, the last 200 of 201",
    ]  # fmt: skip
    lines = [("attempts", "1"), ("steps taken again", "0"), ("on steps that were kept", "2 min")]  # 150 s
    assert tables[0].rows == lines
    assert tables[1].rows == [(
        "1", "2026-11-23 10:00:00", "", "1,001 –", "0", "1,200", "n0, n1, n2, n3, n4, n5, n6, n7 and 1 more",
        "it runs, or ended without a word",
    )]  # fmt: skip
    assert tables[2].rows == [
        ("1,010", "steps 1,005 to 1,010 passed over: spike"),
        ("1,011", "spike in steps 1,008 to 1,009: told (loss 3.142, usual 2)"),
        ("1,012", "spike in steps 1 to 2: passed"),
        ("1,013", "sample 1,234 of a left out: cut; documents x, y"),
        ("1,014", "sample 5 of b left out: gone"),
        ("1,015", "change to fp8 after step 1,000: kept"), ("1,016", "bf16 from the next step on"),
    ]  # fmt: skip
    assert len(tables[3].rows) == 200 and tables[3].rows[0] == ("2026-11-23 10:00:01", "1", "m1")
    page = chronicle.as_markdown(
        [chronicle.Table("a|b", ("h", "v"), [("x" * 400, "y" * 401), ("a\nb", "<&[1]#")])], "r"
    )
    assert page == (
        f"# Chronicle of r\n\n## a\\|b\n\n| h | v |\n| --- | --- |\n| {'x' * 400} | {'y' * 399}… |\n"
        "| a b | &lt;&amp;\\[1\\]\\# |\n"
    )


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2.0 h"), (9000, "2.5 h")],
)
def test_seconds_of_an_attempt(seconds, told, tmp_path) -> None:
    """Until its end, or until it was last seen; between attempts is what is left."""
    append(tmp_path, begun(0))
    hours, rest = divmod(seconds, 3600)
    ended = f"2026-11-23T{10 + hours}:{rest // 60:02d}:{rest % 60:02d}+00:00"
    append(tmp_path, End(ended_at=ended, outcome="requeue", step=9, message=""))
    values = dict(chronicle.chronicle(tmp_path)[0].rows)
    assert values["in attempts"] == f"{told} (0.0% of them effective)" and values["between attempts"] == "0 s"
    (attempt,) = chronicle.attempts_of(tmp_path)
    assert (attempt.seconds, attempt.last_step, attempt.lost_steps) == (seconds, 9, 0)


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


def test_the_bytes_of_a_shard(tmp_path, monkeypatch) -> None:
    """Megatron's index, version 1, by hand; documents in blocks; ids of two bytes below 65,500."""
    monkeypatch.setattr(token_shards, "BLOCK_DOCUMENTS", 2)
    with TokenShardWriter(tmp_path / "s", 65_499, has_loss_mask=True) as shard:
        shard.add_documents(np.array([5, 6, 7, 65_498]), np.array([3, 0, 1]), np.array([1, 0, 1, 0], bool))
        shard.add(np.array([9]))
    assert (tmp_path / "s.bin").read_bytes() == struct.pack("<5H", 5, 6, 7, 65_498, 9)
    assert (tmp_path / "s.loss_mask").read_bytes() == bytes([1, 0, 1, 0, 1])
    assert (tmp_path / "s.idx").read_bytes() == (
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 4, 5) + struct.pack("<4i", 3, 0, 1, 1)
        + struct.pack("<4q", 0, 6, 6, 8) + struct.pack("<5q", 0, 1, 2, 3, 4)
    )  # fmt: skip
    found = TokenShard(tmp_path / "s")
    assert (found.num_tokens, found.num_documents, found.document_offsets.tolist()) == (5, 4, [0, 3, 3, 4, 5])
    assert [found.num_whole_sequences(length) for length in (1, 2, 3, 4, 5)] == [4, 2, 1, 1, 0]
    assert [[first.tolist(), last.tolist()] for first, last in found.document_blocks()] == [
        [[0, 3], [3, 3]], [[3, 4], [4, 5]],
    ]  # fmt: skip
    assert found.read(1, 4).tolist() == [6, 7, 65_498, 9] and found.loss_mask[1:3].tolist() == [0, 1]
    for start, count in ((-1, 1), (0, 6), (0, -1), (5, 1)):
        with pytest.raises(IndexError, match=f"tokens {start}..{start + count} of 5"):
            found.read(start, count)
    which, tokens = found.borders(np.array([0, 2, 3]), np.array([3, 3, 1]))
    assert (which.tolist(), tokens.tolist()) == ([1, 1, 1], [3, 3, 4])
    with TokenShardWriter(tmp_path / "t", 65_500) as shard:
        shard.add(np.array([65_499]))
        for wrong in ([1, 65_500], [-1, 2]):
            with pytest.raises(
                KieloError, match=rf"document 2 has token ids {min(wrong)}\.\.{max(wrong)}, outside"
            ):
                shard.add_documents(np.array([3, *wrong, 4]), np.array([1, 2, 1]))
        with pytest.raises(ValueError, match="one row of token ids"):
            shard.add(np.zeros((1, 2), int))
    assert TokenShard(tmp_path / "t").dtype == np.int32 and not (tmp_path / "t.loss_mask").exists()
    (tmp_path / "s.loss_mask").write_bytes(bytes(4))
    with pytest.raises(KieloError, match="s.loss_mask: 4 bytes for the 5 tokens of s.bin"):
        TokenShard(tmp_path / "s")
    (tmp_path / "s.bin").write_bytes(bytes(9))
    with pytest.raises(KieloError, match="describes 10 bytes .5 tokens of 2 bytes., the data has 9"):
        TokenShard(tmp_path / "s")
    assert TokenShard(tmp_path / "s", may_be_cut=True).num_tokens == 5


def test_sizes_that_files_are_made_of() -> None:
    """Blocks of checksums are part of the format of checkpoints; the others decide what is read again."""
    assert (block_digests.BLOCK_BYTES, manifest.HASHED_BYTES) == (67_108_864, 1_048_576)
    assert (token_shards.UINT16_VOCAB_SIZES, MOST_OPEN_FILES, ZSTD_READ_BYTES) == (65_500, 256, 512)


def test_limits_of_parity() -> None:
    """The tolerance, or a multiple of rounding where that is more; in words with rounding's last step."""
    assert ROUNDING_FACTOR == 10 and loss_limits(1e-5, [0.0, 1e-6, 1e-3]) == [1e-5, 1e-5, 1e-2]
    losses = Losses(ours=[1.0], theirs=[1.0], relative_differences=[0.0])
    told = Parity.model_construct(tolerance=1e-5, losses=losses)
    assert told.limit_in_words() == "tolerance 1e-05"
    rounding = losses.model_copy(update={"rounding_differences": [1e-7, 2e-7]})
    assert Parity.model_construct(tolerance=1e-5, losses=rounding).limit_in_words() == (
        f"tolerance 1e-05, or {ROUNDING_FACTOR} times what rounding alone makes: transformers parts from "
        f"itself by "
        "up to 2.0e-07"
    )


def test_scores_of_hidden_tokens_are_of_something() -> None:
    """Counts from 1; baselines that were measured; fillings as people read them."""
    assert Accuracy(model=0.4, unigram=0.1, bigram=0.2).baselines() == {"unigram": 0.1, "bigram": 0.2}
    filled = FilledMask(before="a ", after=" c", truth=None, fillings=[
        Filling(text="b", probability=0.256), Filling(text="d", probability=0.004),
    ])  # fmt: skip
    assert (filled.sentence(), filled.likeliest()) == ("a ____ c", "b 26 %, d 0 %")
    pairs = {"pairs": 1, "token": 0.5, "within_word": 0.5}
    bits = {"token": 1.0, "within_word": 1.0, "perplexity": 2.0, "texts": 1, "tokens": 1, "bytes": 1}
    tags = {
        "accuracy": 0.5, "baseline": 0.5, "words": 1, "training_words": 1, "tags": 2,
        "layer": 1, "pieces": "mean",
    }  # fmt: skip
    scores = {
        "model": "x", "accuracy": Accuracy(model=0.4, unigram=0.1, bigram=0.2), "loss": 1.0,
        "hidden_tokens": 1, "sequences": 1, "sequence_length": 16, "masking": "span", "masking_rate": 0.15,
        "seed": 1,
    }  # fmt: skip
    for kind, values, counts in (
        (PairAccuracy, pairs, ("pairs",)), (PseudoBitsPerByte, bits, ("texts", "tokens", "bytes")),
        (PartOfSpeechScores, tags, ("words", "training_words")),
        (MaskedScores, scores, ("hidden_tokens", "sequences")),
    ):  # fmt: skip
        kind(**values)
        for count in counts:
            with pytest.raises(ValidationError, match=count):
                kind(**values | {count: 0})


def test_indexes_of_others_that_cannot_be_read(tmp_path) -> None:
    """Another version, a type that is no whole number, half a header; each is named."""
    (tmp_path / "s.bin").write_bytes(bytes(4))

    def written(version: int, code: int, cut: int = 0) -> None:
        content = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code, 1, 2)
        content += struct.pack("<iqqq", 2, 0, 0, 1)
        (tmp_path / "s.idx").write_bytes(content[: len(content) - cut])

    written(1, 8)
    assert describe(tmp_path / "s.bin", 2).tokens == 2 and TokenShard(tmp_path / "s").num_tokens == 2
    for version, code in ((2, 8), (0, 8), (1, 9), (1, 6), (1, 7)):
        written(version, code)
        for read in (lambda: describe(tmp_path / "s.bin", 2), lambda: TokenShard(tmp_path / "s")):
            with pytest.raises(
                KieloError, match=f"s.idx: version {version}, dtype code {code}; version 1 with"
            ):
                read()
    written(1, 8, cut=1)
    for read in (lambda: describe(tmp_path / "s.bin", 2), lambda: TokenShard(tmp_path / "s")):
        with pytest.raises(
            KieloError, match="s.idx: 61 bytes, but its header promises 62; the file is cut short"
        ):
            read()
    (tmp_path / "s.idx").write_bytes(b"MMIDIDX\0\0" + bytes(24))
    for read in (lambda: describe(tmp_path / "s.bin", 2), lambda: TokenShard(tmp_path / "s")):
        with pytest.raises(KieloError, match="not a Megatron index"):
            read()
