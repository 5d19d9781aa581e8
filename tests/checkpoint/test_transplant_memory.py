"""What a transplant needs besides the shards that it fills: blocks of rows, never a matrix."""

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from kielo.artifact.stage_counts import RowMap
from kielo.checkpoint import hugging_face_import, transplant
from kielo.checkpoint.hugging_face_import import load_model_weights
from kielo.checkpoint.tensor_file import ReadBuffers
from kielo.checkpoint.transplant import Transplant
from kielo.models.families import hf_config
from kielo.models.llama.model import Llama
from tests.checkpoint.layouts import config, values

BLOCK = 32 * 1024
OLD, NEW = 10_000, 8_000  # of 16 numbers in fp32: 640 and 512 kB, twenty and sixteen blocks


class LiveBytes(TorchDispatchMode):
    """Counts bytes of the tensors that operators made and that are not freed; `peak` is the most."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outcome = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outcome):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.live:
                    self.live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return outcome


def row_map(method: str) -> RowMap:
    """Of `mean`: nearly all rows have token 7 among theirs, as those of frequent letters do."""
    generator = np.random.default_rng(2)
    others = generator.integers(0, OLD, (NEW, 2)).tolist()
    rows = [sorted([7, *other]) if number % 50 else [] for number, other in enumerate(others)]
    if method == "random":
        rows = [[]] * NEW
    return RowMap(method=method, old_tokenizer="", old_vocabulary_size=OLD, rows=rows, control_tokens={})


@pytest.mark.parametrize("method", ["mean", "random"])
def test_no_matrix_is_held_beside_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str):
    """Eight blocks at most besides the parameters; the smallest matrix would be sixteen."""
    monkeypatch.setattr(transplant, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(hugging_face_import, "ReadBuffers", partial(ReadBuffers, BLOCK))
    LlamaForCausalLM(LlamaConfig(**hf_config(config(vocab_size=OLD)))).save_pretrained(tmp_path)
    model = config(vocab_size=NEW)
    parameters = dict(Llama(model).named_parameters())
    with LiveBytes() as counted:
        load_model_weights(parameters, tmp_path, model, None, Transplant(row_map(method), values(model, 9)))
    shards = sum(4 * parameter.numel() for parameter in parameters.values())
    assert 2 * 4 * 16 * NEW < shards < counted.peak < shards + 8 * BLOCK
