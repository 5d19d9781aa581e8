"""Length filters: lines and documents too short to teach anything or to be identified. Counted in
characters."""

from kielo.corpus.split import SplitDocument
from kielo.corpus.steps import DocumentFilter, LineFilter


class LineLength(LineFilter):
    name = "line length"

    def __init__(self, min_characters: int):
        super().__init__()
        self.min_characters = min_characters

    def judge(self, document: SplitDocument) -> list[str | None]:
        reason = f"under {self.min_characters} characters"
        return [reason if len(line) < self.min_characters else None for line in document.lines]


class DocumentLength(DocumentFilter):
    name = "document length"

    def __init__(self, min_characters: int):
        super().__init__()
        self.min_characters = min_characters

    def judge(self, document: SplitDocument) -> str | None:
        # Characters of the joined text: the lines and the line ends between them.
        num_characters = sum(map(len, document.lines)) + len(document.lines) - 1
        return f"under {self.min_characters} characters" if num_characters < self.min_characters else None
