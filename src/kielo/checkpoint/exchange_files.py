"""Files sent from rank to rank, piece by piece: each rank sends to one rank and receives from another."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from kielo.checkpoint.slow_links import Arrival

PIECE_BYTES = 64 * 2**20

SizedFile = tuple[Path, int]  # a file and its bytes


def exchange_files(
    sent: Sequence[SizedFile], to: int, received: Sequence[SizedFile], source: int, group: dist.ProcessGroup
) -> Arrival | None:
    """Sends files to rank `to` and receives files from rank `source`; all ranks of `group` call it together.

    group: of the CPU. The files that are received are made anew. Returns how the first piece arrived; later
    ones also wait for ranks that wait for a slow link themselves. Raises OSError for a file that cannot be
    read or written, after all pieces were exchanged, so that no other rank waits for this one.
    """
    for path, _ in received:
        path.unlink(missing_ok=True)
    outgoing, incoming = _pieces(sent), _pieces(received)
    failure: OSError | None = None
    first: Arrival | None = None
    for number in range(max(len(outgoing), len(incoming))):
        sending, arriving = None, None
        if number < len(outgoing):
            piece = torch.zeros(outgoing[number][2], dtype=torch.uint8)
            try:
                _read(outgoing[number], piece)
            except OSError as error:
                failure = failure or error
            sending = dist.isend(piece, to, group=group)
        if number < len(incoming):
            arriving, began = torch.empty(incoming[number][2], dtype=torch.uint8), time.monotonic()
            dist.irecv(arriving, source, group=group).wait()
            first = first or Arrival(incoming[number][2], time.monotonic() - began)
        if sending is not None:
            sending.wait()
        if arriving is not None and failure is None:
            try:
                with open(incoming[number][0], "ab") as file:
                    file.write(arriving.numpy())
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure
    return first


def _pieces(files: Sequence[SizedFile]) -> list[tuple[Path, int, int]]:
    """Returns (file, first byte, bytes) of each piece, in the order in which they are sent."""
    return [
        (path, begin, min(PIECE_BYTES, num_bytes - begin))
        for path, num_bytes in files
        for begin in range(0, num_bytes, PIECE_BYTES)
    ]


def _read(piece: tuple[Path, int, int], values: torch.Tensor) -> None:
    path, begin, num_bytes = piece
    with open(path, "rb") as file:
        file.seek(begin)
        found = np.fromfile(file, np.uint8, num_bytes)
    if found.size < num_bytes:
        raise OSError(f"{path} is shorter than it was when it was written")
    values.copy_(torch.from_numpy(found))
