"""Which failures are tried again: those of a process or a moment, and not those that come again."""

from dataclasses import replace

import pytest

from kielo.artifact.attempt_files import Outcome
from kielo.ranks.local_ranks import Failure
from kielo.train.start_ranks import Attempt, why_not_again


def attempt(code: int, step: int, newest: str = "", refusal: str = "", outcome: str = "failed") -> Attempt:
    """The end of rank 1 with `code` at `step`."""
    end = Outcome(outcome=outcome, step=step, tokens=0, exit_code=1, message=refusal or f"error {code}")
    return Attempt(Failure(1, code), end, refusal, newest)


AGAIN = {
    "killed": [attempt(-9, 3)],
    "killed, and others could not start a communicator": [attempt(-9, 0, refusal="rank 1 did not arrive")],
    "hung": [attempt(76, 3, outcome="hung")],
    "an exception, once": [attempt(1, 3)],
    "killed at another step": [attempt(-9, 3), attempt(-9, 4)],
    "killed at the same step, after a new checkpoint": [attempt(-9, 3), attempt(-9, 3, "step_00000002")],
    "often, with new checkpoints": [attempt(-9, step, f"step_{step:08d}") for step in range(9)],
    "as often as is allowed": [attempt(-9, step) for step in range(1, 4)],
    "as often, after others with another checkpoint": [
        *(attempt(-9, step) for step in range(1, 4)),
        *(attempt(-9, step, "step_00000002") for step in range(4, 7)),
    ],
    "other exceptions at the same step": [attempt(1, 3), attempt(3, 3)],
    "killed, and then an exception at the same step": [attempt(-9, 3), attempt(1, 3)],
    "an exception, and then killed at the same step": [attempt(1, 3), attempt(-9, 3)],
    "an exception, and then killed, in the same words": [
        attempt(1, 3, refusal="lost"),
        attempt(-9, 3, refusal="lost"),
    ],
    "killed by another signal at the same step": [attempt(-9, 3), attempt(-11, 3)],
    "another rank killed at the same step": [attempt(-9, 3), replace(attempt(-9, 3), failure=Failure(2, -9))],
}
NOT_AGAIN = {
    "a refusal": ([attempt(1, 0, refusal="the recipe is wrong")], ""),
    "a full disk": ([attempt(1, 5, refusal="/disk: No space left on device")], ""),
    "collectives that do not match": ([attempt(76, 5, refusal="the job hangs: all ranks wait")], ""),
    "usage": ([attempt(2, 0)], ""),
    "the same exception at the same step": ([attempt(1, 3), attempt(1, 3)], "twice the same"),
    "killed twice at the same step": ([attempt(-9, 3), attempt(-9, 3)], "twice the same"),
    "no progress": ([attempt(-9, step) for step in range(1, 5)], "4 attempts in a row made no new"),
    "no progress after a checkpoint": (
        [attempt(-9, 9), *(attempt(-9, step, "step_00000002") for step in range(1, 5))],
        "4 attempts in a row made no new checkpoint",
    ),
    "killed twice at the same step, in other words": (
        [attempt(-9, 3, refusal="one"), attempt(-9, 3, refusal="other")],
        "twice the same failure at the same step",
    ),
    "killed twice with a message and without a refusal": (
        [attempt(-9, 3), attempt(-9, 3)],
        "twice the same failure at the same step",
    ),
}


@pytest.mark.parametrize("case", AGAIN)
def test_tried_again(case):
    assert why_not_again(AGAIN[case], 3) is None


@pytest.mark.parametrize("case", NOT_AGAIN)
def test_not_tried_again(case):
    attempts, told = NOT_AGAIN[case]
    why = why_not_again(attempts, 3)
    assert why is not None and why.startswith(told) and bool(why) == bool(told)
    assert why_not_again(attempts[:1], 0) == ""  # --restarts 0
