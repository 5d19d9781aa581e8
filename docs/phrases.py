"""Find phrases that this project replaces by plain words, in messages, docstrings and pages: `make lint`.

    python docs/phrases.py                   # the whole package and all hand-written pages
    python docs/phrases.py src/kielo/plan    # files or folders
    python docs/phrases.py --counts          # hits by phrase and by room

The rules behind the list are in CONTRIBUTING.md.
"""

import argparse
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_HAND_WRITTEN = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs"]
# A generated page, whose text is read in the package, and this list.
_LEFT_OUT = {"recipe.md", "phrases.py"}
# Since Python 3.12 the text of an f-string is a token of its own.
_IN_F_STRING = getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)

# What to avoid (a regular expression, read without regard to case) → what to write.
PHRASES = {
    r"what would work": "Fix: and one command or value",
    r"\bso (?:many|long|often)\b(?! (?:as|that)\b)": "N steps, at most N times",
    r"\b(?:the|that|this|each|every|another|which|first|last|new|old|other|next) ones?\b"
    r"(?! (?:of|process|rank|step|node|GPU|file|sequence|line)\b)": "the noun",
    r"\b(?:that|those) of\b": "the noun",
    r"\b(?:is|are|be|was|were) told\b": "the log reports, the message names",
    r"\b(?:goes|go|going|went|gone) on\b": "continue, resume",
    r"\b(?:comes?|came|coming) again\b": "recur",
    r"\b(?:gets?|got|getting) on\b": "make progress",
    r"\b(?:be|is|are) others\b": "differ",
    r"\banew\b": "again, rebuild",
    r"\bwhere (?:it|they|there|this|these|none|no|nothing|both|all|one|any|not)\b": "if",
    r"\bmay not\b": "must not, cannot",
    r"\bwhat is (?:there|not|left|new|read|kept|written)\b": "the noun",
    r"\bas far as (?:it|they)\b": "a shorter sentence",
}


def main() -> None:
    """Print each hit with its file, line and the words to write instead; exit 1 if there is one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders (default: all)")
    parser.add_argument("--counts", action="store_true", help="hits by phrase and by room only")
    asked = parser.parse_args()
    paths = asked.paths or [_ROOT / "src" / "kielo", *(_ROOT / name for name in _HAND_WRITTEN)]
    found = [
        (path, line + above, match, plain)
        for path in files(paths)
        for line, text in texts(path)
        for above, match, plain in hits(text)
    ]
    if asked.counts:
        for title, by in (("phrase", lambda hit: hit[2].lower()), ("folder", lambda hit: str(hit[0].parent))):
            print(
                f"{title:>7}",
                *(f"{count:>7}  {name}" for name, count in Counter(map(by, found)).most_common()),
                sep="\n",
            )
    else:
        for path, line, match, plain in found:
            print(f"{path}:{line}: '{match}'. Fix: {plain}")
    sys.exit(1 if found else 0)


def files(paths: list[Path]) -> Iterator[Path]:
    """Yield the sources, recipes and hand-written pages among paths and below folders, in order."""
    for path in paths:
        below = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in below:
            if file.suffix in (".py", ".toml", ".md") and file.name not in _LEFT_OUT:
                yield file


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of what a person reads in a file: strings and comments of Python, all of a page."""
    if path.suffix != ".py":
        lines = path.read_text(encoding="utf-8").splitlines()
        # Rows of generated tables have names of tests.
        yield 1, "\n".join("" if "`test_" in line else line for line in lines)
        return
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.STRING, _IN_F_STRING, tokenize.COMMENT):
                yield token.start[0], token.string


def hits(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (lines above it, phrase, words to write instead) for each hit in a text, also across lines."""
    for phrase, plain in PHRASES.items():
        for match in re.finditer(phrase.replace(" ", r"\s+"), text, re.IGNORECASE):
            yield text.count("\n", 0, match.start()), " ".join(match[0].split()), plain


if __name__ == "__main__":
    main()
