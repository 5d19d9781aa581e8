"""A run's answer to spikes: it tells those that passed, goes back for those that did harm, or stops.

In: loss and gradient norm of each step. Out: alerts, rows of the log, and an answer, the same on every rank;
`go_back.py` then goes back. A run stops when it went back `max_tries` times for spikes that
follow on each other. PaLM (Chowdhery et al. 2022, section 5.1) and LLM-jp went back by hand in this way.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from kielo.artifact.metrics import Row, Spike
from kielo.checkpoint.agreement import Agreement
from kielo.dataset.query import documents_of_step
from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import Resolved
from kielo.train.watch.checks import Answer, TakenStep
from kielo.train.watch.spikes import Episode, Spikes, Verdict, WentBack, steps_to_pass_over

NAMED_DOCUMENTS = 5  # of each source


class SpikeWatch:
    """Go back for a harmful spike; a checkpoint from before it is the newest then.

    Raises KieloError when the run went back too often.

    harmful: the spike that the run must go back for, until it went. go_back_before: makes the newest
    checkpoint from before a step the newest; False if there is none. went_back: for what the run went back so
    far. write: takes rows of the log.
    """

    def __init__(
        self,
        spikes: Spikes,
        resolved: Resolved,
        go_back_before: Callable[[int], bool],
        went_back: Callable[[], Sequence[WentBack]],
        write: Callable[[Row], None],
        alert: Callable[[int, str], None],
    ):
        self.spikes = spikes
        self.harmful: Episode | None = None
        self._resolved, self._settings = resolved, resolved.identity.train.spikes
        self._go_back_before, self._went_back = go_back_before, went_back
        self._write, self._alert = write, alert

    def after_step(self, taken: TakenStep) -> Answer:
        verdict = self.spikes.look(taken.step, taken.loss, taken.gradient_norm)
        if verdict is None:
            return "go on"
        if verdict.kind == "harmful" and self._settings.response == "go_back":
            self._refuse_more_tries(verdict)
            if self._go_back_before(steps_to_pass_over(verdict.episode)[0]):
                self.harmful = verdict.episode
                return "go back"
        if not verdict.episode.not_finite:  # else the guard ends the run
            self._tell(taken.step, verdict)
        return "go on"

    def described(self, episode: Episode) -> str:
        """Return e.g. "the loss rose to 7.2 (usual: 2.5) in steps 812 to 841, most in step 820 (…)"."""
        step = episode.worst_step
        return (
            f"the loss rose to {episode.worst_loss:.4g} (usual: {episode.usual_loss:.4g}) and the gradient "
            f"norm to {episode.worst_norm:.3g} (usual: {episode.usual_norm:.3g}) in steps "
            f"{episode.first_step} to {episode.last_step}, most in step {step}, whose text is of "
            f"{self._documents(step)} (all of it: `kielo data RECIPE --step {step}`)"
        )

    def row(self, episode: Episode, step: int, outcome: str) -> Spike:
        return Spike(
            step=step,
            spike_from=episode.first_step,
            spike_to=episode.last_step,
            outcome=outcome,
            highest_loss=episode.worst_loss,
            usual_loss=episode.usual_loss,
            highest_loss_step=episode.worst_step,
        )

    def _tell(self, step: int, verdict: Verdict) -> None:
        episode = verdict.episode
        is_over = verdict.kind == "passed"
        self._write(self.row(episode, step, "passed" if is_over else "told"))
        if is_over:
            ending = "; it passed by itself"
        elif verdict.kind == "norm":
            ending = "; the loss came back, the norm did not, and training goes on"
        elif self._settings.response == "tell":
            ending = '; it lasts, and training goes on, as train.spikes.response = "tell" says'
        else:
            ending = "; it lasts, and training goes on, as there is no checkpoint from before it"
        self._alert(step, self.described(episode) + ending)
        if not is_over:
            self.spikes.accept()

    def _refuse_more_tries(self, verdict: Verdict) -> None:
        episode, most = verdict.episode, self._settings.max_tries
        first_step, last_step = steps_to_pass_over(episode)
        if self._tries_before(first_step) < most:
            return
        raise KieloError(
            f"step {verdict.step}: {self.described(episode)}; the run went back {most} times for spikes that "
            f"follow on each other (train.spikes.max_tries = {most}), so it stops. What helps: a look at "
            f"these documents, train.skip_steps = [[{first_step}, {last_step}]] and more, "
            "train.spikes.learning_rate_factor = 0.5, or more train.spikes.max_tries; the same command then "
            "goes on from the newest checkpoint"
        )

    def _tries_before(self, first_step: int) -> int:
        """Counts the times of going back for spikes of which each begins within a window of the next."""
        tries = 0
        for spike in reversed(self._went_back()):
            if first_step - spike.last_step > self._settings.window_steps:
                break
            tries, first_step = tries + 1, spike.first_step
        return tries

    def _documents(self, step: int) -> str:
        """Return e.g. "books (a.txt:3, a.txt:9, 12 more) and web (b.txt:1)". All ranks call it."""
        return Agreement().on_first(lambda: self._documents_read_here(step))

    def _documents_read_here(self, step: int) -> str:
        identity, placement = self._resolved.identity, self._resolved.placement
        try:
            rows = documents_of_step(
                Path(placement.tokens_folder),
                identity.seed,
                identity.phases[identity.phase_index(step)],
                identity.longest_sequence_length,
                placement.end_of_text_id,
                step,
                lambda ids: "",
            )
        except (KieloError, OSError) as error:  # the text matters less than going on
            return f"documents that could not be read ({error})"
        by_source: dict[str, list[str]] = {}
        for row in rows:
            by_source.setdefault(row["source"], []).append(str(row["document"]))
        return " and ".join(
            f"{source} ({_some(list(dict.fromkeys(ids)))})" for source, ids in sorted(by_source.items())
        )


def _some(names: list[str]) -> str:
    more = len(names) - NAMED_DOCUMENTS
    return ", ".join(names[:NAMED_DOCUMENTS]) + (f", {more} more" if more > 0 else "")
