"""How far losses may part, in numbers and in words."""

from kielo.artifact.verify_results import ROUNDING_FACTOR, Losses, Parity, loss_limits


def test_limits_of_parity() -> None:
    """The tolerance, or a multiple of rounding where that is more; in words with rounding's last step."""
    assert ROUNDING_FACTOR == 10 and loss_limits(1e-5, [0.0, 1e-6, 1e-3]) == [1e-5, 1e-5, 1e-2]
    losses = Losses(ours=[1.0], theirs=[1.0], relative_differences=[0.0])
    told = Parity.model_construct(tolerance=1e-5, losses=losses)
    assert told.limit_in_words() == "tolerance 1e-05"
    rounding = losses.model_copy(update={"rounding_differences": [1e-7, 2e-7]})
    assert Parity.model_construct(tolerance=1e-5, losses=rounding).limit_in_words() == (
        f"tolerance 1e-05, or {ROUNDING_FACTOR} times the effect of rounding alone: transformers differs "
        "from itself by up to 2.0e-07"
    )
