"""Values between ranks arrive equal and of the same type; bytes that name code are refused, and run none."""

import json
import math
import os
import pickle
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kielo.artifact.lease import Lease
from kielo.checkpoint.save_plan import HeldChunk
from kielo.parallel.replicas import Difference, Holders
from kielo.ranks import objects
from kielo.ranks.objects import from_json, to_json
from kielo.ranks.world import start_world
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout
from tests.started_ranks import run_ranks

KEYS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.tuples(st.integers(), st.text())
)
LEAVES = st.one_of(KEYS, st.floats(allow_nan=False), st.builds(Path, st.text("ab./ä\udc80", min_size=1)))
CLASSES = st.one_of(
    st.builds(HeldChunk, st.text(), st.just("BF16"), st.tuples(st.integers(0)), st.just((0,)), st.just((1,))),
    st.builds(Difference, st.text(), st.tuples(st.integers())),
    st.builds(Lease, st.just(Path("run/lease")), st.text(), st.floats(0, 9)),
    st.builds(Layout, tensor=st.integers(1, 8)),
    st.sampled_from((torch.bfloat16, torch.int64)),
)
VALUES = st.recursive(
    st.one_of(LEAVES, CLASSES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.sets(KEYS, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=12,
)


def types_of(value: Any) -> Any:
    if isinstance(value, dict):
        return dict, [(types_of(key), types_of(part)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [*map(types_of, value)]
    return type(value)


@given(VALUES)
def test_a_value_arrives_as_it_was(value: Any) -> None:
    found = from_json(to_json(value))
    assert found == value
    assert types_of(found) == types_of(value)


def test_what_python_does_not_compare_arrives_too() -> None:
    found = from_json(to_json([math.nan, math.inf, np.float32(0.5), np.int64(2**40)]))
    assert math.isnan(found[0]) and found[1:] == [math.inf, 0.5, 2**40]
    for array in (np.arange(6, dtype=np.int16).reshape(2, 3).T, np.zeros((0, 3)), np.array([True])):
        found = from_json(to_json(array))
        assert found.dtype == array.dtype and found.shape == array.shape and (found == array).all()
        found[...] = 1  # it may be changed
    layout = Layout(tensor=2)
    assert from_json(to_json(layout)).model_fields_set == layout.model_fields_set == {"tensor"}


@pytest.mark.parametrize(
    "value",
    [object(), date(2026, 1, 1), print, ValueError("x"), np.array([object()]), torch.zeros(1), Path],
    ids=lambda value: type(value).__name__,
)
def test_other_kinds_are_not_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="is not sent between ranks"):
        to_json([value])


class Touches:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.path}'",)


def tag(name: str, content: Any = ()) -> bytes:
    return json.dumps({name: content}).encode()


@pytest.mark.parametrize(
    "sent",
    [
        tag("os:system", ["true"]),
        tag("builtins:exec", ["1"]),
        tag("kielo.ranks.objects:os"),
        tag("kielo.ranks.objects:json.loads", ["1"]),
        tag("kielo.ranks.objects:to_json", ["1"]),
        tag("kielo.ranks.objects:Path", ["1"]),
        tag("kielo.ranks.objects:Tensor", ["1"]),
        tag("kielo.train.run:train", []),
        tag("kielo.recipe.errors:KieloError", []),
        tag("kielo.no.such.room:Name", []),
        tag("dtype", "ones"),
        tag("array", ["|O", [1], "AAAAAAAAAAA="]),
        tag("array", ["<f4", [10**12], ""]),
        tag("set", [{"dict": []}]),
        b'{"tuple":[],"set":[]}',
        b"{}",
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
    ],
    ids=lambda sent: repr(sent[:44]),
)
def test_words_that_name_code_are_refused(sent: bytes) -> None:
    with pytest.raises(KieloError, match="a rank sent what cannot be read"):
        from_json(sent)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    """Unpickling the same bytes runs the command that they name."""
    made = tmp_path / "made"
    sent = pickle.dumps(Touches(made))
    with pytest.raises(KieloError, match="a rank sent what cannot be read"):
        from_json(sent)
    assert not made.exists()
    pickle.loads(sent)
    assert made.exists()


def sent_in_all_ways() -> tuple[Any, ...]:
    rank = start_world(60, "cpu").rank
    mine = [HeldChunk("ü" * rank * 1000, "F32", (rank,), (0,), (rank,))] * rank
    parts = [(Path(f"part {number}"), "x" * 100 * number) for number in range(3)]
    return (
        objects.all_gather(mine),
        objects.gather({rank: mine}),
        objects.broadcast(Holders("shard", (0, 1), f"of {rank}") if rank == 0 else object()),
        objects.scatter(parts if rank == 0 else []),
    )


def test_ranks_send_values_of_other_lengths() -> None:
    """Ranks send 0, 1 and 2 thousand characters; only rank 0's value of a broadcast is looked at."""
    of_ranks = [[HeldChunk("ü" * rank * 1000, "F32", (rank,), (0,), (rank,))] * rank for rank in range(3)]
    for rank, (everyones, gathered, told, part) in enumerate(run_ranks(sent_in_all_ways, 3)):
        assert everyones == of_ranks
        assert gathered == ([{number: mine} for number, mine in enumerate(of_ranks)] if rank == 0 else [])
        assert told == Holders("shard", (0, 1), "of 0")
        assert part == (Path(f"part {rank}"), "x" * 100 * rank)
