"""Documents and conversations on disk: JSON lines under zstd, one document a line."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import orjson
import zstandard

from kielo.artifact.durable import DurableFile
from kielo.artifact.json_object import JsonTable
from kielo.artifact.text_files import decode_text, read_lines
from kielo.recipe.errors import KieloError

# A conversation as a document: messages ↔ its text and the turns in its metadata.
#
# The text is the contents of the messages, a line end after each but the last; `metadata["turns"]` lists
# the role and the characters of each message, so that they can be cut out of the text again, and what else
# a message has: the tools that it calls, its reasoning. `metadata["tools"]` are the tools that there are.


TURNS, TOOLS = "turns", "tools"
ANSWERS = "assistant"  # the role whose messages are the answers
WEIGHT = "weight"  # of a message: 0 where it carries no loss

Message = JsonTable  # {"role", "content"}, and what else the template is given
Turns = list[list[Any]]  # [role, characters] of each message, and {key: value} where there is more


class Document(TypedDict):
    """A document of a corpus. metadata: its place in its file, and of a conversation its turns and tools.

    place: in the corpus, as long as other steps of the corpus stage follow.
    """

    id: str
    text: str
    source: str
    metadata: JsonTable
    place: NotRequired[Sequence[int]]


def join_messages(messages: Sequence[Message]) -> tuple[str, Turns]:
    """Return the text of a conversation and its turns."""
    turns: Turns = []
    for message in messages:
        more = {key: value for key, value in message.items() if key not in ("role", "content")}
        turns.append([message["role"], len(message["content"]), *([more] if more else [])])
    return "\n".join(message["content"] for message in messages), turns


def split_messages(text: str, turns: Turns) -> list[Message]:
    """Return the messages of a conversation."""
    messages, start = [], 0
    for role, characters, *more in turns:
        content = {"role": role, "content": text[start : start + characters]}
        messages.append(content | (more[0] if more else {}))
        start += characters + 1
    return messages


def messages_of(document: Document) -> list[Message] | None:
    """Return the messages of a document; None where it is no conversation."""
    turns = document["metadata"].get(TURNS)
    return None if turns is None else split_messages(document["text"], turns)


def carries_loss(message: Message) -> bool:
    """Return True for an answer that the model is to learn."""
    return message["role"] == ANSWERS and message.get(WEIGHT, 1) != 0


SUFFIX = ".jsonl.zst"
COMPRESSION_LEVEL = 6


class DocumentWriter:
    """Write documents to one file, aside until `close`, so that a reader never sees half of it."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._file = DurableFile(self.path)
        compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, write_checksum=True)
        # The stub asks for a whole file, and only `write` is called.
        self._stream = compressor.stream_writer(self._file, closefd=False)  # type: ignore[arg-type]

    def add(self, document: Document) -> None:
        self._stream.write(orjson.dumps(document) + b"\n")

    def add_lines(self, lines: bytes) -> None:
        """Append documents that are JSON already, each with a line's end."""
        self._stream.write(lines)

    def close(self) -> None:
        """Finish the file, bring it to the disk and give it its name."""
        self._stream.close()
        self._file.close()

    def abandon(self) -> None:
        """Leave nothing behind."""
        self._file.abandon()

    def __enter__(self) -> "DocumentWriter":
        return self

    def __exit__(self, kind: type | None, problem: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def write_documents(path: Path | str, documents: Iterable[Document]) -> int:
    """Write all the documents to one .jsonl.zst file; return their number. An exception leaves nothing."""
    count = 0
    with DocumentWriter(path) as writer:
        for document in documents:
            writer.add(document)
            count += 1
    return count


def read_documents(folder_or_file: Path | str) -> Iterator[Document]:
    """Yield the documents of one file, or of a folder's *.jsonl.zst in the order of their names.

    Raises KieloError naming the file, and the line where there is one.
    """
    for path in document_files(folder_or_file):
        for number, line in read_lines(path):
            yield parse_record(path, number, line)


def document_files(folder_or_file: Path | str) -> list[Path]:
    """Return the files of documents in a folder, in the order of their names; of one file itself."""
    place = Path(folder_or_file)
    if not place.exists():
        raise KieloError(f"{place}: no such file or folder of documents; run the corpus stage first")
    return sorted(place.glob("*" + SUFFIX)) if place.is_dir() else [place]


def parse_record(path: Path, number: int, line: bytes) -> Any:
    """Return the JSON object of one line. KieloError, naming file and line, for anything else."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as problem:
        decode_text(path, number, line)
        raise KieloError(
            f"{path}, line {number}: not valid JSON ({problem}); one JSON object a line is expected"
        ) from None
    if not isinstance(record, dict):
        raise KieloError(f"{path}, line {number}: a JSON object is expected, found {type(record).__name__}")
    return record
