"""Which failures are tried again: those of a process or a moment, and not those that come again."""

import pytest

from kielo.artifact.outcome import Outcome
from kielo.parallel.local_ranks import Failure
from kielo.train.restarts import Attempt, why_not_again


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
}
NOT_AGAIN = {
    "a refusal": ([attempt(1, 0, refusal="the recipe is wrong")], ""),
    "a full disk": ([attempt(1, 5, refusal="/disk: No space left on device")], ""),
    "collectives that do not match": ([attempt(76, 5, refusal="the job hangs: all ranks wait")], ""),
    "usage": ([attempt(2, 0)], ""),
    "the same exception at the same step": ([attempt(1, 3), attempt(1, 3)], "twice the same"),
    "killed twice at the same step": ([attempt(-9, 3), attempt(-9, 3)], "twice the same"),
    "no progress": ([attempt(-9, step) for step in range(1, 5)], "4 attempts in a row made no new"),
}


@pytest.mark.parametrize("case", AGAIN)
def test_tried_again(case):
    assert why_not_again(AGAIN[case], 3) is None


@pytest.mark.parametrize("case", NOT_AGAIN)
def test_not_tried_again(case):
    attempts, told = NOT_AGAIN[case]
    assert (why_not_again(attempts, 3) or "").startswith(told)
    assert why_not_again(attempts, 3) is not None
    assert why_not_again(attempts[:1], 0) == ""  # --restarts 0
