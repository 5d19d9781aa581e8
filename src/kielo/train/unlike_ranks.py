"""Refuses ranks that would train different things: each resolves the recipe by its own processor and files.

A recipe without `train.precision`, on nodes of which some have AMX, would be trained in bf16 by those and in
fp32 by the others, and ranks that disagree on micro-batches or on the layout wait for each other in vain.
"""

from typing import Any

from kielo.artifact.manifest import hash_json
from kielo.checkpoint.agreement import Agreement
from kielo.recipe.errors import KieloError
from kielo.resolve.resolve import flat
from kielo.resolve.resolved import Resolved

# What may differ: where a rank's files are, which device it has and how fast that is. Compiled layers compute
# the same as others, but for rounding.
_OF_ONE_RANK: dict[str, Any] = {
    **dict.fromkeys(("device", "accelerator", "peak_tflops"), True),
    **dict.fromkeys(("tokens_folder", "tokenizer_folder", "train_folder"), True),
    "layout": {"compile"},
    "phases": {"__all__": {"planned_tokens_per_second"}},
}
_MOST_KEYS = 8


def refuse_unlike_ranks(resolved: Resolved, ranks: Agreement) -> None:
    """Raises KieloError on every rank, with the keys, their values and ranks, where two ranks differ."""
    own = flat(resolved.placement.model_dump(mode="json", exclude=_OF_ONE_RANK))
    own |= flat(resolved.identity.model_dump(mode="json"))
    if len(set(ranks.gather(hash_json(own)))) == 1:
        return
    everyone = ranks.gather(own)
    keys = [key for key in dict.fromkeys(key for one in everyone for key in one) if _differs(key, everyone)]
    lines = [f"  - {key}: {_by_ranks(key, everyone)}" for key in keys[:_MOST_KEYS]]
    if len(keys) > _MOST_KEYS:
        lines.append(f"  - and {len(keys) - _MOST_KEYS} keys more")
    ways = "the same recipe and run folder on all nodes, or nodes of one kind"
    if "train.precision" in keys:
        ways = f"--set train.precision={everyone[0]['train.precision']}, where the recipe names none; {ways}"
    listed = "\n".join(lines)
    raise KieloError(
        f"the ranks would not train the same:\n{listed}\nWhat would work: {ways}. Nothing was changed"
    )


def _differs(key: str, everyone: list[dict[str, Any]]) -> bool:
    return any(one.get(key) != everyone[0].get(key) for one in everyone)


def _by_ranks(key: str, everyone: list[dict[str, Any]]) -> str:
    """Returns each value of the key with the ranks that have it: the first, and how many more."""
    found: dict[str, list[int]] = {}
    for rank, one in enumerate(everyone):
        found.setdefault(f"{one.get(key)}", []).append(rank)
    return ", ".join(
        f"{value} on rank {ranks[0]}" + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")
        for value, ranks in found.items()
    )
