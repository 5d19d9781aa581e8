"""Base of every corpus step: a datatrove `PipelineStep` that counts documents, lines and bytes it drops.

The counts are sent as datatrove statistics, which the executor sums over the workers; `funnel` reads them.
Documents in -> documents left, and counts by reason.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Self

from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from kielo.corpus.split_document import SplitDocument

# One label of a count: what was counted, and for which reason.
SEPARATOR = "/"
# Begins the labels of one source's counts; its name, which holds no separator, and the label itself follow.
OF_SOURCE = "of"


def labels_of(source: str, labels: dict[str, int]) -> dict[str, int]:
    """Returns the counts of one source's documents, under the labels of the whole corpus."""
    prefix = f"{OF_SOURCE}{SEPARATOR}{source}{SEPARATOR}"
    return {label.removeprefix(prefix): count for label, count in labels.items() if label.startswith(prefix)}


class CorpusStep(PipelineStep):
    """Passes documents through `work`, and counts what is left after it."""

    type = "kielo"
    name: str
    detail: str = ""
    """Tells this step from others of its name, in the funnel."""

    def __init__(self) -> None:
        super().__init__()
        self.tally: Counter[str] = Counter()
        self.only: frozenset[str] | None = None
        self.source = ""

    def for_sources(self, names: Iterable[str], detail: str = "") -> Self:
        """Let documents of all other sources pass untouched. Returns this step."""
        self.only, self.detail = frozenset(names), detail
        return self

    def start(self) -> None:  # noqa: B027 (most steps need nothing)
        """Called in the worker before the first document: the place to load a model."""

    @abstractmethod
    def work(self, document: SplitDocument) -> bool:
        """Change the document; False drops it (and the step has counted why)."""

    def count(self, what: str, reason: str, amount: int = 1) -> None:
        """Count once for the whole corpus and once for the source of the document at work."""
        label = f"{what}{SEPARATOR}{reason}"
        self.tally[label] += amount
        if self.source:
            self.tally[f"{OF_SOURCE}{SEPARATOR}{self.source}{SEPARATOR}{label}"] += amount

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        self.start()
        for document in data or ():
            self.source = document.source
            if self.only is not None and self.source not in self.only or self.work(document):
                self.count_left(document)
                yield document
        self.report_tally()

    def count_left(self, document: SplitDocument) -> None:
        self.count("documents_left", "")
        self.count("bytes_left", "", document.num_bytes)

    def report_tally(self) -> None:
        """Hand the counts to datatrove, once: its running variance for every line would cost seconds."""
        for label, amount in self.tally.items():
            self.stat_update(label, value=amount)
        self.tally.clear()


class LineFilter(CorpusStep):
    """Drops lines; a document that loses all of them is dropped for the reason that took most bytes."""

    @abstractmethod
    def judge(self, document: SplitDocument) -> Sequence[str | None]:
        """Returns for each line None to keep it, or the reason to drop it."""

    def work(self, document: SplitDocument) -> bool:
        verdicts = self.judge(document)
        if not any(verdicts):
            return bool(document.lines)
        lost: Counter[str] = Counter()
        for reason, size in zip(verdicts, document.line_bytes, strict=True):
            if reason is not None:
                lost[reason] += size
                self.count("lines", reason)
        for reason, size in lost.items():
            self.count("bytes", reason, size)
        document.keep([reason is None for reason in verdicts])
        if not document.lines:
            self.count("documents", max(lost, key=lambda reason: (lost[reason], reason)))
        return bool(document.lines)


class DocumentFilter(CorpusStep):
    """Drops whole documents."""

    @abstractmethod
    def judge(self, document: SplitDocument) -> str | None:
        """Returns None to keep the document, or the reason to drop it."""

    def work(self, document: SplitDocument) -> bool:
        reason = self.judge(document)
        if reason is not None:
            self.count("documents", reason)
            self.count("lines", reason, len(document.lines))
            self.count("bytes", reason, document.num_bytes)
        return reason is None
