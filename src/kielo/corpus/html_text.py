"""Text of an HTML page: one line a block element, without elements that are not prose.

A page that marks its article with <div id="DisplayArea"> (LibreOffice's help does) gives that alone, else
its body. HTML text -> plain text.
"""

from html.parser import HTMLParser

ARTICLE_ID = "DisplayArea"
SKIPPED = frozenset({"script", "style", "pre", "nav", "template", "noscript", "svg", "head"})
# Prose within a sentence; a block that holds nothing else is a listing, or what one presses.
ASIDE = frozenset({"code", "button"})
# fmt: off
BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "body", "br", "caption", "dd", "details", "div", "dl",
    "dt", "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6",
    "header", "hr", "legend", "li", "main", "ol", "option", "p", "section", "summary", "table", "tbody",
    "td", "tfoot", "th", "thead", "title", "tr", "ul",
})
# fmt: on


def page_text(html: str) -> str:
    """Returns the page's text, a line for each block, white space as single spaces.

    An element that is skipped and has no end is not skipped: it would take the rest of the page with it.
    """
    page = _read(html, frozenset())
    # What a script or a style holds is no text, whether it ends or not.
    open_ = {place for tag, place in page.open_skipped if tag not in ("script", "style")}
    if open_:
        page = _read(html, frozenset(open_))
    return "\n".join(page.article if page.has_article else page.body)


def _read(html: str, taken: frozenset[tuple[int, int]]) -> "_Page":
    """Reads a page. taken: lines and columns of elements that are not skipped."""
    page = _Page(taken)
    page.feed(html)
    page.close()
    page.end_line()
    return page


class _Page(HTMLParser):
    def __init__(self, taken: frozenset[tuple[int, int]]) -> None:
        super().__init__(convert_charrefs=True)
        self.body: list[str] = []
        self.article: list[str] = []
        self.has_article = False
        self.open_skipped: list[tuple[str, tuple[int, int]]] = []
        self._taken = taken
        self._open_aside: list[str] = []
        self._has_prose = False
        self._article_divs = 0
        self._parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":
            # Whatever was left open in the head must not swallow the page.
            self.open_skipped.clear()
        if tag in SKIPPED and self.getpos() not in self._taken:
            self.open_skipped.append((tag, self.getpos()))
        if tag in ASIDE:
            self._open_aside.append(tag)
        if tag in BLOCKS:
            self.end_line()
        if tag == "div" and (self._article_divs or dict(attrs).get("id") == ARTICLE_ID):
            self._article_divs += 1
            self.has_article = True

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in BLOCKS:
            self.end_line()

    def handle_endtag(self, tag: str) -> None:
        tags = [name for name, _ in self.open_skipped]
        if tag in tags:
            # A skipped element also ends those left open inside it.
            del self.open_skipped[tags.index(tag) :]
        if tag in self._open_aside:
            del self._open_aside[self._open_aside.index(tag) :]
        if tag in BLOCKS:
            self.end_line()
        if tag == "div" and self._article_divs:
            self._article_divs -= 1

    def handle_data(self, data: str) -> None:
        if not self.open_skipped:
            self._parts.append(data)
            self._has_prose = self._has_prose or not self._open_aside and not data.isspace()

    def end_line(self) -> None:
        line = " ".join("".join(self._parts).split()) if self._has_prose else ""
        self._parts.clear()
        self._open_aside.clear()  # one without an end ends with its block
        self._has_prose = False
        if line:
            (self.article if self._article_divs else self.body).append(line)
