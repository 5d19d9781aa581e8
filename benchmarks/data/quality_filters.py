"""Quality filters beside datatrove's own, on the same documents: verdicts, and MB/s on one core.

    kielo run demo_estonian --to corpus
    python benchmarks/data/quality_filters.py runs/demo_estonian/corpus/documents --language et

Needs spaCy, by which datatrove finds words (`make bench-peers`). Each document is judged as it is and damaged
(lines and words repeated, cut into lists, numbers in place of words), so that each rule has something to
drop. Writes results/quality_filters.json. Bars: the same verdict for datatrove's words on all documents, for
our words on 99 %, and 4 MB/s, at least 15 times datatrove's.
"""

import argparse
import json
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter
from datatrove.utils.text import split_into_words

from kielo.artifact.documents import read_documents
from kielo.corpus.quality import QualityFilter
from kielo.corpus.step import cut_tokens
from kielo.recipe.quality_limits import QualityLimits, limits_of

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from machine import processor

RESULTS = Path(__file__).resolve().parents[1] / "results" / "quality_filters.json"
TURNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("documents", type=Path)
    parser.add_argument("--language", default="et")
    options = parser.parse_args()
    limits = limits_of([options.language])
    whole = [one["text"] for path in sorted(options.documents.iterdir()) for one in read_documents(path)]
    texts = whole + damaged(whole)
    size = sum(len(text.encode()) for text in texts)
    step, theirs = QualityFilter(limits), datatrove_verdict(limits)

    def ours(text: str) -> str | None:
        return step.verdict(text, cut_tokens(text))

    def ours_by_their_words(text: str) -> str | None:
        return step.verdict(text, split_into_words(text, limits.name))

    theirs(texts[0])  # loads spaCy
    seconds, verdicts = best(theirs, texts, 1)
    own_seconds, own = best(ours, texts, TURNS)
    by_their_words = [ours_by_their_words(text) for text in texts]
    pairs = Counter(zip(own, verdicts, strict=True))
    found = {
        "date": date.today().isoformat(),
        "processor": processor(),
        "python": platform.python_version(),
        "datatrove": version("datatrove"),
        "spacy": version("spacy"),
        "language": options.language,
        "documents": len(texts),
        "megabytes": round(size / 1e6, 2),
        "megabytes_per_second": round(size / 1e6 / own_seconds, 2),
        "times_datatrove": round(seconds / own_seconds, 1),
        "same_verdict_for_their_words": share_alike(by_their_words, verdicts),
        "same_verdict_for_own_words": share_alike(own, verdicts),
        "differences_for_own_words": {
            f"{ours or 'kept'} | {theirs or 'kept'}": number
            for (ours, theirs), number in pairs.most_common()
            if (ours is None) != (theirs is None)
        },
    }
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1, ensure_ascii=False))


def damaged(texts: Sequence[str]) -> list[str]:
    drawn, found = random.Random(1), []
    for text in texts:
        lines, words, kind = text.split("\n"), text.split(), drawn.randrange(6)
        place, length = drawn.randrange(len(words)), drawn.randrange(2, 12)
        loop = " ".join(words[place : place + length]) + " "
        found.append(
            (
                "\n".join(lines + lines[: len(lines) // 2]),
                text + "\n" + loop * drawn.randrange(2, 20),
                "\n".join(" ".join(words[start : start + 3]) for start in range(0, len(words), 3)),
                "\n".join(f"- {line}..." for line in lines),
                " ".join(str(drawn.randrange(999)) if drawn.random() < 0.4 else word for word in words),
                "".join(letter for letter in text if letter not in ".!?:"),
            )[kind]
        )
    return found


def datatrove_verdict(limits: QualityLimits) -> Callable[[str], str | None]:
    """Return datatrove's three filters as FineWeb2's pipeline has them."""
    filters = [
        GopherRepetitionFilter(
            dup_para_frac=0,
            dup_line_char_frac=0,
            dup_para_char_frac=0,
            dup_line_frac=limits.max_repeated_lines,
            top_n_grams=list(zip((2, 3, 4), limits.max_top_ngram, strict=True)),
            dup_n_grams=list(zip(range(5, 11), limits.max_repeated_ngrams, strict=True)),
            language=limits.name,
        ),
        FineWebQualityFilter(
            short_line_thr=999,
            char_duplicates_ratio=limits.max_repeated_line_characters,
            line_punct_thr=limits.min_ended_lines,
            new_line_ratio=limits.max_line_ends_per_word,
            language=limits.name,
        ),
        GopherQualityFilter(
            max_avg_word_length=limits.max_mean_word_length,
            min_avg_word_length=limits.min_mean_word_length,
            stop_words=list(limits.stop_words),
            max_non_alpha_words_ratio=limits.min_words_with_letters,
            language=limits.name,
        ),
    ]

    def verdict(text: str) -> str | None:
        results = (one.filter(Document(text=text, id="a")) for one in filters)
        return next((result[1] for result in results if result is not True), None)

    return verdict


def best(
    judge: Callable[[str], str | None], texts: Sequence[str], turns: int
) -> tuple[float, list[str | None]]:
    """Return the fewest processor seconds of some turns, and the verdicts."""
    seconds = []
    for _ in range(turns):
        begun = time.process_time()
        verdicts = [judge(text) for text in texts]
        seconds.append(time.process_time() - begun)
    return min(seconds), verdicts


def share_alike(ours: Sequence[str | None], theirs: Sequence[str | None]) -> float:
    alike = sum((one is None) == (other is None) for one, other in zip(ours, theirs, strict=True))
    return round(alike / len(ours), 4)


if __name__ == "__main__":
    main()
