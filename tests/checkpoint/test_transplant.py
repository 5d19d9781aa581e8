"""A vocabulary transplant into sharded parameters is bitwise that of whole matrices, in every layout."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kielo.artifact.stage_counts import RowMap
from kielo.checkpoint import transplant
from kielo.checkpoint.hugging_face_import import load_model_weights
from kielo.checkpoint.transplant import Transplant
from kielo.models.families import hf_config
from kielo.models.llama.model import Llama
from kielo.models.llama.tables import to_hugging_face
from kielo.parallel.materialise import local, local_slices
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Model
from tests.checkpoint.layouts import config, model_on_ranks, values
from tests.started_ranks import run_ranks

OLD, NEW, OLD_ROWS = 41, 67, 48  # the old model has rows that no token of its tokenizer has


def new_model(tied: bool) -> Model:
    """67 tokens in 72 rows."""
    return config(tied, NEW).model_copy(update={"vocab_multiple": 8})


def row_map() -> RowMap:
    """Copies, means of up to five rows, some of them repeated, weighted sums, and random rows."""
    generator = np.random.default_rng(5)
    sizes = [0, 1, 1, 2, 3, 5, 2, 0, 1] * 8
    rows = [sorted(generator.integers(0, OLD, size).tolist()) for size in sizes[:NEW]]
    weights = {
        str(row): generator.dirichlet(np.ones(len(olds))).astype(np.float32).tolist()
        for row, olds in enumerate(rows)
        if len(olds) > 1 and row % 2
    }
    return RowMap(
        method="focus",
        old_tokenizer="",
        old_vocabulary_size=OLD,
        rows=rows,
        control_tokens={},
        weights=weights,
    )


def made_of(stored: np.ndarray, olds: list[int], weights: list[float] | None) -> np.ndarray:
    """numpy's mean of the old rows, or their weighted sum in their order, in fp32."""
    if weights is None:
        return np.mean(stored[olds], axis=0, dtype=np.float32)
    return sum(np.float32(weight) * stored[old] for old, weight in zip(olds, weights))


def write_old(folder: Path, tied: bool) -> None:
    """Transformers' own model and files, in fp32."""
    torch.manual_seed(3)
    model = config(tied, OLD_ROWS)
    LlamaForCausalLM(LlamaConfig(**hf_config(model))).save_pretrained(folder)


def expected(folder: Path, tied: bool) -> dict[str, np.ndarray]:
    """Our name → the whole parameter: each row by numpy's mean of rows of transformers' matrices."""
    old = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    model = new_model(tied)
    shapes = {name: parameter.shape for name, parameter in Llama(model).named_parameters()}
    whole = {}
    for ours, piece in to_hugging_face(model).items():
        stored = old[piece.name].numpy()
        if ours in ("embed.weight", "head.weight"):
            first = values(model, 9)(ours, shapes[ours]).numpy()
            rows = [
                made_of(stored, olds, row_map().weights.get(str(row))) if olds else first[row]
                for row, olds in enumerate(row_map().rows)
            ]
            stored = np.concatenate([rows, np.zeros((shapes[ours][0] - NEW, shapes[ours][1]), np.float32)])
        whole[ours] = stored
    return whole


def load_on_rank(folder: Path, tied: bool, shard: int, tensor: int) -> dict[str, tuple]:
    transplant.BLOCK_BYTES = 7 * 16 * 4  # seven rows at a time
    model, _ = model_on_ranks(new_model(tied), 1, shard, tensor=tensor)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        local(parameter).detach().fill_(torch.nan)
    load_model_weights(
        parameters, folder, new_model(tied), None, Transplant(row_map(), values(new_model(tied), 9))
    )
    return {name: (local_slices(p), local(p).detach().numpy().copy()) for name, p in parameters.items()}


@pytest.mark.parametrize(
    ("tied", "shard", "tensor"),
    [
        pytest.param(False, 3, 1, marks=pytest.mark.full),
        (True, 1, 2),
        pytest.param(False, 1, 2, marks=pytest.mark.full),
    ],
)
def test_each_rank_gets_its_rows(tmp_path, tied, shard, tensor):
    """Bitwise in fp32: embedding and head, tied and not, on ranks that split rows, padding zero."""
    write_old(tmp_path, tied)
    whole = expected(tmp_path, tied)
    for of_rank in run_ranks(load_on_rank, shard * tensor, tmp_path, tied, shard, tensor):
        assert of_rank.keys() == whole.keys()
        for name, (box, found) in of_rank.items():
            assert np.array_equal(found, whole[name][box]), name


def test_weights_of_another_vocabulary_are_refused(tmp_path):
    """A matrix with fewer rows than the old tokenizer has tokens, or of another width, changes nothing."""
    write_old(tmp_path, False)
    model = Llama(new_model(False))
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(7)
    larger = row_map().model_copy(update={"old_vocabulary_size": OLD_ROWS + 1})
    with pytest.raises(
        KieloError, match=r"embed_tokens.* rows of 49 old tokens, .*tokenizer.json that belongs"
    ):
        load_model_weights(
            parameters, tmp_path, new_model(False), None, Transplant(larger, values(new_model(False), 9))
        )
    assert all(bool((parameter == 7).all()) for parameter in parameters.values())
