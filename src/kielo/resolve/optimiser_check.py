"""Checks that an optimiser's moments in bf16 can follow their decay rates. Arithmetic, no torch."""

from collections.abc import Iterator

from kielo.recipe.sections import TrainIdentity

# With bf16's 8 significant bits, rounding to nearest undoes a change of up to this share of a value.
_LOST_SHARE = 2.0**-8


def optimiser_complaints(train: TrainIdentity) -> Iterator[str]:
    """Yields a complaint for each decay rate at which moments in bf16 would stand still.

    A moment forgets 1 - β of itself a step. Where that is no more than rounding to nearest takes back,
    exp_avg_sq keeps the largest gradient that it ever saw, and the parameter's steps stay small for good.
    """
    if train.optimiser_state != "bf16":
        return
    for key in ("adam_beta1", "adam_beta2"):
        beta = getattr(train, key)
        if 1 - beta <= _LOST_SHARE:
            yield (
                f'train.{key} = {beta:g} with train.optimiser_state = "bf16": a step would change a moment '
                f"by {1 - beta:.2g} of itself, which rounding to bf16 takes back (up to {_LOST_SHARE:.2g}); "
                f'what would work: train.{key} of at most 0.99, or train.optimiser_state = "fp32"'
            )
