"""The files of an export beside text and sizes that are known by hand; in one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kielo.artifact.durable import marked
from kielo.artifact.manifest import read_manifest
from kielo.checkpoint import hugging_face_export as module
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.export_stage import ExportOptions, tokenizer_files
from kielo.checkpoint.hugging_face_export import export
from kielo.checkpoint.tensor_table import read_table
from kielo.models.llama.model import Llama
from kielo.models.llama.tables import to_hugging_face
from kielo.recipe.errors import KieloError
from tests.bar import bars_of
from tests.checkpoint.layouts import config

SIZES = {piece.name: 0 for piece in to_hugging_face(config()).values()}


def saved(folder: Path, plain: dict[str, Any] | None = None) -> Path:
    checkpointer = Checkpointer(folder)
    tensors = {
        f"model/{name}": torch.zeros_like(value) for name, value in Llama(config()).state_dict().items()
    }
    checkpointer.save(1234, tensors, plain or {})
    return checkpointer.settle()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("run"))


def test_the_card_is_the_text_that_is_given(tmp_path, checkpoint) -> None:
    """With a last line that marks it as Kielo's; without a text there is no README."""
    folder = export(checkpoint, tmp_path / "with", config(), None, card="# A model\n")
    assert (folder / "README.md").read_text() == marked("# A model\n")
    assert not (export(checkpoint, tmp_path / "without", config(), None) / "README.md").exists()


def test_shards_end_before_the_tensor_that_overfills_them(tmp_path, checkpoint, monkeypatch) -> None:
    """In the model's order; a tensor that is larger than a shard has one alone; the bar counts bytes."""
    whole = export(checkpoint, tmp_path / "whole", config(), None) / "model.safetensors"
    table = read_table(whole)
    order = list(SIZES)
    sizes = [4 * torch.Size(table[name].shape).numel() for name in order]
    assert sum(sizes[:3]) < sum(sizes) - sizes[-1] and sizes[0] == 67 * 16 * 4
    for limit, first in ((sum(sizes[:3]), 3), (sum(sizes[:3]) - 1, 2), (sizes[0], 1), (1, 1)):
        bars = bars_of(monkeypatch, module)
        folder = export(
            checkpoint, tmp_path / f"{limit}", config(), None, ExportOptions(max_shard_bytes=limit)
        )
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": sum(sizes)} and list(index["weight_map"]) == order
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        number = len(files)
        assert files == [f"model-{at:05d}-of-{number:05d}.safetensors" for at in range(1, number + 1)]
        assert [index["weight_map"][name] for name in order[: first + 1]] == [files[0]] * first + [files[1]]
        (bar,) = bars
        assert sum(bar.updates) == sum(sizes) and bar.options == {
            "total": sum(sizes), "initial": 0, "desc": "exporting", "unit": "B", "unit_scale": True,
            "disable": None,
        }  # fmt: skip
        counts = read_manifest(folder).counts
        assert (counts["tensors"], counts["tensor_bytes"], counts["step"]) == (len(order), sum(sizes), 1234)
    assert number == len(order)
    for limit in (0, -1):
        with pytest.raises(
            KieloError, match=rf"^export: no tensor fits a shard of {limit} bytes\. Fix: 5,000,000,000 bytes"
        ):
            export(checkpoint, tmp_path / "none", config(), None, ExportOptions(max_shard_bytes=limit))
    assert ExportOptions().max_shard_bytes == 5_000_000_000 and ExportOptions().is_replacing


def test_dtypes_of_the_source(tmp_path) -> None:
    """config.json names that of most bytes; wide tensors come first in the file, so that each is aligned."""
    names = list(SIZES)
    record = dict.fromkeys(names, "BF16") | {"model.norm.weight": "F32"}
    path = saved(tmp_path / "run", {"source_tensors": record})
    folder = export(path, tmp_path / "hf", config(), None)
    table = read_table(folder / "model.safetensors")
    assert {name: stored.dtype for name, stored in table.items()} == record
    begins = sorted(table, key=lambda name: table[name].begin)
    assert begins[0] == "model.norm.weight"
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    with pytest.raises(
        KieloError, match=r"^export: dtype 'int8' is not known\. Fix: one of source, fp32, bf16, fp16$"
    ):
        export(path, tmp_path / "other", config(), None, ExportOptions(dtype="int8"))


def test_an_empty_folder_is_no_other_export(tmp_path, checkpoint) -> None:
    """Only one with files is refused where nothing may be replaced."""
    (tmp_path / "hf").mkdir()
    folder = export(checkpoint, tmp_path / "hf", config(), None, ExportOptions(is_replacing=False))
    assert (folder / "model.safetensors").is_file()
    again = ExportOptions(dtype="bf16", is_replacing=False)
    with pytest.raises(
        KieloError, match="hf: exists already and is not this export. Nothing was written. Fix: name a new"
    ):
        export(checkpoint, tmp_path / "hf", config(), None, again)
    with pytest.raises(KieloError, match="tokenizer: no tokenizer.json there to export with the model"):
        tokenizer_files(tmp_path / "tokenizer")
    assert tokenizer_files(None) == {}
