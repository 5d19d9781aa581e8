"""When would a job start? Each queue and size of a launch, by the scheduler's own estimate; no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kielo.launch.job_plan import JobPlan, longest_hours, most_nodes
from kielo.launch.schedulers import NoAnswer, would_start

_MOST_ASKED = 12  # queues and sizes, each a call of the scheduler


@dataclass(frozen=True)
class Start:
    """The estimate for a job in a queue. at: local time, "" if the scheduler refuses the job, with `why`."""

    partition: str
    nodes: int
    hours: float
    at: str
    why: str = ""


@dataclass(frozen=True)
class Starts:
    """Estimates, earliest first. no_answer: why (further) estimates are missing."""

    known: list[Start]
    no_answer: str = ""

    def in_words(self) -> str:
        """Return the queue and size that start first, or why this is not known."""
        first = next((start for start in self.known if start.at), None)
        if first is not None:
            said = f"first in {first.partition} on {first.nodes} nodes, about {first.at.replace('T', ' ')}"
            return said + f"; {self.no_answer}" * bool(self.no_answer)
        why = self.no_answer or "; ".join(dict.fromkeys(start.why for start in self.known))
        return f"not known: {why or 'no queue gives these nodes'}"


def starts_of(plan: JobPlan, sizes: Sequence[int]) -> Starts:
    """Ask for the plan's number of nodes and for `sizes`, in each queue of the card that gives them.

    The answer has refused queues too. An unanswered question ends the questions.
    """
    found: list[Start] = []
    try:
        for asked in list(_jobs(plan, sizes))[:_MOST_ASKED]:
            at, why = would_start(asked)
            hours = asked.wall_seconds / 3600
            found.append(Start(asked.partition.label, asked.nodes, hours, at, why))
    except NoAnswer as error:
        return Starts(_earliest_first(found), str(error).partition(". Fix: ")[0])
    return Starts(_earliest_first(found))


def _jobs(plan: JobPlan, sizes: Sequence[int]) -> Iterator[JobPlan]:
    of_site, site, seen = plan.jobs_of_site, plan.site, set()
    for nodes in dict.fromkeys([plan.nodes, *sizes]):
        for queue in of_site.partitions:
            whole = nodes + plan.wishes.spares
            gives = queue.min_nodes <= whole <= most_nodes(queue, of_site, site)
            if not gives or (queue.label, nodes) in seen:
                continue
            seen.add((queue.label, nodes))
            most = longest_hours(queue, of_site, site)
            wall = plan.wall_seconds if most is None else min(plan.wall_seconds, round(most * 3600))
            yield replace(plan, partition=queue, nodes=nodes, wall_seconds=wall)


def _earliest_first(found: Sequence[Start]) -> list[Start]:
    return sorted(found, key=lambda start: (not start.at, start.at))
