"""The embedding over the tensor axis: one process's hidden states, and the gradient of a rank's own rows."""

from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from kielo.parallel.mesh import build_mesh
from kielo.parallel.tensor_parallel import OwnStyle, split_embedding
from kielo.ranks.world import start_world
from tests.parallel.test_layouts import layout
from tests.started_ranks import run_ranks

ROWS, WIDTH, RANKS = 12, 6, 2


def whole() -> tuple[nn.Embedding, torch.Tensor, torch.Tensor]:
    """An embedding, ids [b, s] with rows of both ranks and repeats, and a gradient of its output."""
    generator = torch.Generator().manual_seed(3)
    embedding = nn.Embedding(ROWS, WIDTH)
    with torch.no_grad():
        embedding.weight.copy_(torch.randn(ROWS, WIDTH, generator=generator))
    ids = torch.tensor([[0, 11, 5, 6, 0, 3], [7, 7, 6, 10, 2, 11]])
    return embedding, ids, torch.randn(*ids.shape, WIDTH, generator=generator)


def on_a_rank() -> list[dict]:
    """What comes out along the sequence, and whole."""
    world = start_world(30, "cpu")
    axis = build_mesh(world, layout(tensor=RANKS)).of_parameters("tensor")
    found = []
    for output in (Shard(1), Replicate()):
        embedding, ids, gradient = whole()
        parallelize_module(embedding, axis, OwnStyle(partial(split_embedding, output)))
        hidden = embedding(ids)
        part = gradient if output == Replicate() else gradient.chunk(RANKS, dim=1)[axis.get_local_rank()]
        hidden.backward(part.contiguous())
        of_rows = embedding.weight.grad
        found.append(
            {
                "hidden": hidden.detach(),
                "placements": of_rows.placements,
                "rows": of_rows.to_local(),
                "bytes": of_rows.to_local().untyped_storage().nbytes(),
            }
        )
    return found


def test_a_rank_looks_up_its_rows_and_gets_their_gradient():
    """Equal to the bit, as each sum has one addend that is not zero; a gradient's bytes are 1/t of all."""
    embedding, ids, gradient = whole()
    hidden = embedding(ids)
    hidden.backward(gradient)
    for rank, (along_sequence, all_of_it) in enumerate(run_ranks(on_a_rank, RANKS)):
        assert torch.equal(along_sequence["hidden"], hidden.chunk(RANKS, dim=1)[rank])
        assert torch.equal(all_of_it["hidden"], hidden)
        for found in (along_sequence, all_of_it):
            assert found["placements"] == (Shard(0),)
            assert torch.equal(found["rows"], embedding.weight.grad.chunk(RANKS)[rank])
            assert found["bytes"] == 4 * ROWS * WIDTH / RANKS
