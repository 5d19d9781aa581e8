"""Translation memories: each unit once, its languages by their codes, and no more memory than one unit's."""

import gc
from pathlib import Path
from xml.etree.ElementTree import Element

import pytest

from kielo.corpus.raw_record import BadRecord
from kielo.corpus.tmx import tmx_records
from kielo.recipe.errors import KieloError


def write(path: Path, units: str, body: str = "body") -> Path:
    path.write_text(
        f'<tmx version="1.4">\n<header/>\n<{body}>\n{units}\n</{body}>\n</tmx>\n', encoding="utf-8"
    )
    return path


def test_units_by_hand(tmp_path):
    """Numbered from 1, with codes in small letters; the first segment of a language, with the text of marks
    in it; a variant without a segment is none.
    """
    units = (
        '<tu><tuv xml:lang="EN-us"><seg>One <b>two</b>\nthree</seg></tuv>'
        '<tuv lang="et"><seg>Üks</seg></tuv></tu>'
        '<tu>\n<tuv xml:lang="en"><note>x</note></tuv><tuv><seg>?</seg></tuv></tu>\n'
        '<tu><tuv xml:lang="et"><seg>a</seg></tuv><tuv xml:lang="ET"><seg>b</seg></tuv>'
        '<tuv xml:lang="fi" lang="sv"><seg/></tuv></tu>'
    )
    expected = [{"en-us": "One two\nthree", "et": "Üks"}, {"": "?"}, {"et": "a", "fi": ""}]
    for body in ("body", "units"):
        path = write(tmp_path / "a.tmx", units, body)
        found = list(tmx_records(path, 1000))
        assert [record.number for record in found] == [1, 2, 3] and found[0].path == path
        assert [record.content for record in found] == expected
        assert all(record.problem is None for record in found)


def test_what_is_no_translation_memory_is_named_by_line(tmp_path):
    """A line over the limit, what is no XML, and a file that is cut short."""
    path = write(tmp_path / "a.tmx", '<tu><tuv lang="et"><seg>' + "a" * 60 + "</seg></tuv></tu>")
    longest = max(map(len, path.read_bytes().split(b"\n")))
    assert len(list(tmx_records(path, longest))) == 1
    with pytest.raises(BadRecord, match=f"line 4: longer than corpus.max_document_bytes = {longest - 1}"):
        list(tmx_records(path, longest - 1))
    with pytest.raises(KieloError, match="line 4: not valid XML"):
        list(tmx_records(write(path, "<tu></tv>"), 1000))
    path.write_bytes(write(path, "<tu></tu>").read_bytes()[:-8])
    with pytest.raises(KieloError, match="cut short or not XML"):
        list(tmx_records(path, 1000))


def test_units_that_were_read_are_not_held(tmp_path):
    """Of fifty units of three elements on lines of their own no more than two are there at the last one."""

    def elements() -> int:
        return sum(type(one) is Element for one in gc.get_objects())

    path = write(tmp_path / "a.tmx", '<tu><tuv lang="et"><seg>a</seg></tuv></tu>\n' * 50)
    before, records = elements(), tmx_records(path, 1000)
    assert sum(1 for _ in zip(range(49), records)) == 49
    assert elements() - before <= 4 * 2 + 3
