"""Sources of instructions: both spellings of messages, what is dropped, and what is no conversation."""

import json
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest

from kielo.artifact.documents import messages_of, read_documents
from kielo.artifact.stage_counts import Funnel
from kielo.artifact.stage_json import read_json
from kielo.corpus.corpus_stage import run_corpus
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus, Recipe


def chat(*contents, first="user"):
    """Messages that take turns, user's and assistant's."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


def run(folder, *sources, **corpus):
    """Returns the messages of the corpus that these sources make."""
    settings = {"workers": 1, "max_bad_share": 0} | corpus
    recipe = Recipe(name="trial", language="et", corpus=Corpus(sources=list(sources), **settings))
    run_corpus(recipe, folder / "corpus", folder / "raw", progress=False)
    return [messages_of(document) for document in read_documents(folder / "corpus" / "documents")]


def source(folder, records, **keys):
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return {"path": str(path), "kind": "instructions"} | keys


def test_messages_come_back_as_they_were_written(tmp_path):
    """Character by character, in both spellings, from JSONL and Parquet, in the order of the files."""
    odd = chat("  Mis\tkell on?\r\n\n", "\n <|im_end|> üks  \n\n", "", "[INST] kaks")
    shared = [{"from": "system", "value": "Ole lühike."}, {"from": "human", "value": "Tere"}]
    shared += [{"from": "gpt", "value": "Tere!"}]
    first = source(tmp_path, [{"messages": odd, "id": 7}, {"conversations": shared}])
    rows = [chat("Üks?", "Kaks."), chat("Kolm?", "Neli.", "Viis?", "Kuus.")]
    pyarrow.parquet.write_table(pyarrow.table({"turns": rows}), tmp_path / "a.parquet")
    table = {"path": str(tmp_path / "a.parquet"), "kind": "instructions", "text_field": "turns"}
    roles = ("system", "user", "assistant")
    expected = [{"role": role, "content": one["value"]} for role, one in zip(roles, shared)]
    assert run(tmp_path, first, table, workers=2) == [odd, expected, *rows]


def test_what_teaches_nothing_is_dropped_and_counted(tmp_path):
    """Each conversation goes for one reason; the same words in other roles are no duplicate."""
    good, tool = chat("Tere", "Tere!"), {"role": "tool", "content": "42"}
    with_tool = [*chat("Mis?", "Otsin."), tool, tool, {"role": "assistant", "content": "42."}]
    swapped = [{"role": "system", "content": "Tere"}, {"role": "assistant", "content": "Tere!"}]
    records = [
        good, good, with_tool, chat("Üks", " \n"), chat("Kaks"), chat("Kolm", "Neli", first="assistant"),
        chat("Viis", "Kuus") * 2 + good[:1] * 2, swapped, [],
    ]  # fmt: skip
    wanted = source(tmp_path, [{"messages": messages} for messages in records])
    assert run(tmp_path, wanted) == [good, with_tool]
    dropped = {row.reason: row.documents for row in read_json(tmp_path / "corpus", Funnel).steps}
    assert dropped["an answer is empty"] == dropped["no answer"] == dropped["seen before"] == 1
    assert dropped["turns do not alternate"] == 3 and dropped["empty"] == 1
    kept = run(tmp_path / "as it is", wanted | {"clean": False})
    assert swapped in kept and len(kept) == 5


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": "Tere"}, "the field 'messages' is a str and no list of messages"),
        ({"text": "Tere"}, "the field 'messages' is missing and no list"),
        ({"messages": ["Tere"]}, "message 1: is no object with 'role'"),
        ({"messages": [{"role": "robot", "content": "Tere"}]}, "message 1: unknown role 'robot'. Fix: one"),
        ({"messages": [*chat("Tere"), {"role": "assistant"}]}, "message 2: its 'content' is no text"),
        ({"conversations": [{"from": "gpt", "value": None}]}, "message 1: its 'value' is no text"),
        ({"instruction": "a", "output": "b", "history": 1}, "its 'history' is no list"),
        ({"instruction": "a", "output": "b", "input": {"a": 1}}, "its 'input' is a dict and no text"),
        ({"instruction": "a", "output": "b", "input": ["a"]}, "its 'input' is a list and no text"),
        ({"instruction": "a", "output": "b", "input": float("inf")}, "its 'input' is infinite"),
        ({"messages": chat("a", "b"), "tools": '["\\ud83d"]'}, "cannot be stored as JSON"),
        ({"messages": chat("a", "b"), "tools": f"[{10**20}]"}, "cannot be stored as JSON"),
        ({"messages": chat("a", "b"), "tools": "[" * 5000 + "]" * 5000}, "its 'tools' are no JSON"),
        ({"messages": chat("a", "b"), "tools": "[" * 252 + "]" * 252}, "cannot be stored as JSON"),
        ({"conversations": [{"from": "function_call", "value": '"\\ud83d"'}]}, "cannot be stored as JSON"),
    ],
)
def test_what_is_no_conversation_is_named_by_line(tmp_path, record, message):
    """The corpus stage refuses it with file and line."""
    with pytest.raises(KieloError) as refusal:
        run(tmp_path, source(tmp_path, [{"messages": chat("a", "b")}, record]))
    assert "chats.jsonl, line 2" in str(refusal.value) and message in str(refusal.value)


def test_a_long_conversation_in_parquet_is_not_held(tmp_path):
    """A list over corpus.max_document_bytes is a bad record, as a long line is."""
    rows = [chat("Tere", "Tere!"), chat("x" * 3000, "y")]
    pyarrow.parquet.write_table(pyarrow.table({"messages": rows}), tmp_path / "a.parquet")
    table = {"path": str(tmp_path / "a.parquet"), "kind": "instructions"}
    with pytest.raises(KieloError, match="row 2: longer than corpus.max_document_bytes"):
        run(tmp_path, table, max_document_bytes=2000)


@pytest.mark.parametrize(
    ("value", "type"),
    [
        (b"\xff", pyarrow.binary()),
        (Decimal("1.5"), pyarrow.decimal128(5, 2)),
        (1 << 60, pyarrow.timestamp("ms")),
        (0, pyarrow.timestamp("us", tz="Nowhere/Land")),
    ],
)
def test_a_cell_that_cannot_be_stored_is_a_bad_record(tmp_path, value, type):
    rows = [[one | {"x": value} for one in chat("Tere", "Tere!")]]
    form = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string()), ("x", type)])
    table = pyarrow.table({"messages": pyarrow.array(rows, pyarrow.list_(form))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(KieloError, match=r"a\.parquet, row 1: (a cell )?cannot be (stored|read)"):
        run(tmp_path, {"path": str(tmp_path / "a.parquet"), "kind": "instructions"})


@pytest.mark.parametrize(("number", "question"), [
    (0, "Kas paaris?\n0"), (1.5, "Kas paaris?\n1.5"), (float("nan"), "Kas paaris?"),
])  # fmt: skip
def test_a_number_is_an_input(tmp_path, number, question):
    """But NaN is a missing value, as pandas writes it."""
    row = {"instruction": "Kas paaris?", "input": number, "output": "Jah."}
    pyarrow.parquet.write_table(
        pyarrow.table({key: [value] for key, value in row.items()}), tmp_path / "a.parquet"
    )
    table = {"path": str(tmp_path / "a.parquet"), "kind": "instructions", "clean": False}
    made = run(tmp_path, source(tmp_path, [row], clean=False), table, deduplicate_documents=False)
    assert [messages[0]["content"] for messages in made] == [question] * 2


@pytest.mark.parametrize("kind", ["text", "code"])
def test_loss_is_of_instructions(kind):
    """Other kinds refuse the key."""
    with pytest.raises(ValueError, match='loss needs kind = "instructions"'):
        Corpus(sources=[{"path": "a.jsonl", "kind": kind, "loss": "answers"}])
