"""Host copies of a save take as many bytes as the tensors, in one buffer."""

import pytest
import torch

from kielo.checkpoint.saving import Staging

ALIGNMENT = 512
SHAPES = {"matrix": (129, 1000), "vector": (1000,), "scalar": (), "empty": (0, 7), "one_more": (4097,)}


def tensors_of(value: float) -> dict[str, torch.Tensor]:
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)
    return {
        name: torch.full(shape, value, dtype=dtype) for (name, shape), dtype in zip(SHAPES.items(), dtypes)
    }


def test_the_buffer_is_as_large_as_the_tensors_and_copies_are_views_of_it():
    """At most 1 % and the alignment more; a second save reuses it, other tensors replace it."""
    staging, first, second = Staging(), tensors_of(1.0), tensors_of(2.0)
    staging.reserve(first)
    size = sum(tensor.nbytes for tensor in first.values())
    assert size <= staging.num_bytes <= 1.01 * size + ALIGNMENT * len(first)

    copies = staging.copy(first)
    buffer = copies["matrix"].untyped_storage()
    assert buffer.nbytes() == staging.num_bytes
    for name, copy in copies.items():
        assert torch.equal(copy, first[name]) and copy.dtype == first[name].dtype
        assert copy.untyped_storage().data_ptr() == buffer.data_ptr()
        assert copy.storage_offset() * copy.element_size() % ALIGNMENT == 0

    again = staging.copy(second)
    assert again["matrix"].data_ptr() == copies["matrix"].data_ptr()
    assert all(torch.equal(again[name], tensor) for name, tensor in second.items())

    wide = {"matrix": torch.ones(130, 1000)}
    assert torch.equal(staging.copy(wide)["matrix"], wide["matrix"])
    assert staging.num_bytes == wide["matrix"].nbytes
    staging.close()
    assert staging.num_bytes == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_of_tensors_on_a_gpu_are_pinned():
    staging, tensors = Staging(), {name: tensor.cuda() for name, tensor in tensors_of(3.0).items()}
    for name, copy in staging.copy(tensors).items():
        assert torch.equal(copy, tensors[name].cpu()) and (copy.is_pinned() or not copy.numel())
    staging.close()
