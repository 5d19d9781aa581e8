"""Documents and conversations on disk: JSON lines under zstd, one document a line."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import orjson
import zstandard

from kielo.artifact.durable import DurableFile, WrittenAside
from kielo.artifact.json_object import JsonTable
from kielo.artifact.text_files import decode_text, read_lines
from kielo.recipe.errors import KieloError

# The text of a conversation is the contents of its messages, joined by line ends. `metadata["turns"]` lists
# the role and the characters of each message, to cut them out of the text again, and its other keys, such as
# tool calls and reasoning. `metadata["tools"]` lists the available tools.
TURNS, TOOLS = "turns", "tools"
ANSWERS = "assistant"  # the role whose messages are the answers
WEIGHT = "weight"  # of a message: 0 if it carries no loss

Message = JsonTable  # {"role", "content"}, and other keys for the template
Turns = list[list[Any]]  # [role, characters] of each message, and {key: value} of its other keys


class Document(TypedDict):
    id: str
    text: str
    source: str
    metadata: JsonTable  # its place in its file, and a conversation's turns and tools
    place: NotRequired[Sequence[int]]  # in the corpus, while other steps of the corpus stage follow


def join_messages(messages: Sequence[Message]) -> tuple[str, Turns]:
    turns: Turns = []
    for message in messages:
        more = {key: value for key, value in message.items() if key not in ("role", "content")}
        turns.append([message["role"], len(message["content"]), *([more] if more else [])])
    return "\n".join(message["content"] for message in messages), turns


def split_messages(text: str, turns: Turns) -> list[Message]:
    messages, start = [], 0
    for role, characters, *more in turns:
        content = {"role": role, "content": text[start : start + characters]}
        messages.append(content | (more[0] if more else {}))
        start += characters + 1
    return messages


def messages_of(document: Document) -> list[Message] | None:
    turns = document["metadata"].get(TURNS)
    return None if turns is None else split_messages(document["text"], turns)


def carries_loss(message: Message) -> bool:
    return message["role"] == ANSWERS and message.get(WEIGHT, 1) != 0


SUFFIX = ".jsonl.zst"
COMPRESSION_LEVEL = 6


class DocumentWriter(WrittenAside):
    def __init__(self, path: Path | str, level: int = COMPRESSION_LEVEL):
        self.path = Path(path)
        self._file = DurableFile(self.path)
        compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
        # The stub asks for a whole file, but only `write` is called.
        self._stream = compressor.stream_writer(self._file, closefd=False)  # type: ignore[arg-type]

    def add(self, document: Document) -> None:
        self._stream.write(orjson.dumps(document) + b"\n")

    def add_lines(self, lines: bytes) -> None:
        self._stream.write(lines)

    def close(self) -> None:
        self._stream.close()
        self._file.close()

    def abandon(self) -> None:
        self._file.abandon()


def read_documents(folder_or_file: Path | str) -> Iterator[Document]:
    """Yield the documents of a file, or of a folder's files by name. KieloError with the file and line."""
    for path in document_files(folder_or_file):
        for number, line in read_lines(path):
            yield parse_record(path, number, line)


def document_files(folder_or_file: Path | str) -> list[Path]:
    place = Path(folder_or_file)
    if not place.exists():
        raise KieloError(f"{place}: no such file or folder of documents. Fix: run the corpus stage first")
    return sorted(place.glob("*" + SUFFIX)) if place.is_dir() else [place]


def parse_record(path: Path, number: int, line: bytes, unit: str = "line") -> Any:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as problem:
        decode_text(path, number, line)
        raise KieloError(
            f"{path}, {unit} {number}: not valid JSON ({problem}). Fix: one JSON object a line, or for "
            "objects of several lines a name with .json in place of .jsonl"
        ) from None
    if not isinstance(record, dict):
        raise KieloError(
            f"{path}, {unit} {number}: a JSON object is expected, found {type(record).__name__}. Fix: "
            '{"text": "…"} for each text'
        )
    return record
