"""The table of checks, in their order: what explains later findings comes first."""

from kielo.verify.preflight import (
    binding,
    clock,
    collectives,
    device,
    files,
    network,
    same_software,
    training,
)
from kielo.verify.preflight.job import Check

CHECKS = tuple(
    Check(name, module.measure, module.judge, module.summarise)
    for name, module in (
        ("software", same_software),
        ("clock", clock),
        ("binding", binding),
        ("device", device),
        ("collectives", collectives),
        ("network", network),  # NCCL has named its network by now
        ("files", files),
        ("training", training),
    )
)
