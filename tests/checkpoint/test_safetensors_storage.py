"""Any box of a tensor is filled from the chunks that other layouts wrote."""

import pytest
import torch

from kielo.artifact.checkpoint_index import CheckpointIndex, Chunk, TensorEntry, chunk_key
from kielo.checkpoint import safetensors_storage as module
from kielo.checkpoint.safetensors_storage import fill_from_chunks, write_chunks
from kielo.checkpoint.save_plan import HeldChunk

WHOLE = torch.arange(35.0).view(7, 5)
BOXES = [((0, 0), (3, 5)), ((3, 0), (4, 2)), ((3, 2), (4, 3))]  # offset and shape of each rank's chunk


@pytest.mark.parametrize("rows", [(0, 7), (2, 4), (3, 7), (4, 5), (0, 3), (2, 2)])
@pytest.mark.parametrize("columns", [(0, 5), (1, 4), (0, 2), (2, 5)])
def test_a_box_of_three_chunks(rows, columns, tmp_path, monkeypatch) -> None:
    """Beside the same box of the whole; a scalar comes from its own chunk."""
    chunks = []
    for rank, (offset, shape) in enumerate(BOXES):
        part = WHOLE[offset[0] : offset[0] + shape[0], offset[1] : offset[1] + shape[1]].contiguous()
        held = [HeldChunk("a", "F32", (7, 5), offset, shape)]
        copies = {"a": part, "n": torch.tensor(6)}
        if rank == 0:
            held.append(HeldChunk("n", "I64", (), (), ()))
        (name,) = write_chunks(tmp_path, rank, "0" * 16, held, copies)
        chunks.append(Chunk(offset, shape, name, chunk_key("a", offset)))
    assert write_chunks(tmp_path, 3, "0" * 16, [], {}) == {} and len(list(tmp_path.iterdir())) == 3
    number = TensorEntry("I64", (), (Chunk((), (), chunks[0].file, chunk_key("n", ())),))
    index = CheckpointIndex(
        "0" * 16, 1, {"a": TensorEntry("F32", (7, 5), tuple(chunks)), "n": number}, {"t": "a"}
    )
    boxes = {2: (slice(*rows), slice(*columns)), 0: ()}
    monkeypatch.setattr(module, "local_slices", lambda tensor: boxes[tensor.dim()])
    shape = [rows[1] - rows[0], columns[1] - columns[0]]
    tensors = {"a": torch.full(shape, -1.0), "t": torch.full(shape, -1.0).double(), "n": torch.tensor(0)}
    fill_from_chunks(tmp_path, index, tensors)
    assert tensors["a"].equal(WHOLE[boxes[2]]) and tensors["t"].equal(WHOLE[boxes[2]].double())
    assert tensors["n"].item() == 6
