"""Initial values that depend on nothing but a seed and a parameter's name.

So a model starts with the same numbers in every layout and on every number of ranks, whichever rank makes
which part. Data in: seed, name, shape; data out: an fp32 tensor on the CPU.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def seeded_normal(
    name: str,
    shape: Sequence[int],
    standard_deviation: float,
    seed: int,
    rows: int | None = None,
    cutoff: float | None = None,
) -> Tensor:
    """Returns normal numbers around 0, from a generator seeded by (seed, name).

    rows: number of rows that get numbers, always the same ones; those beyond, which pad a vocabulary, are 0.
    None for all. cutoff: the largest distance from 0 in standard deviations, None for no limit.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
    values = torch.zeros(tuple(shape), dtype=torch.float32, device="cpu")
    if cutoff is None:
        values[:rows].normal_(0.0, standard_deviation, generator=generator)
    else:
        end = cutoff * standard_deviation
        nn.init.trunc_normal_(values[:rows], 0.0, standard_deviation, -end, end, generator=generator)
    return values
