"""Tables of tensor files: each tensor's place leads to its own bytes, and what is none is refused."""

import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kielo.checkpoint.tensor_table import StoredTensor, read_table
from kielo.recipe.errors import KieloError


def with_header(path: Path, header: dict, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: object, end: object, shape: object, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_header_by_hand(tmp_path) -> None:
    """Places count from the end of the header; tensors without bytes overlap nothing."""
    path = with_header(tmp_path / "a.safetensors", header := {
        "__metadata__": {"format": "pt"}, "b": entry(8, 32, [2, 3]), "a": entry(0, 8, [2, 1, 4], "U8"),
        "none": entry(4, 4, [0, 5]), "one": entry(32, 36, []),
    }, bytes(36))  # fmt: skip
    first = 8 + len(json.dumps(header))
    assert read_table(path) == {
        "b": StoredTensor("F32", (2, 3), first + 8, (3, 1)),
        "a": StoredTensor("U8", (2, 1, 4), first, (4, 4, 1)),
        "none": StoredTensor("F32", (0, 5), first + 4, (5, 1)),
        "one": StoredTensor("F32", (), first + 32, ()),
    }  # fmt: skip
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        KieloError, match=rf"cut short or damaged: one ends at byte {first + 36}, the file at "
    ):
        read_table(path)
    save_file({}, path)
    assert read_table(path) == {}
    path.unlink()
    with pytest.raises(KieloError, match=r"a\.safetensors: cannot be read \(No such file or directory\)"):
        read_table(path)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (entry(7, 15, [2]), "damaged: b overlaps a"),
        (entry(0, 8, [2]), "damaged: b overlaps a"),
        (entry(8, 15, [2]), r"damaged: b has 7 bytes, which is not the size of F32 \[2\]"),
        (entry(8, 16, [-2]), r"damaged: b is at 8 to 16 with the shape \[-2\]"),
        (entry(-8, 0, [2]), r"damaged: b is at -8 to 0 with the shape \[2\]"),
        (entry(8, 16.0, [2]), r"damaged: b is at 8 to 16\.0 with the shape \[2\]"),
        (entry(8, 12, [True]), r"damaged: b is at 8 to 12 with the shape \[True\]"),
        (entry(8, 16, [1], "C64"), "b is stored as C64; known: F64, F32, "),
        ({"dtype": "F32", "shape": [2]}, r"its header is damaged \(KeyError\('data_offsets'\)\)"),
        (entry(8, 16, 2), r"its header is damaged \(TypeError"),
        ([], r"its header is damaged \(TypeError"),
    ],
)
def test_an_entry_that_cannot_be(wrong, told, tmp_path) -> None:
    path = with_header(tmp_path / "a.safetensors", {"a": entry(0, 8, [2]), "b": wrong}, bytes(16))
    with pytest.raises(KieloError, match=rf"a\.safetensors: .*{told}|a\.safetensors: {told}"):
        read_table(path)


def test_headers_up_to_a_hundred_million_bytes(tmp_path) -> None:
    """As safetensors allows; a longer one is refused before it is read."""
    path = tmp_path / "a.safetensors"
    for length, told in (
        (100_000_001, "it has 100000010 bytes, of which the header would be 100000001; cut short or damaged"),
        (100_000_000, "its header is damaged"),
    ):
        path.write_bytes(length.to_bytes(8, "little"))
        os.truncate(path, 100_000_010)
        with pytest.raises(KieloError, match=f"cannot be read as safetensors: {told}"):
            read_table(path)
    for content, size, length in ((bytes(7), 7, 0), ((5).to_bytes(8, "little") + b"{  }", 12, 5)):
        path.write_bytes(content)
        with pytest.raises(KieloError, match=f"has {size} bytes, of which the header would be {length}; cut"):
            read_table(path)
    path.write_bytes((5).to_bytes(8, "little") + b"{   }")
    assert read_table(path) == {}


def bytes_at(path: Path, stored: StoredTensor, dtype: str) -> list:
    content = path.read_bytes()
    values = np.frombuffer(
        content, dtype, (len(content) - stored.begin) // np.dtype(dtype).itemsize, stored.begin
    )
    strides = [stride * values.itemsize for stride in stored.strides]
    return np.lib.stride_tricks.as_strided(values, stored.shape, strides).tolist()


def test_the_places_of_pickled_tensors(tmp_path) -> None:
    """Views lie in their storage: after an offset, transposed, or the last numbers of it."""
    path, base = tmp_path / "a.bin", torch.arange(12.0).view(3, 4)
    whole = torch.arange(5, dtype=torch.int16)
    tensors = {
        "base": base, "turned": base.T, "inner": base[1:, 1:3], "last": base[2, 3], "whole": whole,
        "none": torch.zeros(0, 3), "tail": whole[3:],
    }  # fmt: skip
    torch.save(tensors, path)
    found = read_table(path)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        if tensor.numel():
            dtype = "<i2" if tensor.dtype == torch.int16 else "<f4"
            assert bytes_at(path, found[name], dtype) == tensor.tolist(), name
        assert (found[name].shape, found[name].strides) == (tuple(tensor.shape), tuple(tensor.stride()))
    assert found["inner"].begin - found["base"].begin == 5 * 4 and found["tail"].dtype == "I16"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            [torch.ones(2)],
            "contains a list and not tensors by name. Fix: write it again as safetensors",
        ),
        ({3: torch.ones(2)}, "contains something under 3, which is no name of a tensor"),
        (
            {"c": torch.ones(2, dtype=torch.complex64)},
            r"c is a torch\.complex64 in torch\.strided; known: tensors of",
        ),
        (
            {"s": torch.ones(2).to_sparse()},
            r"s is a torch\.float32 in torch\.sparse_coo; known: tensors of F64",
        ),
        ({"m": torch.ones(2, device="meta")}, "m has a shape and no values"),
        ({"n": 3.5}, "n is a float; known: tensors of F64, F32"),
    ],
)
def test_what_is_no_table_of_tensors(content, told, tmp_path) -> None:
    torch.save(content, tmp_path / "a.bin")
    with pytest.raises(KieloError, match=rf"a\.bin: {told}"):
        read_table(tmp_path / "a.bin")


def test_a_compressed_zip_is_refused(tmp_path) -> None:
    """Its tensors have no place that can be read alone."""
    torch.save({"a": torch.ones(100)}, tmp_path / "a.bin")
    with zipfile.ZipFile(tmp_path / "a.bin") as plain, zipfile.ZipFile(tmp_path / "b.bin", "w") as packed:
        for member in plain.infolist():
            is_packed = member.filename.endswith("data/0")
            kind = zipfile.ZIP_DEFLATED if is_packed else zipfile.ZIP_STORED
            packed.writestr(member.filename, plain.read(member), compress_type=kind)
    with pytest.raises(
        KieloError, match=r"b\.bin: compressed, which Kielo does not read. Fix: write it again"
    ):
        read_table(tmp_path / "b.bin")
