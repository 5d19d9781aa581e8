"""What a step counted, with labels that are quick to read in a test."""

from kielo.corpus.step import CorpusStep, Tally


def tally(step: CorpusStep) -> Tally:
    return Tally(step.name, step.detail, step.counts, step.examples)


def counted(step: CorpusStep, source: str | None = None) -> dict[str, int]:
    """Returns "what/reason" → number, of one source or of the whole corpus, without words."""
    of = tally(step) if source is None else tally(step).of(source)
    total = of.total().items()
    return {f"{what}/{reason}": n for (what, reason), n in total if not what.startswith("spaced_words")}
