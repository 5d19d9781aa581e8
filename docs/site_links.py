"""A hook of mkdocs (mkdocs.yml): the pages of the repository, as they are, become the pages of the site.

README.md is the first page. A file outside docs/ that a page links to is in the site as repository/PATH. The
notes after the kind of a code block (tests/docs/blocks.py), which no highlighter knows, are left out.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
FIRST = "index.md"
OUTSIDE = "repository/"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
NOTE = re.compile(r"^( *```\w+) .*$", re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md, and each file outside docs/ that a page of the site links to."""
    files.append(File.generated(config, FIRST, content=(ROOT / "README.md").read_text("utf-8")))
    pages = [file for file in files if file.src_uri.endswith(".md")]
    for page in pages:  # it grows: pages outside link to others
        for _, _, target, _ in LINK.findall(page.content_string):
            path, uri = _linked(page.src_uri, target)
            if uri.startswith(OUTSIDE) and path.is_file() and files.get_file_from_path(uri) is None:
                # Its own level keeps a page that only links lead to out of the warnings on the navigation.
                level = InclusionLevel.UNDEFINED if uri in str(config.nav) else InclusionLevel.NOT_IN_NAV
                files.append(File.generated(config, uri, abs_src_path=str(path), inclusion=level))
                if uri.endswith(".md"):
                    pages.append(files.get_file_from_path(uri))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links of the site. A link to a folder, which has no page, becomes its words."""

    def link(found: re.Match[str]) -> str:
        mark, words, target, anchor = found.groups()
        path, uri = _linked(page.file.src_uri, target)
        if path.is_dir():
            return words
        place = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        return f"{mark}[{words}]({place}{anchor or ''})"

    return NOTE.sub(r"\1", LINK.sub(link, markdown))


def _linked(page_uri: str, target: str) -> tuple[Path, str]:
    """Return the file in the repository that a page links to, and its name in the site."""
    own = "README.md" if page_uri == FIRST else page_uri.removeprefix(OUTSIDE)
    if own == page_uri:
        own = f"docs/{page_uri}"
    path = posixpath.normpath(posixpath.join(posixpath.dirname(own), target))
    uri = FIRST if path == "README.md" else path.removeprefix("docs/")
    return ROOT / path, uri if uri != path or path == FIRST else OUTSIDE + path
