"""Seconds of a planted fault: until it is found, and until the next step is done.

They are in pytest's report, from which `benchmarks/faults/fault_seconds.py` takes figures of docs/faults.md.
Any process notes a moment in a folder, by the machine's monotonic clock; the first note of each kind counts.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Moment = Literal["planted", "found", "next_step"]


@dataclass(frozen=True)
class FaultTimes:
    """The moments of one fault. A process that gets a copy notes into the same folder."""

    folder: Path

    def note(self, moment: Moment, at: float | None = None) -> None:
        """Notes that it is `moment` now, or was at `at` of time.monotonic()."""
        with suppress(FileExistsError), open(self.folder / moment, "x", encoding="utf-8") as file:
            file.write(repr(time.monotonic() if at is None else at))

    def has(self, moment: Moment) -> bool:
        return (self.folder / moment).exists()

    def watch_training(self, replace: Callable[[Any, str, Any], None] = setattr) -> None:
        """Makes this process note by itself, from now on, the first alert after the fault, which finds it,
        and the end of the first step after that.

        replace: `monkeypatch.setattr` in a process that does not end with the test.
        """
        from kielo.train import loop, state  # with torch, which many tests do without

        append_alert, optimiser_step = state.append_alert, loop.optimiser_step

        def alert(*arguments: Any) -> None:
            append_alert(*arguments)
            self._note_after("planted", "found")

        def step(*arguments: Any) -> Any:
            result = optimiser_step(*arguments)
            self._note_after("found", "next_step")
            return result

        replace(state, "append_alert", alert)
        replace(loop, "optimiser_step", step)

    def watch_steps(self) -> None:
        """Makes this process note the end of its next step, whatever came before it."""
        from kielo.train import loop

        optimiser_step = loop.optimiser_step

        def step(*arguments: Any) -> Any:
            result = optimiser_step(*arguments)
            self.note("next_step")
            return result

        loop.optimiser_step = step

    def report(self, record_property: Callable[[str, object], None]) -> None:
        """Gives the seconds that are known to pytest's report."""
        planted = self._at("planted")
        for moment in ("found", "next_step"):
            at = self._at(moment)
            if planted is not None and at is not None:
                record_property(f"{moment}_seconds", round(at - planted, 3))

    def _note_after(self, earlier: Moment, moment: Moment) -> None:
        if self.has(earlier):
            self.note(moment)

    def _at(self, moment: Moment) -> float | None:
        return float((self.folder / moment).read_text()) if self.has(moment) else None


def and_watch(times: FaultTimes, fn: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `fn` on a rank that notes the end of its next step; for `run_ranks`."""
    times.watch_steps()
    return fn(*arguments)
