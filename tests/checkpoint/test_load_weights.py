"""Files of weights into parameters of one process: names, padding, and sentences about what does not fit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kielo.checkpoint import export_tensors
from kielo.checkpoint.hugging_face_import import Names, load_weights, read_tables
from kielo.models.piece import Piece
from kielo.recipe.errors import KieloError

PIECES = {
    "a": Piece("base.a", rows=4), "b": Piece("base.b", transposed=True), "first": Piece("ab", 0),
    "second": Piece("ab", 2),
}  # fmt: skip
STORED = {
    "base.a": torch.arange(12.0).view(4, 3), "base.b": torch.arange(6.0).view(3, 2).half(),
    "ab": torch.arange(10.0).view(5, 2).double(),
}  # fmt: skip


def parameters() -> dict[str, torch.Tensor]:
    shapes = {"a": (6, 3), "b": (2, 3), "first": (2, 2), "second": (3, 2)}
    return {name: torch.full(shape, -1.0) for name, shape in shapes.items()}


def written(folder: Path, **changed: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(
        STORED | {name.replace("_", "."): value for name, value in changed.items()},
        folder / "model.safetensors",
    )
    return folder


def test_parameters_by_hand(tmp_path) -> None:
    """Padding is zero; the record has the source's names, of what is not needed too where it is there."""
    made = parameters()
    source = written(tmp_path, head=STORED["base.a"].bfloat16(), x_inv_freq=torch.ones(2))
    names = Names(tied={"a": "head"}, ignored=[r"\.inv.freq$"])
    assert load_weights(made, source, PIECES, other_names=names) == {
        "base.a": "F32", "base.b": "F16", "ab": "F64", "head": "BF16",
    }  # fmt: skip
    assert made["a"].tolist() == [*STORED["base.a"].tolist(), [0] * 3, [0] * 3]
    assert made["b"].tolist() == STORED["base.b"].T.tolist()
    assert torch.cat([made["first"], made["second"]]).tolist() == STORED["ab"].tolist()


def test_names_without_the_prefix_of_the_base_model(tmp_path) -> None:
    bare = {name.removeprefix("base."): value for name, value in STORED.items()}
    save_file(bare, tmp_path / "model.safetensors")
    made = parameters()
    record = load_weights(made, tmp_path, PIECES, other_names=Names("base."))
    assert record == {"a": "F32", "b": "F16", "ab": "F64"} and made["a"][3].tolist() == [9, 10, 11]
    with pytest.raises(KieloError, match="tensors of the model are missing: base.a, base.b$"):
        load_weights(made, tmp_path, PIECES)


def test_a_tied_parameter_needs_no_tensor(tmp_path) -> None:
    """It has the memory of another; one that has its own is missing."""
    made = parameters()
    made["tied"] = made["b"]
    assert "base.b" in load_weights(
        made, written(tmp_path), PIECES | {"tied": Piece("head", transposed=True)}
    )
    made["tied"] = torch.zeros(2, 3)
    with pytest.raises(KieloError, match="tensors of the model are missing: head$"):
        load_weights(made, tmp_path, PIECES | {"tied": Piece("head", transposed=True)})


SECTION = ". Fix: the [model] section of this folder's config.json"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"base_a": torch.zeros(6, 3)}, "base.a has the shape [6, 3], but a here is [6, 3], for which it "
         "should be [4, 3]" + SECTION),
        ({"base_b": torch.zeros(2, 3)}, "base.b has the shape [2, 3], but b here is [2, 3], for which it "
         "should be [3, 2]" + SECTION),
        ({"ab": torch.zeros(4, 2)}, "ab has the shape [4, 2], but first here is [2, 2], second here is "
         "[3, 2], for which it should be [5, 2]" + SECTION),
        ({"ab": torch.zeros(5, 2).long()}, "ab is stored as I64; known: F64, F32, F16, BF16"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(changed, told, tmp_path) -> None:
    made = parameters()
    source = written(tmp_path, **changed)
    with pytest.raises(KieloError) as caught:
        load_weights(made, source, PIECES)
    assert str(caught.value) == f"{tmp_path / 'model.safetensors'}: {told}"
    assert all(value.eq(-1).all() for value in made.values())


def test_tensors_that_nobody_expects(tmp_path) -> None:
    source = written(tmp_path, z=torch.zeros(1), y=torch.zeros(1))
    with pytest.raises(KieloError, match=f"^{tmp_path}: tensors that the model does not have: y, z$"):
        load_weights(parameters(), source, PIECES, other_names=Names(ignored=["^zz"]))


def test_numbers_that_are_not_finite(tmp_path, monkeypatch) -> None:
    """Counted in the first tensor by name, over blocks of one row; others are counted, the next is named."""
    monkeypatch.setattr(export_tensors, "BLOCK_BYTES", 8)
    broken, large = STORED["base.a"].clone(), STORED["ab"].clone()
    broken[0, 1] = broken[2, 2] = float("nan")
    broken[3, 0] = -float("inf")
    large[4, 1] = 1e39
    would = "Fix: fetch the published file again, or take older weights"
    for changed, told in (
        ({"base_a": broken}, "base.a has 3 of 12 numbers that are NaN, infinite or beyond fp32."),
        ({"ab": large}, "ab has 1 of 10 numbers that are NaN, infinite or beyond fp32."),
        ({"ab": large, "base_a": broken},
         "ab has 1 of 10 numbers that are NaN, infinite or beyond fp32 (also 1 more, such as base.a)."),
    ):  # fmt: skip
        with pytest.raises(KieloError) as caught:
            load_weights(parameters(), written(tmp_path, **changed), PIECES)
        assert str(caught.value) == f"{tmp_path / 'model.safetensors'}: {told} {would}"


def test_tables_of_several_files(tmp_path) -> None:
    """One that lacks what the index says, and two that hold the same tensor."""
    files = {"one": {"a": torch.zeros(1)}, "two": {"b": torch.zeros(1), "c": torch.zeros(1)}}
    for name, tensors in files.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')
    assert {name: one.path.name for name, one in read_tables(tmp_path).items()} == {
        "a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors",
    }  # fmt: skip
    index.write_text('{"weight_map": {"a": "one.safetensors", "x": "one.safetensors"}}')
    with pytest.raises(KieloError, match=r"one\.safetensors: lacks x, which the index says are in it$"):
        read_tables(tmp_path)
    index.write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')
    save_file({"b": torch.zeros(1), "a": torch.zeros(2)}, tmp_path / "two.safetensors")
    with pytest.raises(
        KieloError,
        match=r"two\.safetensors: a is in this file and in one\.safetensors\. Fix: remove the wrong",
    ):
        read_tables(tmp_path)
