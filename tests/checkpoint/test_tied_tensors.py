"""Names that share all of their memory are tied; parts, views of another form and empty tensors are not."""

import torch

from kielo.checkpoint.save_plan import tied_names, untied
from kielo.checkpoint.tensor_table import cut, is_finite, join, whole_box
from kielo.models.piece import Piece


def test_names_of_one_memory() -> None:
    base, none = torch.arange(6.0).view(2, 3), torch.zeros(0, 3)
    tensors = {
        "a": base, "half": base[:1], "turned": base.T, "flat": base.view(6), "bits": base.view(torch.int32),
        "b": base[:], "copy": base.clone(), "none": none, "none again": none, "c": base, "second": base[1:],
        "second again": base[1:],
    }  # fmt: skip
    assert tied_names(tensors) == {"b": "a", "c": "a", "second again": "second"}
    assert list(untied(tensors)) == [name for name in tensors if name not in ("b", "c", "second again")]


def test_pieces_of_a_tensor_in_memory() -> None:
    """Two parameters by blocks of one row, one with a row of padding, one turned."""
    stored = torch.arange(10.0).view(5, 2)
    pieces = {"a": Piece("x", 0, 1, 2, rows=3), "b": Piece("x", 1, 1, 2)}
    values = {"a": cut(stored, pieces["a"], (4, 2)), "b": cut(stored, pieces["b"], (2, 2))}
    assert values["a"].tolist() == [[0, 1], [4, 5], [8, 9], [0, 0]] and values["b"].tolist() == [
        [2, 3],
        [6, 7],
    ]
    assert join(pieces, values).equal(stored)
    turned = Piece("y", transposed=True)
    assert cut(stored.half(), turned, (2, 5)).equal(stored.T.half())
    assert join({"t": turned}, {"t": stored.T}).equal(stored)
    assert whole_box((3, 0)) == (slice(0, 3), slice(0, 0)) and whole_box(()) == ()


def test_values_that_are_finite() -> None:
    assert is_finite(torch.zeros(0)) and is_finite(torch.tensor([1.0, -2.0])) and is_finite(torch.tensor(3))
    for value in (float("nan"), float("inf"), -float("inf")):
        assert not is_finite(torch.tensor([1.0, value, 2.0]))
