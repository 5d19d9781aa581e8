"""Which run goes on as a longer one, by arithmetic; `tests/train/test_longer_run.py` trains them."""

from typing import Any

import pytest

from kielo.resolve.longer_run import goes_on_level, is_longer, last_level_step, way_to_go_on
from kielo.resolve.resolved import Identity
from tests.resolve.golden_runs import golden_resolved


def run(steps: int = 10, warmup: int = 2, decay: int = 3, **rate: Any) -> Identity:
    """Steps of 1,000 tokens each; the rate is level up to the last `decay` of them."""
    identity = golden_resolved("tiny").identity
    phase = identity.phases[0].model_copy(update={"first_step": 1, "steps": steps, "tokens_per_step": 1000})
    segment = identity.learning_rates[0].model_copy(
        update={
            "schedule": "wsd", "first_token": 0, "tokens": 1000 * steps, "warmup_tokens": 1000 * warmup,
            "decay_tokens": 1000 * decay,
        } | rate
    )  # fmt: skip
    return identity.model_copy(update={"phases": (phase,), "learning_rates": (segment,)})


@pytest.mark.parametrize(
    ("identity", "step"),
    [
        (run(), 7), (run(decay=0), 10), (run(decay=10), 0), (run(decay_tokens=3001), 6),
        (run(decay_tokens=2999), 7), (run(schedule="cosine"), 0), (run(1, 0, 0), 1),
    ],
)  # fmt: skip
def test_the_level_part_ends_with_the_last_whole_step_before_the_decay(identity, step):
    assert last_level_step(identity) == step


def test_a_longer_run_differs_in_its_last_steps_alone():
    """One step more is longer; as many steps, fewer, or another phase, are not."""
    assert is_longer(run(), run(11)) and not is_longer(run(), run()) and not is_longer(run(11), run())
    (phase,), (segment,) = run(11).phases, run(11).learning_rates
    other = phase.model_copy(update={"sequences_per_step": phase.sequences_per_step + 1})
    assert not is_longer(run(), run(11).model_copy(update={"phases": (other,)}))
    before = segment.model_copy(update={"peak": 1.0})
    two = run(11).model_copy(update={"learning_rates": (segment, segment)})
    assert not is_longer(run(), two)
    first = run().model_copy(update={"learning_rates": (segment, segment)})
    assert is_longer(first, two)
    assert not is_longer(first, two.model_copy(update={"learning_rates": (before, segment)}))


def test_a_step_goes_on_where_both_runs_are_level():
    """Up to the earlier of both ends, with the same warm-up and peak, and masks that do not fade."""
    short, long = run(10, decay=3), run(20, decay=5)
    assert [goes_on_level(short, long, step) for step in (6, 7, 8)] == [True, True, False]
    assert [goes_on_level(short, run(20, decay=14), step) for step in (6, 7)] == [True, False]
    assert not goes_on_level(short, run(20, warmup=3), 4) and not goes_on_level(short, run(20, peak=9.0), 4)
    fading = short.train.model_copy(
        update={"objective": "masked_tokens", "masking_rate": 0.3, "final_masking_rate": 0.15}
    )
    assert not goes_on_level(short.model_copy(update={"train": fading}), long, 4)
    for still in ({"objective": "next_token"}, {"final_masking_rate": 0.3}):
        train = fading.model_copy(update=still)
        assert goes_on_level(short.model_copy(update={"train": train}), long, 4)


def test_every_refusal_says_its_own_way():
    """In the decay, of another warm-up, an earlier decay, fading masks, and a schedule without level."""
    short, long = run(), run(20)
    assert way_to_go_on(short, run(20, schedule="cosine"), 4).startswith('only train.schedule = "wsd" has')
    assert way_to_go_on(run(schedule="cosine"), long, 4).startswith('only train.schedule = "wsd" has')
    assert way_to_go_on(short, long, 8).startswith("step 8 is in the decay, which began after step 7: move")
    warmup = way_to_go_on(short, run(20, warmup=3), 7)
    assert warmup.endswith("the same warm-up is --set train.warmup_share=0.1")
    assert way_to_go_on(short, run(20, decay=18), 4).startswith("the new rate would decay before step 4: a")
    fading = short.train.model_copy(update={"objective": "masked_tokens", "final_masking_rate": 0.01})
    masks = way_to_go_on(short.model_copy(update={"train": fading}), long, 4)
    assert masks.startswith(
        "train.masking_rate changes to train.final_masking_rate over the whole run; train"
    )
