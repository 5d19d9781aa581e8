"""Decides whether ranks that have failed are started again. In: how each attempt ended. Torch-free.

Processes that die and ranks that hang may be due to a device, a node or a moment. A refusal, a full disk or
the same failure at the same step will come again.
"""

from dataclasses import dataclass

from kielo.artifact.outcome import Outcome
from kielo.parallel.local_ranks import Failure

_USAGE = 2


@dataclass(frozen=True)
class Attempt:
    """The end of one attempt. refusal: what a rank said that a person can put right; mostly empty.

    newest: the name of the newest whole checkpoint, empty where there is none.
    """

    failure: Failure
    outcome: Outcome
    refusal: str
    newest: str

    @property
    def is_temporary(self) -> bool:
        """Returns True if a rank was killed or hung, which its program may not be the cause of."""
        return self.failure.code < 0 or self.outcome.outcome == "hung"


def why_not_again(attempts: list[Attempt], most: int) -> str | None:
    """Returns None if the ranks are to be started again, else the reason why not; empty where it is plain.

    most: restarts in a row that make no new checkpoint.
    """
    last = attempts[-1]
    if last.failure.code == _USAGE or (last.refusal and not last.is_temporary):
        return ""
    without_new = 0
    for attempt in reversed(attempts):
        if attempt.newest != last.newest:
            break
        without_new += 1
    if without_new > most:
        return f"{without_new} attempts in a row made no new checkpoint" if most else ""
    if len(attempts) > 1 and _is_same(attempts[-2], last):
        return "twice the same failure at the same step"
    return None


def _is_same(one: Attempt, other: Attempt) -> bool:
    at = one.newest, one.outcome.step
    return at == (other.newest, other.outcome.step) and (
        one.failure == other.failure
        if one.is_temporary or other.is_temporary
        else one.outcome.message == other.outcome.message
    )
