"""torch's distributed checkpoint (DCP) over our storage: tensors of any layout to files and back."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dist_cp
from torch.distributed.checkpoint.api import CheckpointException

from kielo.artifact.checkpoint_index import CheckpointIndex
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.safetensors_storage import SafetensorsStorageReader, SafetensorsStorageWriter

# A run without ranks is meant; the filter is set here because filters belong to no thread.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def save_tensors(
    writer: SafetensorsStorageWriter, tensors: dict[str, torch.Tensor], ranks: Agreement
) -> None:
    """Write the tensors, each chunk by one rank. Raises the first error of any rank on all of them."""
    planner = dist_cp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _plain_errors(), torch.no_grad():
        dist_cp.save(
            tensors,
            storage_writer=writer,
            planner=planner,
            process_group=ranks.group,
            no_dist=ranks.size == 1,
        )


def load_tensors(
    path: Path, index: CheckpointIndex, tensors: dict[str, torch.Tensor], ranks: Agreement
) -> None:
    """Fill the tensors in place, whatever layout wrote them. Raises the first error of any rank on all."""
    planner = dist_cp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _plain_errors():
        dist_cp.load(
            dict(tensors),
            storage_reader=SafetensorsStorageReader(path, index),
            planner=planner,
            process_group=ranks.group,
            no_dist=ranks.size == 1,
        )


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raises the first rank's error, with its rank: DCP wraps all of them in a CheckpointException.

    That is a BaseException.
    """
    try:
        yield
    except CheckpointException as wrapped:
        rank, (error, _) = min(wrapped.failures.items())
        if isinstance(error, OSError):
            raise OSError(error.errno, f"{error.strerror} on rank {rank}", error.filename) from wrapped
        raise error from wrapped
