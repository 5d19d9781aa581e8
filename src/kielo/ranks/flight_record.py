"""The collectives that torch has noted, written when the job hangs, for `torchfrtrace
RUN/train/flight_record`.

NCCL and RCCL note all. gloo, from torch 2.11 on, notes some, without the ranks of a group, which that
analyser needs.
"""

import os
import pickle
from pathlib import Path

import torch._C._distributed_c10d as c10d

from kielo.ranks.communicator import in_thread

_RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")  # of NCCL and RCCL; of gloo
_KEPT_COLLECTIVES = 2000
_ANSWER_SECONDS = 5.0


def keep_flight_record() -> None:
    """Make torch note collectives, which 2.10 does not by default. Call it before the first group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_KEPT_COLLECTIVES))


def write_flight_record(folder: Path, rank: int) -> None:
    """Write this rank's record as `rank_00007`, in torch's form, if torch has noted anything.

    Another thread asks torch, because a stuck communicator may never answer. After 5 s it is given up.
    """
    found: list[bytes] = []

    def ask() -> None:
        dumps = [getattr(c10d, name) for name in _RECORDERS if hasattr(c10d, name)]
        records = [dump(True, True, False) for dump in dumps]  # all collectives, with stacks, ended too
        found.extend(record for record in records if pickle.loads(record).get("entries"))

    in_thread(ask, "flight record", _ANSWER_SECONDS)
    if found:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank_{rank:05d}").write_bytes(found[0])
