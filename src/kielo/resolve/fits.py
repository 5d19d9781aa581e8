"""The one answer to "does it fit": bytes that a step may reserve on a device, and those it needs; no torch.

`kielo plan`, `kielo rehearse`, the choice of micro-batches and the warning of `kielo train` all ask here. A
card says what the driver gives (`given_bytes`) and what of it context and communicators take
(`context_bytes`); the allocator's share goes with what a step allocates and frees.
"""

from typing import TypeVar

from kielo.recipe.cards import Accelerator

Bytes = TypeVar("Bytes")  # a number, or a column of them
# Bytes of a step that no formula counts: workspaces of kernels and of collectives, gathered gradients.
WORKSPACE_BYTES = 1.5e9
# Reserved beyond what is allocated: fragments of the allocator, as a share of what a step allocates and
# frees.
RESERVED_SHARE = 0.06
# Devices are sold by powers of ten and built by powers of two: of "80 GB" a driver gives about 79 × 2^30
# bytes.
_DRIVER_SHARE = 0.99 * 2**30 / 1e9


def usable_bytes(card: Accelerator) -> float | None:
    """Returns the bytes that torch may reserve on a device; None where its card knows of no memory."""
    if card.memory_bytes is None:
        return None
    return float(card.given_bytes or card.memory_bytes * _DRIVER_SHARE) - card.context_bytes


def workspace_bytes(passing: Bytes) -> Bytes:
    """Returns what torch reserves beside tensors, of which a step allocates and frees `passing` bytes."""
    return WORKSPACE_BYTES + RESERVED_SHARE * passing


def needed_bytes(held: Bytes, peak: Bytes) -> Bytes:
    """Returns the bytes that torch reserves, from those of tensors.

    held: between steps. peak: at one time within a step, with those.
    """
    return peak + workspace_bytes(peak - held)
