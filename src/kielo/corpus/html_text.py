"""Text of an HTML page: one line a block element, without elements that are not prose.

A page that marks its article with <div id="DisplayArea"> (LibreOffice's help does) gives that alone, else
its body. HTML text -> plain text.
"""

from html.parser import HTMLParser

ARTICLE_ID = "DisplayArea"
SKIPPED = frozenset(
    {"script", "style", "pre", "code", "nav", "button", "template", "noscript", "svg", "head"}
)
# fmt: off
BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "body", "br", "caption", "dd", "details", "div", "dl",
    "dt", "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6",
    "header", "hr", "legend", "li", "main", "ol", "option", "p", "section", "summary", "table", "tbody",
    "td", "tfoot", "th", "thead", "title", "tr", "ul",
})
# fmt: on


def page_text(html: str) -> str:
    """Returns the page's text, a line for each block, white space as single spaces."""
    page = _Page()
    page.feed(html)
    page.close()
    page.end_line()
    return "\n".join(page.article if page.has_article else page.body)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.body: list[str] = []
        self.article: list[str] = []
        self.has_article = False
        self._open_skipped: list[str] = []
        self._article_divs = 0
        self._parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":
            # Whatever was left open in the head must not swallow the page.
            self._open_skipped.clear()
        if tag in SKIPPED:
            self._open_skipped.append(tag)
        if tag in BLOCKS:
            self.end_line()
        if tag == "div" and (self._article_divs or dict(attrs).get("id") == ARTICLE_ID):
            self._article_divs += 1
            self.has_article = True

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in BLOCKS:
            self.end_line()

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open_skipped:
            # A skipped element also ends those left open inside it.
            del self._open_skipped[self._open_skipped.index(tag) :]
        if tag in BLOCKS:
            self.end_line()
        if tag == "div" and self._article_divs:
            self._article_divs -= 1

    def handle_data(self, data: str) -> None:
        if not self._open_skipped:
            self._parts.append(data)

    def end_line(self) -> None:
        line = " ".join("".join(self._parts).split())
        self._parts.clear()
        if line:
            (self.article if self._article_divs else self.body).append(line)
