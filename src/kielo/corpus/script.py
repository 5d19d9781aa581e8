"""The script filter: drops lines with too many letters that the language is not written with.

Language card (script, letters) and the recipe's share -> lines left. Digits, punctuation and symbols are no
letters.
"""

from collections.abc import Sequence

import regex

from kielo.corpus.split import SplitDocument
from kielo.corpus.steps import LineFilter
from kielo.recipe.errors import KieloError


class ScriptFilter(LineFilter):
    """A line goes when more than `max_foreign_share` of its letters are foreign.

    A letter is at home when it belongs to one of the Unicode `scripts` or is among the card's `letters`:
    whole scripts, since names and loan words bring letters that a language's own alphabet lacks.
    """

    name = "script"

    def __init__(self, scripts: Sequence[str], letters: str, max_foreign_share: float):
        super().__init__()
        self.scripts = tuple(scripts)
        self.letters = letters
        self.max_foreign_share = max_foreign_share
        self.foreign: regex.Pattern | None = None
        self.latin_is_home = "Latin" in self.scripts

    def start(self) -> None:
        self.foreign = foreign_letters(self.scripts, self.letters)

    def judge(self, document: SplitDocument) -> list[str | None]:
        return [self._judge_line(line) for line in document.lines]

    def _judge_line(self, line: str) -> str | None:
        if self.latin_is_home and line.isascii():
            return None
        num_foreign = len(self.foreign.findall(line))
        if num_foreign and num_foreign > self.max_foreign_share * sum(map(str.isalpha, line)):
            return "letters of another script"
        return None


def foreign_letters(scripts: Sequence[str], letters: str) -> regex.Pattern:
    """A pattern for one letter that is outside the scripts and the given letters (of either case)."""
    home = "".join(rf"\p{{Script={script}}}" for script in (*scripts, "Common", "Inherited"))
    both_cases = "".join(sorted(set(letters.lower() + letters.upper())))
    try:
        return regex.compile(rf"[\p{{L}}--[{home}{regex.escape(both_cases)}]]", regex.V1)
    except regex.error:
        raise KieloError(
            f"language card: script {', '.join(scripts)} has a name that Unicode does not know; "
            "it knows Latin, Cyrillic, Greek, …"
        ) from None
