"""Parts of a save and of a removal beside numbers, names and files that are known by hand; in one process."""

import errno
import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import xxhash

from kielo.artifact.checkpoint_folder import FaultyCheckpoint
from kielo.artifact.checkpoint_index import read_checkpoint_manifest, read_index
from kielo.artifact.stage_counts import RowMap
from kielo.checkpoint import node_memory, save_plan
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.average import average
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.node_memory import CopyName, FoundCopy, NodeMemory
from kielo.checkpoint.publish import (
    discard,
    failure,
    mark_damaged,
    point_newest,
    prune,
    publish,
    refuse_if_too_full,
    remove_later,
    remove_leftovers,
    shortage,
)
from kielo.checkpoint.safetensors_storage import SafetensorsStream
from kielo.checkpoint.save_plan import HeldChunk, SavePlanner, WholePlan, held_chunks, plan_all
from kielo.checkpoint.saving import Staging, complaint_unless_finite, room_needed
from kielo.checkpoint.tensor_table import StoredTensor
from kielo.checkpoint.transplant import Transplant
from kielo.recipe.errors import KieloError

IDS = ("0" * 16, "f" * 16, "0123456789abcdef")


def steps_in(folder: Path, *steps: int) -> list[Path]:
    """Makes folders named as checkpoints, each with a file."""
    paths = [folder / f"step_{step:08d}" for step in steps]
    for path in paths:
        path.mkdir()
        (path / "file").touch()
    return paths


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps_left(folder: Path) -> list[int]:
    return [int(name.removeprefix("step_")) for name in names_in(folder) if name != "newest"]


@pytest.mark.parametrize(
    ("newest", "keep_newest", "every", "kept_step", "left"),
    [
        (5, 1, 0, None, [5, 6]),
        (5, 2, 0, None, [4, 5, 6]),
        (5, 2, 2, None, [2, 4, 5, 6]),
        (5, 2, 3, None, [3, 4, 5, 6]),
        (5, 1, 0, 3, [3, 5, 6]),
        (5, 1, 0, 0, [5, 6]),
        (6, 1, 5, 1, [1, 5, 6]),
        (6, 6, 0, None, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_what_is_pruned(newest, keep_newest, every, kept_step, left, tmp_path) -> None:
    """Of steps 1 to 6: later ones than the newest stay, and so do milestones and the last sound one."""
    paths = steps_in(tmp_path, 1, 2, 3, 4, 5, 6)
    prune(paths[newest - 1], keep_newest, every, kept_step)
    assert steps_left(tmp_path) == left


def test_a_persons_link_is_not_pruned(tmp_path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "run").mkdir()
    elsewhere.mkdir()
    (moved,) = steps_in(elsewhere, 1)
    paths = steps_in(tmp_path / "run", 2, 3)
    (tmp_path / "run" / moved.name).symlink_to(moved)
    prune(paths[-1], 1, 0)
    assert steps_left(tmp_path / "run") == [1, 3] and (moved / "file").exists()


def test_a_checkpoint_that_goes_is_renamed_first(tmp_path, monkeypatch) -> None:
    """A kill while it is removed leaves a name that the next save clears away, not half a checkpoint."""
    paths = steps_in(tmp_path, 1, 2)
    gone = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **more: gone.append(Path(path)))
    prune(paths[1], 1, 0)
    (path,) = gone
    assert names_in(tmp_path) == [path.name, "step_00000002"] and (path / "file").exists()
    assert path.name.startswith("step_00000001.") and path.name.endswith(".removed")
    monkeypatch.undo()
    remove_leftovers(tmp_path)
    assert names_in(tmp_path) == ["step_00000002"]


def test_going_back_points_newest_before_it_removes(tmp_path, monkeypatch) -> None:
    """`newest` never leads to a checkpoint that is being removed; earlier ones and the target stay."""
    paths = steps_in(tmp_path, 1, 2, 3, 4)
    point_newest(paths[3])
    seen = []
    rename = os.rename

    def seeing(*names) -> None:
        seen.append(os.readlink(tmp_path / "newest"))
        rename(*names)

    monkeypatch.setattr(os, "rename", seeing)
    remove_later(paths[1])
    assert steps_left(tmp_path) == [1, 2] and seen == ["step_00000002"] * 2
    assert os.readlink(tmp_path / "newest") == "step_00000002"


def test_newest_is_not_put_over_a_persons_copy(tmp_path) -> None:
    """A link that leads nowhere is ours; a half-made one of a killed save is no hindrance."""
    (path,) = steps_in(tmp_path, 1)
    (tmp_path / "newest").symlink_to("gone")
    (tmp_path / "newest.partial").symlink_to("gone")
    point_newest(path)
    assert names_in(tmp_path) == ["newest", "step_00000001"] and os.readlink(tmp_path / "newest") == path.name
    (tmp_path / "newest").unlink()
    (tmp_path / "newest").mkdir()
    point_newest(path)
    assert not (tmp_path / "newest").is_symlink() and names_in(tmp_path) == ["newest", "step_00000001"]


def test_leftovers_of_killed_saves(tmp_path) -> None:
    """Half-written and half-removed ones go; one that was moved away comes back where its place is free."""
    steps_in(tmp_path, 1)
    for name in (
        f"step_00000001.{IDS[0]}.replaced", f"step_00000002.{IDS[1]}.replaced",
        f"step_00000003.{IDS[2]}.partial",
        f"step_00000004.{IDS[0]}.removed", f"step_00000005.{IDS[0][1:]}.partial",
        "step_00000006.mine.partial", "step_00000007.damaged", f"step_0000008.{IDS[0]}.partial",
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    remove_leftovers(tmp_path)
    assert names_in(tmp_path) == [
        "step_00000001", "step_00000002", f"step_00000005.{IDS[0][1:]}.partial", "step_00000006.mine.partial",
        "step_00000007.damaged", f"step_0000008.{IDS[0]}.partial",
    ]  # fmt: skip
    assert names_in(tmp_path / "step_00000001") == ["file"]
    assert names_in(tmp_path / "step_00000002") == [f"step_00000002.{IDS[1]}.replaced"]


def test_damaged_ones_are_numbered(tmp_path) -> None:
    for name in ("step_00000001.damaged", "step_00000001.damaged.2", "step_00000001.damaged.3"):
        (path,) = steps_in(tmp_path, 1)
        assert (
            mark_damaged(path, "why") == f"checkpoint {path} is damaged and skipped: why; set aside as {name}"
        )
        assert names_in(tmp_path)[-1] == name
    assert mark_damaged(tmp_path / "gone", "why") == (
        f"checkpoint {tmp_path / 'gone'} is damaged and skipped: why (it could not be renamed: No such file "
        "or directory)"
    )


def test_a_folder_is_exchanged_or_stays(tmp_path) -> None:
    """The one before of that step goes last; after a failure between the two names it comes back."""
    (final,) = steps_in(tmp_path, 1)
    partial = tmp_path / f"step_00000001.{IDS[0]}.partial"
    partial.mkdir()
    (partial / "new").touch()
    publish(partial, final)
    assert names_in(tmp_path) == ["step_00000001"] and names_in(final) == ["new"]
    replaced = partial.with_suffix(".replaced")
    final.rename(replaced)
    partial.mkdir()
    discard(partial, final)
    assert names_in(tmp_path) == ["step_00000001"] and names_in(final) == ["new"]
    replaced.mkdir()
    discard(partial, final)
    assert names_in(tmp_path) == ["step_00000001", replaced.name] and names_in(final) == ["new"]


def disk(monkeypatch, free_blocks: int, files: int = 100, free_files: int = 10) -> None:
    found = SimpleNamespace(
        f_bavail=free_blocks, f_frsize=1000, f_files=files, f_favail=free_files, f_blocks=200
    )
    monkeypatch.setattr(os, "statvfs", lambda path: found)


def test_room_on_a_disk(tmp_path, monkeypatch) -> None:
    """Each file takes a block of 4,096 bytes besides; a disk that does not count its files has enough."""
    more = "Free space or raise the quota, lower checkpoint.keep_newest, or set `folder` to another disk"
    disk(monkeypatch, 10)
    assert shortage(tmp_path, 10_000 - 2 * 4096, 2) is None
    full = f"disk full: it needs about 10,001 bytes, 10,000 are free. {more}"
    assert shortage(tmp_path, 10_001 - 2 * 4096, 2) == full
    with pytest.raises(KieloError, match="disk full"):
        refuse_if_too_full(tmp_path, 10_001, 0)
    refuse_if_too_full(tmp_path, 10_000, 0)
    disk(monkeypatch, 100)
    assert shortage(tmp_path, 0, 10) is None
    assert shortage(tmp_path, 0, 11) == f"too few inodes: it needs 11, 10 are free. {more}"
    disk(monkeypatch, 100, files=0, free_files=0)
    assert shortage(tmp_path, 0, 11) is None


def test_room_that_a_save_needs() -> None:
    """Tensors, JSON state, and each entry in the index and a header; index, manifest, folder and link."""
    plan = WholePlan({"a": "xx", "b": "yyy"}, {}, 100, 3)
    assert room_needed(plan, 7) == (100 + 7 + 2 * 5, 3 + 4)
    assert room_needed(WholePlan(), 0) == (0, 4)


def test_why_a_save_failed(tmp_path, monkeypatch) -> None:
    """A full disk is told with what is free, also as a cause; other errors as they are."""
    disk(monkeypatch, 10)
    final = tmp_path / "run" / "step_00000001"
    begins = f"checkpoint step_00000001 was not saved in {tmp_path / 'run'}, earlier ones are untouched: "
    assert failure(final, 5000, KieloError("why")) == begins + "why"
    # No advice is known for this number.
    assert failure(final, 5000, OSError(errno.ENXIO, "why", "x")) == begins + "x: why"
    full = "disk full: its tensors need 5,000 bytes, 10,000 bytes and 10 inodes are free ("
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        assert failure(final, 5000, OSError(number, "why")).startswith(begins + full)
    caused = KieloError("why")
    caused.__cause__ = OSError(errno.ENOSPC, "full")
    assert failure(final, 5000, caused).startswith(begins + full + "why). Free space")


def test_values_that_are_not_finite_are_named() -> None:
    """The first such tensor; whole numbers, empty tensors and single bytes are not looked at."""
    sound = {"a": torch.ones(2), "b": torch.zeros(0), "c": torch.tensor([1]), "d": torch.ones(2).bfloat16()}
    assert complaint_unless_finite(sound) is None
    eight = torch.tensor([float("nan")]).to(torch.float8_e4m3fn)
    assert complaint_unless_finite({"e": eight}) is None
    for value in (float("nan"), float("inf"), -float("inf")):
        told = complaint_unless_finite(sound | {"x": torch.tensor([0.0, value]), "y": torch.tensor([value])})
        assert told.startswith("x has values that are not finite: ")


def chunk(name: str, dtype: str, rows: int, first: int, size: int) -> HeldChunk:
    return HeldChunk(name, dtype, (rows, 2), (first, 0), (size, 2))


def test_a_plan_of_three_ranks() -> None:
    """The holder with the least bytes so far writes, the first of several; wide dtypes come first."""
    big = [chunk("big", "BF16", 8, first, size) for first, size in ((0, 5), (5, 3))]
    small, wide = chunk("small", "BF16", 3, 0, 3), chunk("wide", "F32", 1, 0, 1)
    ranks = [[big[0], small, wide], [big[1], small, wide], [small]]
    written, whole = plan_all(ranks, {})
    # loads: rank 0 writes 20 bytes of big, rank 1 12; rank 2 then small's 12; of 20 and 12 rank 1 wide's 8
    assert written == [[0], [2, 0], [0]]
    assert (whole.tensor_bytes, whole.num_files, whole.aliases) == (20 + 12 + 12 + 8, 3, {})
    entries = {name: json.loads(entry) for name, entry in whole.entries.items()}
    assert list(entries) == ["big", "small", "wide"]
    assert entries["big"] == {"dtype": "BF16", "shape": [8, 2], "chunks": [
        {"offset": [0, 0], "shape": [5, 2], "file": "rank_00000.safetensors", "key": "big@0,0"},
        {"offset": [5, 0], "shape": [3, 2], "file": "rank_00001.safetensors", "key": "big@5,0"},
    ]}  # fmt: skip
    written, whole = plan_all([ranks[0], ranks[1], []], {"small": "big"})
    assert written == [[0], [2, 0], []] and (whole.tensor_bytes, whole.num_files) == (20 + 12 + 8, 2)
    assert whole.aliases == {"small": "big"}


def test_a_tensor_with_too_few_elements_is_refused_and_one_whole_is_not() -> None:
    for sizes in ((3, 4), (3, 6)):
        first, second = chunk("a", "F32", 8, 0, sizes[0]), chunk("a", "F32", 8, sizes[0], sizes[1])
        with pytest.raises(KieloError, match=r"the ranks' parts of a do not make up its shape \[8, 2\]"):
            plan_all([[first], [second]], {})
    plan_all([[chunk("a", "F32", 8, 0, 3)], [chunk("a", "F32", 8, 3, 5)]], {})


def test_parts_of_a_rank(monkeypatch) -> None:
    """A rank without rows of a tensor has no part of it; a tensor without elements is a part."""
    tensors = {"a": torch.zeros(3, 2), "b": torch.zeros(0, 2).bfloat16(), "c": torch.tensor(1.0)}
    whole = [
        HeldChunk("a", "F32", (3, 2), (0, 0), (3, 2)), HeldChunk("b", "BF16", (0, 2), (0, 0), (0, 2)),
        HeldChunk("c", "F32", (), (), ()),
    ]  # fmt: skip
    assert held_chunks(tensors) == whole
    monkeypatch.setattr(save_plan, "local_slices", lambda tensor: (slice(3, 3), slice(0, 2)))
    assert held_chunks({"a": tensors["a"], "b": tensors["b"]}) == [
        HeldChunk("b", "BF16", (0, 2), (3, 0), (0, 2))
    ]


class Ranks(Agreement):
    """One process that hears a second rank, which says `other` each time."""

    def __init__(self, other: bool):
        super().__init__()
        self.other = other

    def gather(self, value):
        return [value, self.other]


def test_a_plan_is_made_anew_if_any_rank_needs_it() -> None:
    """One rank alone would plan other parts; counted by chunks, of kept plans none."""
    tensors = {"a": torch.zeros(3, 2), "b": torch.zeros(1)}
    for other, counts in ((True, [2, 2, 2]), (False, [2, 4, 6])):
        planner, found = SavePlanner(Ranks(other)), []
        for _ in counts:
            plan = planner.plan(tensors)
            found.append(planner.num_planned)
        assert found == counts
        assert plan.written == plan.held and plan.whole is planner.whole and plan.whole.tensor_bytes == 28
    planner = SavePlanner(Ranks(True))
    planner.plan(tensors)
    tied = tensors | {"c": tensors["a"]}
    assert planner.plan(tied).whole.aliases == {"c": "a"} and planner.num_planned == 2 + 3
    assert planner.plan(tensors | {"a": torch.zeros(3, 2).bfloat16()}).whole.tensor_bytes == 16
    assert planner.num_planned == 5 + 2


def saved(folder: Path, *steps: int) -> Checkpointer:
    checkpointer = Checkpointer(folder, keep_newest=9)
    for step in steps:
        checkpointer.save(step, {"model/a": torch.full((2, 3), float(step))}, {"step": step})
    checkpointer.settle()
    return checkpointer


def test_a_save_has_an_id_of_its_own_and_takes_the_time_it_took(tmp_path) -> None:
    """16 digits, by which what a killed save leaves is known; of an average too. Its folder may be new."""
    folder = tmp_path / "new" / "checkpoints"
    began = time.monotonic()
    paths = [saved(folder, step).settle() for step in (1, 2)]
    paths.append(average(paths, tmp_path / "to"))
    most = time.monotonic() - began
    ids = [read_index(path).save_id for path in paths]
    assert all(re.fullmatch("[0-9a-f]{16}", one) for one in ids) and len(set(ids)) == 3
    assert all(0 <= read_checkpoint_manifest(path).wall_seconds <= most for path in paths)


def test_alerts_are_warnings_where_nobody_takes_them(tmp_path, caplog) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(3, {"model/a": torch.tensor([float("nan")])}, {})
    with pytest.raises(KieloError, match="model/a has values that are not finite") as caught:
        checkpointer.settle()
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [("WARNING", str(caught.value))]


def test_going_back_before_a_step_leaves_that_step_out(tmp_path) -> None:
    """The newest that is earlier, not the one of that step itself; None where there is none."""
    checkpointer = saved(tmp_path, 1, 2, 3)
    assert checkpointer.go_back_before(1) is None and steps_left(tmp_path) == [1, 2, 3]
    assert checkpointer.go_back_before(3) == tmp_path / "step_00000002" == checkpointer.settle()
    assert steps_left(tmp_path) == [1, 2]
    assert checkpointer.go_back_before(9) == tmp_path / "step_00000002"


def test_a_checkpoint_that_was_written_again_is_verified_again(tmp_path) -> None:
    """That it was whole before says nothing of the files that are there now."""
    checkpointer, step = saved(tmp_path, 1), tmp_path / "step_00000001"
    tensors = {"model/a": torch.zeros(2, 3)}
    assert checkpointer.restore(step, tensors) == {"step": 1} and tensors["model/a"].eq(1).all()
    checkpointer.save(1, {"model/a": torch.full((2, 3), 2.0)}, {"step": 1})
    checkpointer.settle()
    file = step / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(FaultyCheckpoint, match="rank_00000.safetensors is not what was written"):
        checkpointer.restore(step, tensors)
    assert tensors["model/a"].eq(1).all()


def test_host_copies_begin_at_multiples_of_512_bytes() -> None:
    """One buffer, with no more room than that; the same tensors again take no other."""
    tensors = {"a": torch.arange(3.0), "b": torch.zeros(0), "c": torch.arange(130).int(), "d": torch.ones(1)}
    staging = Staging()
    assert staging.num_bytes == 0
    copies = staging.copy(tensors)
    assert staging.num_bytes == 512 + 2 * 512 + 4 and all(
        copies[name].equal(tensors[name]) for name in tensors
    )
    first = copies["a"].data_ptr()
    places = [copies[name].data_ptr() - first for name in ("a", "c", "d")]
    assert places == [0, 512, 1536]
    tensors["a"].fill_(7)
    assert copies["a"].tolist() == [0, 1, 2] and staging.copy(tensors)["a"].data_ptr() == first
    assert list(staging.copy({"d": tensors["d"]})) == ["d"] and staging.num_bytes == 1540
    wider = staging.copy({"a": torch.arange(3.0).double()})
    assert staging.num_bytes == 24 and wider["a"].tolist() == [0, 1, 2]
    staging.close()
    assert staging.num_bytes == 0


def test_the_bytes_of_a_file_of_tensors(tmp_path) -> None:
    """Header of a multiple of eight bytes, then the data; rows may come in parts, and no other tensor."""
    entries = [("a", torch.float32, (3, 2)), ("b", torch.bfloat16, ()), ("c", torch.int64, (0, 4))]
    stream = SafetensorsStream(tmp_path / "f", entries, {"k": "v"}, sha256=True)
    values = torch.arange(6.0).view(3, 2)
    for wrong in (values[:, :1], values.double(), torch.zeros(4, 2)):
        with pytest.raises(ValueError, match="^a: got .*, announced torch.float32"):
            SafetensorsStream(tmp_path / "wrong", entries).write_rows(wrong)
    stream.write_rows(values[:1])
    stream.write_rows(values[1:])
    stream.write_rows(torch.tensor(1.0).bfloat16())
    with pytest.raises(ValueError, match="2 of 3 tensors were written"):
        stream.close()
    stream.write_rows(torch.zeros(0, 4, dtype=torch.int64))
    record, content = stream.close(), (tmp_path / "f").read_bytes()
    header = (
        b'{"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]},'
        b'"b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]},'
        b'"c":{"dtype":"I64","shape":[0,4],"data_offsets":[26,26]}}'
    )
    header += b" " * (-len(header) % 8)
    data = values.numpy().tobytes() + b"\x80\x3f"
    assert content == len(header).to_bytes(8, "little") + header + data and stream.bytes == len(content)
    assert (record.bytes, record.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert record.xxh3_64_blocks == [xxhash.xxh3_64_hexdigest(content)]
    plain = SafetensorsStream(tmp_path / "g", entries[1:2])
    plain.write_rows(torch.tensor(1.0).bfloat16())
    assert plain.close().sha256 == ""
    assert (tmp_path / "g").read_bytes()[
        8:
    ] == b'{"b":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}  \x80\x3f'


@pytest.fixture
def node(tmp_path, monkeypatch) -> NodeMemory:
    """The memory of the node of ranks 4 and 5."""
    monkeypatch.setattr(node_memory, "MEMORY_FOLDER", tmp_path)
    return NodeMemory(tmp_path / "checkpoints", 4)


NAME = CopyName(110, "a" * 16, "b" * 16)


def test_names_of_copies() -> None:
    """Step, save id and the checkpoint before it; a copy that is being written has none."""
    text = f"step_00000110.{'a' * 16}.{'b' * 16}"
    assert str(NAME) == text and CopyName.parse(text) == NAME
    for other in (
        f"{text}.partial",
        "step_00000110",
        "step_00000110.a.partial",
        f"copy.{'a' * 16}.b",
        "1.2.3",
    ):
        assert CopyName.parse(other) is None, other


def test_room_in_a_nodes_memory(node, tmp_path, monkeypatch) -> None:
    """A twentieth of the file system is left: 10 of its 200 blocks of 1,000 bytes."""
    disk(monkeypatch, 15)
    node.make_partial(NAME, 5000)
    assert node.partial(NAME).is_dir() and node.partial(NAME).parent.name == "node_00004"
    assert node.folder.parent == tmp_path / f"kielo_{os.getuid()}" and len(node.folder.name) == 16
    assert node.folder.parent.stat().st_mode & 0o777 == 0o700
    with pytest.raises(KieloError, match="has room for 5,000 bytes, and a copy needs 5,001 beside"):
        node.make_partial(NAME, 5001)
    disk(monkeypatch, 3)
    with pytest.raises(KieloError, match="has room for 0 bytes"):
        node.make_partial(NAME, 1)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(KieloError, match="belongs to another user"):
        node.make_partial(NAME, 1)


def test_copies_of_a_node(node) -> None:
    """A copy has its name when it is finished, and is then the only one; all go at last, and the folders."""
    other = CopyName(100, "c" * 16, "b" * 16)
    for name in (other, NAME):
        node.make_partial(name, 0)
        (node.partial(name) / "rank_00004.safetensors").write_bytes(b"12")
    node.finish(other)
    assert node.find() == {other: FoundCopy({"rank_00004.safetensors": 2}, {})}
    node.finish(NAME)
    node.remove_all_but(NAME)
    assert list(node.find()) == [NAME] and node.path_of(NAME, "rank_00004.safetensors").read_bytes() == b"12"
    node.make_partial(other, 0)
    node.abandon(other)
    assert not node.partial(other).exists()
    node.clear()
    assert not node.folder.parent.exists() and node.find() == {}


def test_copies_that_others_could_have_made_are_not_there(node, tmp_path, monkeypatch) -> None:
    """In a folder of another user, or where others may write, or behind a link, may be weights of theirs."""
    node.make_partial(NAME, 0)
    (node.partial(NAME) / "rank_00004.safetensors").write_bytes(b"12")
    node.finish(NAME)
    of_user, copy = node.folder.parent, node.partial(NAME).with_name(str(NAME))
    for mode in (0o770, 0o702, 0o1777):
        of_user.chmod(mode)
        assert node.find() == {}
        with pytest.raises(KieloError, match="or others can write there. Fix: remove it"):
            node.make_partial(NAME, 0)
    of_user.chmod(0o700)
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"12")
    (copy / "rank_00005.safetensors").symlink_to(theirs)
    assert node.find() == {NAME: FoundCopy({"rank_00004.safetensors": 2}, {})}
    copy.rename(tmp_path / "elsewhere")
    copy.symlink_to(tmp_path / "elsewhere")
    assert node.find() == {}
    copy.unlink()
    (tmp_path / "elsewhere").rename(copy)
    assert list(node.find()) == [NAME]
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert node.find() == {}


def test_a_copy_is_whole_if_all_that_is_listed_is_found() -> None:
    """On any of the nodes, with its size; without a manifest none is."""
    assert not FoundCopy({"a": 1}, {}).is_whole and not FoundCopy({"a": 1}, {"a": 2}).is_whole
    half = FoundCopy({"a": 1}, {"a": 1, "b": 2})
    assert not half.is_whole
    half.add(FoundCopy({"b": 2, "c": 3}, {"b": 2}))
    assert half.is_whole and half.files == {"a": 1, "b": 2, "c": 3}


def row_map(rows: list[list[int]], **weights: list[float]) -> RowMap:
    return RowMap(
        method="mean", old_tokenizer="", old_vocabulary_size=4, rows=rows, control_tokens={},
        weights={key.removeprefix("of_"): value for key, value in weights.items()},
    )  # fmt: skip


class Old:
    """Four old rows: 0 0, 1 2, 2 4, 3 6; `spoilt` is added to the last."""

    def __init__(self, spoilt: float = 0.0):
        self.values = torch.arange(4.0).outer(torch.tensor([1.0, 2.0]))
        self.values[3, 1] += spoilt

    def read(self, rows, others, device):
        return self.values[torch.from_numpy(rows)][:, others[0]]


def transplanted(rows: RowMap, old: Old, first: float = 9.0) -> tuple[bool, list[list[float]]]:
    """Fills new rows 1 to 3 of four, both columns; row 4 is of the padding."""
    shard = torch.full((4, 2), torch.nan)
    made = Transplant(rows, lambda name, shape, box: torch.full((box[0].stop - box[0].start, 2), first))
    is_finite = made.fill("embed.weight", (5, 2), shard, (slice(1, 5), slice(0, 2)), old)
    return is_finite, shard.tolist()


def test_rows_of_a_transplant_by_hand() -> None:
    """A copy, the mean of three of which one is twice, a weighted sum, first values; the padding is zero."""
    rows = row_map([[0], [3], [1, 1, 3], [1, 2]], of_3=[0.25, 0.5])
    mean = [5 / 3, torch.tensor(10.0).div(3).item()]
    found, values = transplanted(rows, Old())
    assert found and values == [[3, 6], [pytest.approx(mean[0]), pytest.approx(mean[1])], [1.25, 2.5], [0, 0]]
    found, values = transplanted(row_map([[0], [], [], [2]]), Old())
    assert found and values == [[9, 9], [9, 9], [2, 4], [0, 0]]


def test_values_that_are_not_finite_are_told_after_a_transplant() -> None:
    """Of an old row that is used, or of a first value; an old row that is not used says nothing."""
    used, unused = row_map([[0], [3], [1], [1]]), row_map([[0], [2], [], [1]])
    for value in (float("nan"), float("inf")):
        assert not transplanted(used, Old(value))[0] and transplanted(unused, Old(value))[0]
        assert not transplanted(unused, Old(), value)[0] and transplanted(used, Old(), value)[0]


def test_a_matrix_that_the_rows_do_not_fit() -> None:
    """As many rows as the old tokenizer has tokens, or more, of the same width and dims."""
    made = Transplant(row_map([[0]]), lambda *what: torch.zeros(0))

    def misfit(*shape: int) -> str | None:
        return made.misfit((9, 2), StoredTensor("F32", shape, 0, ()))

    assert misfit(4, 2) is None and misfit(5, 2) is None
    for shape in ((3, 2), (4, 3), (4,), (4, 2, 1)):
        assert misfit(*shape).startswith(
            f"has the shape {list(shape)}, but must have rows of 4 old tokens, of [2] "
        )
