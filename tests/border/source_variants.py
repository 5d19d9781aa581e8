"""Odd but real sources of text: each kind is read here and by an independent reader, or refused by name.

A kind is an entry of a table `KINDS` in tests/border/test_texts_*.py. Its statement: each document of the
source is in the corpus as the independent reader has it, or counted under a reason; or the source is refused.
"""

import io
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kielo.artifact.documents import read_documents
from kielo.artifact.stage_counts import Funnel
from kielo.artifact.stage_json import read_json
from kielo.corpus.corpus_stage import run_corpus
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus, Recipe


@dataclass(frozen=True)
class Kind:
    """One kind of source.

    write: makes its files in an empty folder. expected: reads the folder independently of Kielo; its texts in
    any order; None where the source is refused, with the words of `refusal`. keys: of the source, besides
    `path`, which is the folder. corpus: keys of [corpus]. reasons: reason → documents that are counted under
    it and are not in the corpus.
    """

    write: Callable[[Path], Any]
    expected: Callable[[Path], list[str]] | None
    refusal: tuple[str, ...] = ()
    keys: dict[str, Any] = field(default_factory=dict)
    corpus: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    said: tuple[str, ...] = ()


def check(kind: Kind, folder: Path) -> None:
    """Asserts the statement of a kind, in an empty folder."""
    (text := folder / "text").mkdir()
    kind.write(text)
    source = {"name": "odd", "path": str(text), "clean": False} | kind.keys
    keys = {"sources": [source], "workers": 1, "deduplicate_documents": False} | kind.corpus
    screen = io.StringIO()
    try:
        recipe = Recipe(name="trial", language="et", corpus=Corpus(**keys))
        with redirect_stderr(screen):
            counts = run_corpus(recipe, folder / "corpus", folder / "raw").counts
    except KieloError as problem:
        assert kind.expected is None, problem
        missing = [words for words in kind.refusal if words not in str(problem)]
        assert not missing and kind.refusal, f"{missing} not in: {problem}"
        return
    assert kind.expected is not None, "it was not refused"
    texts = Counter(document["text"] for document in read_documents(folder / "corpus" / "documents"))
    expected = Counter(kind.expected(text))
    assert texts == expected, {"lost": expected - texts, "other": texts - expected}
    dropped = {
        row.reason: row.documents for row in read_json(folder / "corpus", Funnel).steps if row.documents
    }
    assert dropped == kind.reasons
    assert counts["documents_in"] == counts["documents_kept"] + sum(kind.reasons.values())
    assert not [words for words in kind.said if words not in screen.getvalue()], screen.getvalue()
