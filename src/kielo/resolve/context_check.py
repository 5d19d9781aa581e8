"""Checks that a layout can split a sequence over the context axis: arithmetic, torch-free."""

import math

from kielo.recipe.sections import Layout, Model


def check_context(
    model: Model, sequence_length: int, layout: Layout, length_key: str = "dataset.sequence_length"
) -> list[str]:
    """Returns what is wrong with `layout.context`, each complaint with numbers that would work.

    length_key: the recipe's key of `sequence_length`.
    """
    ranks = layout.context
    if ranks == 1:
        return []
    complaints = []
    if sequence_length % (2 * ranks):
        sizes = [
            size
            for size in range(1, min(ranks, sequence_length + 1))
            if size == 1 or sequence_length % (2 * size) == 0
        ]
        complaints.append(
            f"{length_key} = {sequence_length} does not split into 2 × layout.context = {2 * ranks} equal "
            "blocks; what would work: sequence_length "
            f"{_listed(lengths_that_split(sequence_length, ranks))}, or "
            f"layout.context {_listed(sizes)}"
        )
    if layout.context_attention == "ulysses":
        # Where layout.tensor itself does not fit the heads, `layout_check` says so; here it must not divide
        # by zero.
        heads = max(1, model.num_attention_heads // layout.tensor)
        kv_heads = max(1, (model.num_key_value_heads or model.num_attention_heads) // layout.tensor)
        common = math.gcd(heads, kv_heads)
        if common % ranks:
            sizes = [size for size in range(1, common + 1) if common % size == 0]
            complaints.append(
                f'layout.context = {ranks} with layout.context_attention = "ulysses" splits the {heads} '
                f"heads and {kv_heads} key-value heads of each tensor rank, which must both be multiples of "
                f'it; what would work: layout.context {_listed(sizes)}, or context_attention = "all_gather"'
            )
    return complaints


def lengths_that_split(sequence_length: int, ranks: int) -> list[int]:
    """Returns the nearest lengths, below and above, that split into two equal blocks for each rank."""
    below = sequence_length // (2 * ranks) * 2 * ranks
    return [length for length in (below, below + 2 * ranks) if length]


def _listed(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)
