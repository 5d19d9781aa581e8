"""Measures the share of a person's lines that a threshold keeps, and learns an identifier from samples."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kielo.corpus.filters import MIN_IDENTIFIED_CHARACTERS, normalise_line
from kielo.corpus.language_identification import load_identifier
from kielo.corpus.learned_identifier import LearnedIdentifier, learn
from kielo.recipe.cards import USUAL_THRESHOLD, Language
from kielo.recipe.errors import KieloError

KEPT = 0.95  # share of the own lines that a threshold should keep
STEPS = tuple(round(step * 0.05, 2) for step in range(1, 20))
# Fewer lines say little about the twentieth that a threshold may drop.
MIN_LINES, HELD_OUT = 40, 10


@dataclass(frozen=True)
class Measurement:
    """shares: threshold → (share of own lines that pass, share of the others or None without such lines)."""

    threshold: float
    shares: Mapping[float, tuple[float, float | None]]
    num_own: int
    too_short: int
    taken_for: Mapping[str, float]
    min_characters: int = MIN_IDENTIFIED_CHARACTERS


def measure(card: Language, identifier: str, lines: Iterable[tuple[str, str]]) -> Measurement:
    """Measure on (code, text). The threshold keeps KEPT of the own lines, and is at most 0.5.

    With lines of other languages it is the threshold with the largest difference of both shares.
    """
    codes = card.codes_of(identifier)
    model = load_identifier(identifier)
    if not model.codes().intersection(codes):
        raise KieloError(f"{identifier} does not know {card.name}. Fix: {card.other_identifiers()}")
    own: list[float] = []
    others: list[float] = []
    best, too_short = Counter[str](), 0
    for code, text in lines:
        if len(line := normalise_line(text)) < MIN_IDENTIFIED_CHARACTERS:
            too_short += 1
            continue
        said = model.probabilities(line)
        probability = sum(said.get(one, 0.0) for one in codes)
        (own if code == card.code else others).append(probability)
        if code == card.code and (first := max(said, key=said.__getitem__, default="?")) not in codes:
            best[first] += 1
    if len(own) < MIN_LINES:
        raise KieloError(
            f"{len(own)} lines in {card.code!r} of {MIN_IDENTIFIED_CHARACTERS} characters or more say too "
            f"little. Fix: {MIN_LINES} or more"
        )
    shares = {at: (_passing(own, at), _passing(others, at) if others else None) for at in STEPS}
    if others:
        threshold = max(STEPS, key=lambda at: (shares[at][0] - (shares[at][1] or 0.0), -at))
    else:
        enough = [at for at in STEPS if at <= USUAL_THRESHOLD and shares[at][0] >= KEPT]
        threshold = max(enough, default=STEPS[0])
    taken_for = {code: number / len(own) for code, number in best.most_common(3)}
    return Measurement(threshold, shares, len(own), too_short, taken_for)


def _passing(probabilities: Sequence[float], threshold: float) -> float:
    return sum(one >= threshold for one in probabilities) / len(probabilities)


def learn_from(
    samples: Mapping[str, Sequence[str]],
) -> tuple[LearnedIdentifier, dict[str, tuple[int, float, str]]]:
    """Learn from code → lines, and test on each tenth line an identifier that was learned from the others.

    Return the identifier, and code → (held-out lines, share that is right, the code most of the rest got).
    """
    if len(samples) < 2:
        raise KieloError(
            f"{len(samples)} samples: no other language to distinguish. Fix: --sample CODE=FILE for each "
            "language that its text is mixed with, too"
        )
    lines = {
        code: list(
            dict.fromkeys(
                line for one in given if len(line := normalise_line(one)) >= MIN_IDENTIFIED_CHARACTERS
            )
        )
        for code, given in samples.items()
    }
    for code, own in lines.items():
        if len(own) < MIN_LINES:
            raise KieloError(
                f"--sample {code}: {len(own)} different lines of {MIN_IDENTIFIED_CHARACTERS} characters or "
                f"more. Fix: {MIN_LINES} or more"
            )
    trial = learn({code: [one for at, one in enumerate(own) if at % HELD_OUT] for code, own in lines.items()})
    found = {}
    for code, own in lines.items():
        held_out = own[::HELD_OUT]
        said = Counter(max(p, key=p.__getitem__, default="?") for p in map(trial.probabilities, held_out))
        right = said.pop(code, 0)
        found[code] = len(held_out), right / len(held_out), next(iter(dict(said.most_common(1))), "")
    return learn(lines), found
