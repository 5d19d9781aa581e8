"""Records and their texts at the borders of each format: what is read, what is bad, and how it is named."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from kielo.corpus import raw_formats
from kielo.corpus.corpus_parts import Part, PartLimits
from kielo.corpus.pipeline import ReadPart
from kielo.corpus.raw_formats import RawSource, column_path, file_format, formats, is_readable, records
from kielo.corpus.raw_record import BadRecord, Record
from kielo.corpus.raw_texts import parse
from kielo.recipe.errors import KieloError
from tests.corpus.counted import counted, tally


def source(folder: Path, *files: str, **changes) -> RawSource:
    values = {
        "name": "s", "root": str(folder), "files": files, "stamps": (), "kind": "text", "is_cleaned": True,
        "documents": "lines", "text_fields": ("text",), "max_documents": None, "origin": "o",
        "fingerprint": "f",
    }  # fmt: skip
    return RawSource(**values | changes)


def of(path: Path, content, kind="text", number=3, fields=("text",), limit=1000):
    """The text of a record; `content` as its format has it."""
    made = source(path.parent, path.name, kind=kind, text_fields=fields)
    return parse(Record(path, number, content), made, limit)


def bad(reason: str, words: str, *arguments, **keys) -> None:
    with pytest.raises(BadRecord, match=words) as refusal:
        of(*arguments, **keys)
    assert refusal.value.reason == reason


def test_files_by_their_names():
    """What is read of each kind of source, and the format that a name says."""
    names = ("a.txt", "a.TXT.gz", "a.jsonl.zst", "a.parquet", "a.html", "a.htm", "a.tsv", "a.tmx.gz", "a.py",
             "a.txt.bz2", ".a.txt", "atxt", "a.jsonl.py", "a.parquet.gz")  # fmt: skip
    read = {kind: [name for name in names if is_readable(Path("x") / name, kind)] for kind in
            ("text", "parallel", "code", "instructions")}  # fmt: skip
    tables = ["a.jsonl.zst", "a.parquet"]
    assert read == {
        "text": ["a.txt", "a.TXT.gz", *tables, "a.html", "a.htm", "a.txt.bz2"],
        "parallel": [*tables, "a.tsv", "a.tmx.gz"],
        "code": [*tables, "a.html", "a.htm", "a.py", "a.jsonl.py"],
        "instructions": tables,
    }
    found = [file_format(Path(name), "text") for name in ("a.HTM", "a.b.TXT.GZ", "a.jsonl.zst", "a.html")]
    assert found == ["html", "txt", "jsonl", "html"]
    assert [file_format(Path(name), "code") for name in ("a.html", "a.jsonl.gz")] == ["code", "jsonl"]
    told = [formats(kind) for kind in ("text", "code", "parallel", "instructions")]
    assert [".txt" in one for one in told] == [True, False, False, False]
    assert ".py" in told[1] and ".tmx" in told[2] and told[3].startswith(".jsonl")


def test_columns_of_a_source():
    """Those of the text's fields; conversations are in the first one that is there."""
    pair = source(Path("x"), kind="parallel", text_fields=("t.en", "t.et"))
    assert pair.columns_of(["x"]) == ("t.en", "t.et") and pair.facts_in(["url", "path"]) == []
    assert column_path("t.en", ["t"]) == ["t", "en"] and column_path("t.en", ["t", "t.en"]) == ["t.en"]
    chats = source(Path("x"), kind="instructions", text_fields=("messages", "conversations"))
    assert chats.columns_of(["conversations", "messages"]) == ("messages",)
    assert chats.columns_of(["conversations"]) == ("conversations",) and chats.columns_of([]) == ("messages",)
    assert source(Path("x"), kind="code").facts_in(["content", "path"]) == ["path"]


@pytest.mark.parametrize("documents", ["paragraphs", "files"])
def test_documents_of_lines_by_hand(tmp_path, documents):
    """Numbered by their first line; line ends count one byte each; at the limit whole, one byte more is bad,
    and so is a document with a line over it.
    """
    text = "\n \n ab\r\ncd\n\n\nef\n"
    (tmp_path / "a.txt").write_bytes(text.encode())

    def read(limit):
        found = list(records(source(tmp_path, "a.txt", documents=documents), limit))
        return [(record.number, record.content or record.problem.reason) for record in found]

    if documents == "paragraphs":
        whole = [(3, b" ab\ncd"), (7, b"ef")]  # 4 + 3 bytes and 3
        assert read(99) == read(7) == whole and read(6) == [(3, "over max_document_bytes"), (7, b"ef")]
        assert read(2) == [(3, "over max_document_bytes"), (7, "over max_document_bytes")]
    else:
        assert read(99) == read(12) == [(3, b" ab\ncd\n\n\nef")]  # 4 + 3 + 1 + 1 + 3
        assert read(11) == read(2) == [(3, "over max_document_bytes")]
    (tmp_path / "a.txt").write_bytes(b"\n\n")
    assert read(9) == []


def test_lines_of_a_file(tmp_path):
    """Empty lines are none, and keep their numbers; a line over the limit is bad with its number."""
    (tmp_path / "a.txt").write_bytes(b"abc\n\n  \nabcd\nx")
    (tmp_path / "b.txt").write_bytes(b"y\n")
    found = list(records(source(tmp_path, "a.txt", "b.txt"), 3))
    assert [(one.path.name, one.number, one.content) for one in found] == [
        ("a.txt", 1, b"abc"), ("a.txt", 4, None), ("a.txt", 5, b"x"), ("b.txt", 1, b"y")
    ]  # fmt: skip
    assert "a.txt, line 4: longer than corpus.max_document_bytes = 3" in str(found[1].problem)
    with pytest.raises(KieloError, match="c.txt: cannot be read .No such file.* any more.*the same command"):
        list(records(source(tmp_path, "c.txt"), 3))
    (tmp_path / "d.html").write_text("x")
    (page,) = records(source(tmp_path, "d.html"), 3)
    assert (page.number, page.content, page.problem) == (1, None, None)


def test_elements_of_an_array_at_the_limit(tmp_path):
    """An element of the limit is whole, one byte more is bad with its number, as lines of .jsonl are."""
    whole, long = '{"text":"õ"}', '{"text":"õõ"}'
    (tmp_path / "a.json").write_text(f"[{whole},{long},\n{whole}]", encoding="utf-8")
    found = list(records(source(tmp_path, "a.json"), len(whole.encode())))
    assert [(one.number, one.content) for one in found] == [
        (1, whole.encode()),
        (2, None),
        (3, whole.encode()),
    ]
    assert found[1].problem.reason == "over max_document_bytes" and "element 2: longer" in str(
        found[1].problem
    )


@pytest.mark.parametrize("form", ["[{}]", "{}"])
@pytest.mark.parametrize("shift", range(9))
def test_an_element_that_is_read_in_several_blocks_may_be_too_long(tmp_path, form, shift):
    """It is bad, and the others are read, as json reads them. Blocks may end inside of an escape."""
    odd = r'a\\"]}[{ \"\\' * (1 << 17)
    values = [{"text": "õ"}, {"text": odd, "more": [{"n": 1}]}, odd, [[odd], odd], {"text": "üks"}, ["\\", 7]]
    between = ", \n" if form == "[{}]" else "\n"
    whole = form.format(between.join(json.dumps(value, ensure_ascii=False) for value in values))
    (tmp_path / "a.json").write_text(" " * shift + whole, encoding="utf-8")
    found = list(records(source(tmp_path, "a.json"), 1000))
    assert [one.number for one in found] == [1, 2, 3, 4, 5, 6]
    assert [one.content and json.loads(one.content) for one in found] == [
        values[0], None, None, None, *values[4:]
    ]  # fmt: skip
    assert {one.problem.reason for one in found[1:4]} == {"over max_document_bytes"}
    assert "a.json, element 4: longer than corpus.max_document_bytes = 1000" in str(found[3].problem)


@pytest.mark.parametrize(("content", "numbers"), [
    ('[{"text": "a"}, {"text": "' + "x" * (1 << 20), [1, 0]),  # cut
    ('[{"text": "a"}, {"text": "b" "c"}, {"text": "' + "x" * (1 << 20) + '"}]', [1, 0]),
    ('[{"text": "a"}, ' + "x" * (1 << 20) + "]", [1, 0]),
    ('[{"text": "a"}] ' + "x" * (1 << 20), [1, 0]),
    ('[{"text": "a"}] ' + " " * (1 << 20), [1]),
    ('[{"text": "a"}, {"n": ' + "1" * 5000 + '}, {"text": "b"}]', [1, 2, 3]),
])  # fmt: skip
def test_an_array_with_something_else_in_it_ends_with_a_bad_record(tmp_path, content, numbers):
    (tmp_path / "a.json").write_text(content, encoding="utf-8")
    found = list(records(source(tmp_path, "a.json"), 9000))
    assert [one.number for one in found] == numbers
    if not numbers[-1]:
        assert "a.json, after element 1: not valid JSON, or cut short" in str(found[-1].problem)


def test_rows_of_a_table(tmp_path, monkeypatch):
    """In their order, over batches and groups, with the columns that are needed and those that are facts."""
    table = pyarrow.table({"text": [f"t{n}" for n in range(7)], "n": range(7), "path": ["a.py"] * 7})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    monkeypatch.setattr(raw_formats, "PARQUET_BATCH_ROWS", 2)
    for kind, columns in (("text", {"text"}), ("code", {"text", "path"})):
        found = list(records(source(tmp_path, "a.parquet", kind=kind), 99))
        assert [one.number for one in found] == list(range(1, 8)) and found[0].content.keys() == columns
        assert [one.content["text"].as_py() for one in found] == [f"t{n}" for n in range(7)]
    for fields, words in ((("n",), "column 'n' is int64 and no text"), (("x",), "no column 'x' (its")):
        (only,) = records(source(tmp_path, "a.parquet", text_fields=fields), 99)
        assert only.number == 0 and only.problem.reason == "file damaged or not of its format"
        assert words in str(only.problem)
    with pytest.raises(KieloError, match="gone.parquet: cannot be read .*No such file.* the same command"):
        list(records(source(tmp_path, "gone.parquet"), 99))

    def without_memory(*arguments, **keys):
        raise pyarrow.ArrowMemoryError("malloc")

    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="malloc"):  # no fault of the file
        patch.setattr(pyarrow.parquet, "ParquetFile", without_memory)
        list(records(source(tmp_path, "a.parquet"), 99))
    for kind in ("dictionary", "large_string"):
        column = pyarrow.array(["a", "b"]).dictionary_encode() if kind == "dictionary" else pyarrow.array(
            ["a", "b"], pyarrow.large_string())  # fmt: skip
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
        made = source(tmp_path, "a.parquet")
        assert [parse(one, made, 9).text for one in records(made, 9)] == ["a", "b"]


def test_rows_at_a_time(tmp_path):
    """As many as 64 MiB hold of the largest rows of any group, 1,024 at most and one at least."""

    class Group:
        def __init__(self, size, rows):
            self.total_byte_size, self.num_rows = size, rows

    class File:
        def __init__(self, *groups):
            self.groups = groups
            self.metadata = self
            self.num_row_groups, self.row_group = len(groups), groups.__getitem__

    rows = raw_formats.batch_rows
    assert rows(File()) == 1024 and rows(File(Group(10, 0))) == 1024
    assert rows(File(Group(2**26, 0))) == 1 and rows(File(Group(2**25, 0))) == 2
    assert rows(File(Group(2**20, 1))) == 64 and rows(File(Group(2**26, 64), Group(2**26, 128))) == 64
    assert rows(File(Group(2**16, 1))) == 1024 and rows(File(Group(2**17, 1))) == 512
    assert rows(File(Group(2**27, 1))) == 1 and rows(File(Group(3 * 2**24, 1))) == 1


def test_texts_of_fields(tmp_path):
    """JSON objects and rows: the id that they give, an empty text for none, code with its language."""
    path = tmp_path / "deep" / "a.jsonl"
    path.parent.mkdir()
    whole = source(tmp_path, "deep/a.jsonl")
    text = parse(Record(path, 3, b'{"text": "x", "id": 7}'), whole, 99)
    assert (text.id, text.text, text.facts, text.sides) == ("7", "x", {}, None)
    for given in ("null", '""', "0", '["a"]', "{}"):
        assert (
            parse(Record(path, 3, b'{"text": "x", "id": %s}' % given.encode()), whole, 9).id
            == "s/deep/a.jsonl:3"
        )
    assert of(path, b'{"text": null}').text == "" and of(path, b'{"id": 1.5, "text": "a"}').id == "1.5"
    told = "a.jsonl, line 3: no text in the field 'text' .its fields are a, b.. Fix: "
    bad("no text in the field", told, path, b'{"a": 1, "b": 2}')
    bad("no text in the field", "its fields are none", path, b"{}")
    for value, kind in ((b'["x"]', "a list"), (b'{"a": 1}', "an object"), (b"7", "a number")):
        told = f"a.jsonl, line 3: the field 'text' is {kind}, not text .its fields are text.. Fix: "
        bad("no text in the field", told, path, b'{"text": %s}' % value)
    bad("no JSON object", "a.jsonl, line 3", path, b"[]")
    told = "a.json, element 3: a JSON object is expected, found str. Fix: "
    bad("no JSON object", told, path.with_suffix(".json"), b'"x"')
    code = of(
        path,
        b'{"content": "x", "path": "", "ext": 7, "lang": "?", "language": "C"}',
        "code",
        fields=("content",),
    )
    assert code.facts == {"programming_language": "c"}
    named = of(path, b'{"content": "x", "language": "c", "path": "a.py"}', "code", fields=("content",))
    assert named.facts == {"programming_language": "python"}
    assert of(path, b'{"content": "x"}', "code", fields=("content",)).facts == {}
    pair = of(path, b'{"t": {"en": "a"}, "et": "b"}', "parallel", fields=("t.en", "et"))
    assert (pair.text, pair.sides) == ("", ("a", "b"))
    bad("a pair without one of its sides", "no text in the field 'et.x' .its fields are t, et", path,
        b'{"t": {"en": "a"}, "et": "b"}', "parallel", fields=("t.en", "et.x"))  # fmt: skip


def test_columns_of_pairs(tmp_path):
    """Of tab-separated values by number; bytes in other columns do not matter."""
    path, kind = tmp_path / "a.tsv", "parallel"
    row = [b"a", b"b", b"c"]
    assert of(path, row, kind, fields=("en", "et")).sides == ("a", "b")
    assert of(path, row, kind, fields=("3", "1")).sides == ("c", "a")
    assert of(path, row, kind, fields=("3", "et")).sides == ("a", "b")
    for fields, words in (
        (("4", "1"), "3 columns, and the pair is in columns 4 and 1"),
        (("0", "1"), "0 and 1"),
    ):
        told = f"a.tsv, line 3: .*{words}"
        bad("a pair without one of its sides", told, path, row, kind, fields=fields)
    bad("not UTF-8", "a.tsv, line 3", path, [b"\xf5", b"b"], kind, fields=("en", "et"))
    assert of(path, [b"\xf5", b"b", b"c"], kind, fields=("2", "3")).sides == ("b", "c")


def test_pages_and_program_files_by_their_bytes(tmp_path):
    """At the limit whole; a page by its mark, its charset or as UTF-8; a program byte for byte as UTF-8."""
    page = tmp_path / "a.html"

    def read(content: bytes, limit=1000):
        page.write_bytes(content)
        return of(page, None, limit=limit).text

    assert read(b"<p>abc", 6) == "abc"
    with pytest.raises(BadRecord, match="longer than corpus.max_document_bytes = 5"):
        read(b"<p>abc", 5)
    meta = '<meta http-equiv="x" content="text/html; charset=%s"><p>õ'
    assert read((meta % "ISO-8859-1").encode("latin-1")) == "õ" and read((meta % "utf-8").encode()) == "õ"
    assert read((meta % "utf-16").encode()) == "õ"  # what was found byte by byte is none
    assert read("\ufeff<p>õ".encode()) == "õ" and read("<p>õ".encode("utf-16")) == "õ"
    tag = b'<meta charset="iso-8859-1">'
    assert read(b" " * (4096 - len(tag)) + tag + b"\xf5", 9000) == "õ"  # the first 4,096 bytes are looked at
    with pytest.raises(BadRecord, match=r"invalid UTF-8 \(byte 0xf5"):
        read(b" " * (4096 - len(b'<meta charset="')) + tag + b"\xf5", 9000)  # and not one more
    for label in ("utf-7", "klingon", "utf8mb4"):
        assert read((meta % label).encode()) == "õ" and read((meta % label).replace("õ", "o").encode()) == "o"
        with pytest.raises(BadRecord, match=f"unknown charset '{label}'") as refusal:
            read((meta % label).encode("latin-1"))
        assert refusal.value.reason == "not in its charset"
    with pytest.raises(
        BadRecord, match=r"a.html, line 3: invalid UTF-8 \(byte 0xf5\). Fix: convert the file, or name"
    ):
        read(b"\n\n\xf5")
    program = tmp_path / "a.py"
    for content in ("\ufeffx = 'õ'\r\n", ""):
        program.write_bytes(content.encode())
        made = of(program, None, "code", limit=len(content.encode()))
        assert (made.id, made.text, made.facts) == ("s/a.py", content, {"programming_language": "python"})
    program.write_bytes(b"a\nb\xff")
    bad(
        "not UTF-8",
        r"a.py, line 2: invalid UTF-8 \(byte 0xff\). Fix: convert it",
        program,
        None,
        "code",
    )
    bad("over max_document_bytes", "a.py: longer", program, None, "code", limit=3)
    bad("not UTF-8", "a.txt, line 3", tmp_path / "a.txt", b"\xf5")
    text = of(tmp_path / "a.txt", "õ".encode())
    assert (text.id, text.text) == ("s/a.txt:3", "õ")


def test_cells_at_the_limit(tmp_path):
    """Texts by their bytes and lists by those of their values; none is none."""
    path = tmp_path / "a.parquet"
    for kind in (pyarrow.string(), pyarrow.large_string()):
        cell = pyarrow.array(["õõ", None], kind)
        assert of(path, {"text": cell[0]}, limit=4).text == "õõ" and of(path, {"text": cell[1]}).text == ""
        bad("over max_document_bytes", "a.parquet, row 3", path, {"text": cell[0]}, limit=3)
    chats = [[{"role": "user", "content": "a"}]]
    for kind in (pyarrow.list_, pyarrow.large_list):
        of_message = pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string()})
        (cell,) = pyarrow.array(chats, kind(of_message))
        size = cell.values.nbytes
        arguments = path, {"m": cell}, "instructions"
        made = of(*arguments, fields=("m",), limit=size)
        assert (made.text, made.facts) == ("a", {"turns": [["user", 1]]})
        bad("over max_document_bytes", "row 3", *arguments, fields=("m",), limit=size - 1)
    broken = pyarrow.array([b"\xf5"]).view(pyarrow.string())[0]
    bad("not UTF-8", "a.parquet, row 3: invalid UTF-8. Fix: write", path, {"text": broken})


def test_a_reader_stops_at_its_limit_and_shows_the_first_bad_records(tmp_path):
    """Up to the most records, bad ones among them; five examples. Lines have their numbers in the file."""
    lines = [b"\xf5" if n % 2 else b"t%d" % n for n in range(20)]
    (tmp_path / "a.txt").write_bytes(b"\n".join(lines) + b"\n")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "x\\ry"}\n')

    def reader_of(name, **limits):
        return ReadPart(source(tmp_path, name), Part(0, (name,)), 99, 4, PartLimits(**limits))

    reader = reader_of("a.txt", max_records=15)
    read = list(reader.run())
    assert [(one.id, one.place) for one in read] == [(f"s/a.txt:{n + 1}", (4, n)) for n in range(0, 15, 2)]
    assert read[0].metadata == {"file": "a.txt", "number": 1}
    assert counted(reader, "s").items() >= {"bad/": 7, "documents/not UTF-8": 7}.items()
    examples = tally(reader).first_examples("s", "bad", 5)
    assert len(reader.examples) == 5 == len(examples)
    assert all(text.startswith(f"a.txt, line {2 * n + 2}: ") for n, text in enumerate(examples))
    assert len(list(reader_of("a.txt").run())) == 10
    of_text = source(tmp_path, "b.jsonl", is_cleaned=False)
    (document,) = ReadPart(of_text, Part(0, ("b.jsonl",)), 99).run()
    assert document.lines == ["x\ry"]
    half = Part(0, ("a.txt",), len(b"\n".join(lines[:10])) + 1, (tmp_path / "a.txt").stat().st_size)
    second = ReadPart(source(tmp_path, "a.txt"), half, 99, limits=PartLimits(first_line=11))
    assert [one.id for one in second.run()] == [f"s/a.txt:{n}" for n in range(11, 20, 2)]
    (tmp_path / "c.parquet").write_bytes(b"PAR1" * 200)
    reader = reader_of("c.parquet")
    assert list(reader.run()) == []
    assert counted(reader, "s")["damaged_bytes/"] == 800
    (example,) = tally(reader).first_examples("s", "bad", 5)
    assert len(example) <= 300 and "c.parquet: damaged" in example
