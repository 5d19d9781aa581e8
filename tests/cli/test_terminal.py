"""Tables, sentences and JSON, on terminals of known width and in pipes: every character of them."""

import io
import os
import re
import subprocess
import sys

import pytest

from kielo.cli.terminal import flat, lasting_output, print_json, print_table, print_text


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch):
    """columns(n): stdout is a terminal of n columns from here on."""

    def call(number: int) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(number))

    return call


def lines(capsys: pytest.CaptureFixture) -> list[str]:
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()]


def test_a_table_in_a_pipe_has_tabs_and_is_not_cut(capsys) -> None:
    """Nothing for None; line breaks are left out; titles are left out if all are empty."""
    rows = [("a\nb", None, 3), ("x" * 3000, 0, "")]
    print_table(("", "n", ""), rows)
    assert capsys.readouterr().out == f"\tn\t\nab\t\t3\n{'x' * 3000}\t0\t\n"
    print_table(("", ""), [("a", 1)])
    assert capsys.readouterr().out == "a\t1\n"
    print_table(("a", "b"), [])
    assert capsys.readouterr().out == "a\tb\n"


def test_a_table_on_a_terminal_has_columns(capsys, columns) -> None:
    """Two blanks between; numbers are on the right, and a column that has any other cell is on the left."""
    columns(60)
    print_table(("name", "count", "mixed"), [("one", 1234, "12"), ("three", 5, "a1")])
    assert lines(capsys) == ["name   count  mixed", "one     1234  12", "three      5  a1"]
    print_table(("", ""), [("a", None), ("b\nc", 7)])
    assert lines(capsys) == ["a", "b  7", "c"]
    print_table(("name", "count"), [])
    assert lines(capsys) == ["name  count"]


def test_only_the_widest_column_gives_way_if_that_is_enough(capsys, columns) -> None:
    """It needs 20 columns: beside 30 and two gaps of two it has them from 54 on."""
    rows = [("words of thirty characters here", "long " * 20)]
    narrow = rows[0][0][:30]
    for width, is_whole in ((54, True), (53, False)):
        columns(width)
        print_table(("", ""), [(narrow, rows[0][1])])
        found = lines(capsys)
        assert found[0].startswith(narrow + "  ") == is_whole and max(map(len, found)) <= width
        assert "".join(found).count("long") == 20


def test_columns_of_the_same_width_both_give_way(capsys, columns) -> None:
    """Nothing of either is cut."""
    columns(60)
    print_table(("", ""), [("abcde " * 5, "fghij " * 5)])
    found = " ".join(lines(capsys))
    assert found.count("abcde") == found.count("fghij") == 5


def test_a_wide_table_has_long_lines(capsys, columns) -> None:
    columns(40)
    print_table(("a", "b"), [("x" * 60, "y " * 30)], is_wide=True)
    assert lines(capsys) == ["a" + " " * 61 + "b", "x" * 60 + "  " + ("y " * 30).rstrip()]
    print_table(("",), [("x" * 1001,)], is_wide=True)
    assert lines(capsys) == ["x" * 1000, "x"]


def test_sentences_break_where_the_terminal_ends(capsys, columns) -> None:
    """At blanks alone, each line for itself and below its indent; never in fewer than 20 columns."""
    columns(24)
    print_text("  one two three four five\n/a/path/that-is/longer-than/the-line and more\n\nend")
    assert capsys.readouterr().out == (
        "  one two three four\n  five\n/a/path/that-is/longer-than/the-line\nand more\n\nend\n"
    )
    columns(3)
    print_text("one two three four v end")
    assert capsys.readouterr().out == "one two three four v\nend\n"
    print_text("one two three four vi end")
    assert capsys.readouterr().out == "one two three four\nvi end\n"


def test_sentences_in_a_pipe_stay_as_they_are(capsys) -> None:
    print_text("word " * 50)
    print_text("to the other", sys.stderr)
    assert capsys.readouterr() == ("word " * 50 + "\n", "to the other\n")


def test_sentences_arrive_at_once(monkeypatch) -> None:
    """A pipe gets each before the next is written."""
    pipe = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, encoding="utf-8"))
    print_text("said")
    assert pipe.getvalue() == b"said\n"


class Stream(io.StringIO):
    def __init__(self, encoding: str | None) -> None:
        super().__init__()
        self._name = encoding

    @property
    def encoding(self) -> str | None:
        return self._name


@pytest.mark.parametrize(
    ("encoding", "letter"), [("utf-8", "õ"), ("UTF-16", "õ"), (None, "õ"), ("ascii", "\\u00f5")]
)
def test_json_has_the_letters_that_the_stream_takes(encoding, letter, monkeypatch) -> None:
    """A value that JSON lacks is its text."""
    stream = Stream(encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    print_json({"a": ["õ", io.SEEK_SET]} | {"b": b"c"})
    assert stream.getvalue() == f'{{\n "a": [\n  "{letter}",\n  0\n ],\n "b": "b\'c\'"\n}}\n'


def test_output_outlives_its_streams(monkeypatch) -> None:
    """Letters that an encoding lacks are written as numbers; a stream that fails raises nothing."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with lasting_output() as output:
        print("õ")
        print("š", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        assert sys.stdout is output and output.failure is None
        assert (out.buffer.getvalue(), err.buffer.getvalue()) == (b"\\xf5\n", b"\\u0161\n")
        out.close()
        err.close()
        print("lost", flush=True)
        print("lost", file=sys.stderr, flush=True)
    assert isinstance(output.failure, ValueError) and sys.stdout is out and sys.stderr is err


STREAMS = """
from kielo.cli.terminal import open_standard_streams
open_standard_streams()
import os, sys
print("nobody reads this")
sys.stdout.flush()
fine = all(os.readlink(f"/proc/self/fd/{number}") == os.devnull for number in (0, 1, 2))
fine = fine and (sys.stdin.readable(), sys.stdout.writable(), sys.stderr.writable()) == (True, True, True)
fine = fine and not sys.stdin.writable() and not os.path.exists("/proc/self/fd/3") and sys.stdin.read() == ""
os._exit(7 if fine else 8)
"""


def test_closed_streams_are_opened_on_nothing() -> None:
    """Each under its own number, and no other is left open; streams that are open stay."""
    closed = 'exec "$0" -c "$1" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", closed, sys.executable, STREAMS], env=os.environ).returncode == 7
    only_input = 'exec "$0" -c "$1" <&-'
    kept = STREAMS.replace("(0, 1, 2)", "(0,)")
    ended = subprocess.run(["sh", "-c", only_input, sys.executable, kept], capture_output=True)
    assert (ended.returncode, ended.stdout) == (7, b"nobody reads this\n")


def test_sections_are_flat_to_one_level() -> None:
    content = {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": {}, "g": {"h": {}}}
    assert flat(content) == [("a", 1), ("b.c", 2), ("b.d", {"e": 3}), ("f", {}), ("g.h", {})]
