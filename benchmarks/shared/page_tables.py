"""Writes tables into pages that people wrote around them."""

import re
from pathlib import Path


def put_tables(page: Path, found: dict[str, str]) -> None:
    """Writes each table between `<!-- NAME -->` and `<!-- end -->`. Raises ValueError without them."""
    content = page.read_text(encoding="utf-8")
    for name, table in found.items():
        place = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        content, places = place.subn(lambda match, table=table: f"{match[1]}{table}\n{match[2]}", content)
        if not places:
            raise ValueError(f"{page} has no <!-- {name} -->")
    page.write_text(content, encoding="utf-8")
