"""Translation memories: each unit once, its languages by their codes, and no more memory than one unit's."""

import gc
from pathlib import Path
from xml.etree.ElementTree import Element

import pytest

from kielo.artifact.text_files import READ_BYTES
from kielo.corpus.pair_formats import tmx_records
from kielo.corpus.raw_record import BadRecord
from kielo.recipe.errors import KieloError

LANGUAGES = ("en", "et")


def write(path: Path, units: str, body: str = "body") -> Path:
    path.write_text(
        f'<tmx version="1.4">\n<header/>\n<{body}>\n{units}\n</{body}>\n</tmx>\n', encoding="utf-8"
    )
    return path


def test_units_by_hand(tmp_path):
    """Numbered from 1, in the two languages, also of a region; a text in each of several records.

    Codes are no text, other marks are; a variant without a segment is none.
    """
    units = (
        '<tu><tuv xml:lang="EN-us"><seg>One <b>two</b>\nthree</seg></tuv>'
        '<tuv lang="et"><seg>Üks<ph>{\\b <sub>joonis</sub>}</ph> kaks<ph type="lb"/>kolm</seg></tuv></tu>'
        '<tu>\n<tuv xml:lang="en"><note>x</note></tuv><tuv><seg>?</seg></tuv></tu>\n'
        '<tu><tuv xml:lang="et"><seg>a</seg></tuv><tuv xml:lang="ET"><seg>b</seg></tuv>'
        '<tuv xml:lang="en_GB" lang="sv"><seg/></tuv></tu>'
    )
    expected = [("One two\nthree", "Üks kaks kolm"), None, ("", "a"), ("", "b")]
    for body in ("body", "units"):
        path = write(tmp_path / "a.tmx", units, body)
        found = list(tmx_records(path, ("EN", "et"), 1000))
        assert [record.number for record in found] == [1, 2, 3, 3] and found[0].path == path
        assert [record.content for record in found] == expected
        assert [record.problem is None for record in found] == [True, False, True, True]
        assert found[1].problem.reason == "a pair without one of its sides"
        assert "a.tmx, unit 2: no text in 'EN' (its languages are none). Fix: " in str(found[1].problem)

    unit = '<tu><tuv xml:lang="en"><seg>a</seg></tuv><tuv xml:lang="et"><seg>õõ</seg></tuv></tu>'
    path = write(tmp_path / "b.tmx", unit)  # four bytes, two characters
    fits = [one.problem is None for limit in (3, 4) for one in tmx_records(path, ("en", "et"), limit)]
    assert fits == [False, True]


def test_a_language_and_its_regions(tmp_path):
    """A language's own texts come before those of its regions; so does no code that only begins alike."""
    variants = {"en-us": "a", "en": "b", "et_ee": "õ", "ete": "x"}
    units = "".join(f'<tuv xml:lang="{code}"><seg>{text}</seg></tuv>' for code, text in variants.items())
    path = write(tmp_path / "a.tmx", f"<tu>{units}</tu>")

    def of(languages, limit=1000):
        (only,) = tmx_records(path, languages, limit)
        return only.content or only.problem.reason

    assert of(("EN", "et")) == ("b", "õ") and of(("en-US", "ete")) == ("a", "x")
    assert of(("en", "et"), 2) == ("b", "õ") and of(("en", "et"), 1) == "over max_document_bytes"
    assert of(("en", "e")) == "a pair without one of its sides"


def test_what_is_no_translation_memory_is_named_by_line(tmp_path):
    """A unit over the limit, what is no XML, and a file that is cut short."""
    path = write(tmp_path / "a.tmx", '<tu><tuv lang="et"><seg>' + "a" * 600_000 + "</seg></tuv></tu>")
    assert len(list(tmx_records(path, LANGUAGES, 700_000))) == 1
    with pytest.raises(BadRecord, match="unit 1: longer than corpus.max_document_bytes = 1000"):
        list(tmx_records(path, LANGUAGES, 1000))
    with pytest.raises(KieloError, match="line 4: not valid XML"):
        list(tmx_records(write(path, "<tu></tv>"), LANGUAGES, 1000))
    path.write_bytes(write(path, "<tu></tu>").read_bytes()[:-8])
    with pytest.raises(KieloError, match="cut short or no XML"):
        list(tmx_records(path, LANGUAGES, 1000))


def test_units_that_were_read_are_not_held(tmp_path):
    """Of units of two megabytes no more are there at once than a block of the file has."""

    def elements() -> int:
        return sum(type(one) is Element for one in gc.get_objects())

    unit = '<tu><tuv lang="et"><seg>' + "a" * 10_000 + "</seg></tuv></tu>\n"
    path = write(tmp_path / "a.tmx", unit * 200)
    before, records = elements(), tmx_records(path, LANGUAGES, 100_000)
    assert sum(1 for _ in zip(range(199), records)) == 199
    assert elements() - before <= 3 * (2 * READ_BYTES // 10_000)
