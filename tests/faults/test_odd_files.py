"""Files of a kind, a size or a number that nobody expects: each is refused by name within seconds.

Pipes, sockets and devices in place of files; arrays with impossible headers; ids and seeds that no machine
holds; conversations of thousands of messages; sparse files.
"""

import json
import os
import shutil
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kielo.artifact.special_files import files_only
from kielo.artifact.token_shards import TokenShard
from kielo.recipe.errors import KieloError
from kielo.tokenizer.chat_template import MOST_RICH, ChatTemplate
from kielo.tokenizer.load import load_tokenizer
from tests.faults.trial import RECIPE, belongings, refused
from tests.ready_tokens import rows_of, write_megatron


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # its name may have 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


KINDS = {"a pipe": _pipe, "a socket": _socket, "a device": _device}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_opened_is_a_file(tmp_path: Path, kind: str) -> None:
    """By any reader of Python's; outside of the block, and below /dev, nothing changes."""
    path = tmp_path / "file"
    KINDS[kind](path)
    readers: list[Callable[[], Any]] = [
        path.read_bytes, path.read_text, lambda: path.write_text("x"), lambda: np.load(path),
        lambda: np.fromfile(path), lambda: np.memmap(path, mode="r"), lambda: os.open(path, os.O_RDONLY),
        lambda: os.open(str(path).encode(), os.O_WRONLY),
    ]  # fmt: skip
    for read in readers:
        with files_only(), pytest.raises(KieloError, match=f"{path}: {kind}, but a file is expected"):
            read()
    with files_only():
        (tmp_path / "other").write_text("text")
        assert (tmp_path / "other").read_text() == "text"
        Path("/dev/null").write_text("text")
    if kind != "a socket":
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


VERBS = {
    "corpus/manifest.json": ["run", "tiny.toml"],
    "tokenizer/tokenizer_config.json": ["data", "tiny.toml", "--step", "2"],
    "tokens/text.bin": ["data", "tiny.toml", "--step", "2"],
    "train/metrics.jsonl": ["train", "tiny.toml", "--set", "train.tokens=9_600"],
    "train/checkpoints/newest/index.json": ["export", "run", "--to", "out"],
    "hf/model.safetensors": ["generate", "run/hf", "Kord"],
    "hf/generation_config.json": ["generate", "run/hf", "Kord"],
}


@pytest.mark.parametrize("name", VERBS)
def test_a_pipe_in_a_run(finished: Path, here, name: str) -> None:
    """A verb that reads it ends by itself, and says what is there."""
    path = finished / "run" / name
    path = path.resolve()
    path.unlink()
    os.mkfifo(path)
    found = here(finished, *VERBS[name])
    assert found.code != 0 or not path.is_fifo(), found.told
    assert "Traceback" not in found.told and "bug of Kielo" not in found.told


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["a.npy", "b.bin", "b.idx"])
def test_ready_tokens_that_are_no_files(packed: Path, here, kind: str, name: str) -> None:
    data = ready(packed)
    write_megatron(data / "b", rows_of(TokenShard(packed / "run" / "tokens" / "text")))
    (data / name).unlink(missing_ok=True)
    KINDS[kind](data / name)
    found = here(packed, "run", "ready.toml", "--to", "pack")
    assert found.code == 1 and name.partition(".")[0] in found.err, found.told
    assert not (packed / "ready" / "tokens").exists()


def ready(workplace: Path) -> Path:
    """`ready.toml`, a recipe of ready tokens in `data`."""
    text = RECIPE.replace('folder = "run"', 'folder = "ready"').replace(
        'sources = "text.txt"', 'sources = [{name = "web", tokens = "data"}]'
    )
    text = text.replace("vocab_size = 320", 'path = "run/tokenizer"')
    (workplace / "ready.toml").write_text(text, encoding="utf-8")
    (workplace / "data").mkdir()
    return workplace / "data"


def header(shape: str, dtype: str = "'<u2'") -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + b"\1\0" * 100


UNMAPPED, NO_ROW = "a NumPy file that cannot be mapped", "a row of little-endian integers is expected"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        *(
            (header(shape), UNMAPPED)
            for shape in (
                "(-5,)", f"({10**30},)", f"({2**62},)", f"({2**63}, 2)", "(1.5,)", "(True,)", "None",
                "('a',)", "(" * 5000, "(__import__('os').abort(),)",
            )
        ),
        *((header("(100,)", dtype), UNMAPPED) for dtype in ("'|O'", "5", "'zzz'")),
        (header("()"), NO_ROW), (header("(10, 10)"), NO_ROW), (header("(100,)", "[('a', '<u2')]"), NO_ROW),
        (b"\x93NUMPY\1\0\xff\xff{", UNMAPPED), (b"\x93NUMPY\x09\0" + header("(100,)")[8:], UNMAPPED),
    ],
    ids=lambda content: repr(content[60:90]),
)  # fmt: skip
def test_an_array_with_an_odd_header(packed: Path, here, content: bytes, reason: str) -> None:
    (ready(packed) / "a.npy").write_bytes(content)
    refused(here(packed, "run", "ready.toml", "--to", "pack"), reason, "a.npy")


def _packed_at(place: Callable[[int], int], kind: str, value: int) -> Callable[[bytearray, int], None]:
    return lambda content, number: struct.pack_into(kind, content, place(number), value)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (_packed_at(lambda _: 34 + 4 * 2, "<i", -5), "sequence 2 has -5 tokens"),
        (_packed_at(lambda _: 34 + 4 * 2, "<i", 7), "sequence 2 has 7 tokens"),
        (
            _packed_at(lambda number: 34 + 4 * number + 8 * 2, "<q", -(2**62)),
            "index is damaged or another file's",
        ),
        (
            _packed_at(lambda number: 34 + 4 * number + 8 * 2, "<q", 2**62),
            "index is damaged or another file's",
        ),
        (
            _packed_at(lambda number: 34 + 12 * number + 8 * 2, "<q", -(2**62)),
            "index is damaged or another file's",
        ),
        (
            _packed_at(lambda number: 34 + 12 * number + 8 * 2, "<q", 2**62),
            "index is damaged or another file's",
        ),
        (_packed_at(lambda _: 18, "<q", 2**62), "its header promises"),
        (_packed_at(lambda _: 18, "<q", -1), "its header promises"),
        (_packed_at(lambda _: 26, "<q", -(2**62)), "its header promises"),
    ],
)
def test_an_index_with_odd_numbers(packed: Path, here, edit, reason: str) -> None:
    """In the middle, where first, last and number are right."""
    data, documents = ready(packed), rows_of(TokenShard(packed / "run" / "tokens" / "text"))
    write_megatron(data / "b", documents)
    content = bytearray((data / "b.idx").read_bytes())
    edit(content, len(documents))
    (data / "b.idx").write_bytes(content)
    refused(here(packed, "run", "ready.toml", "--to", "pack"), reason, "b.")


def test_two_hundred_sparse_gigabytes(packed: Path, here) -> None:
    """Pack sees that they are zeros, which are end-of-text, without reading to the end."""
    with open(ready(packed) / "a.npy", "wb") as file:
        file.truncate(200 << 30)
    began = time.monotonic()
    refused(here(packed, "run", "ready.toml", "--to", "pack"), "sparse file that was never written", "a.npy")
    assert time.monotonic() - began < 60


def test_a_token_id_that_no_model_has(packed: Path, here) -> None:
    shutil.copytree(packed / "run" / "tokenizer", packed / "theirs")
    path = packed / "theirs" / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["vocab"]["a"] = 4_000_000_000
    path.write_text(json.dumps(content), encoding="utf-8")
    text = RECIPE.replace('folder = "run"', 'folder = "next"').replace("vocab_size = 320", 'path = "theirs"')
    (packed / "next.toml").write_text(text, encoding="utf-8")
    before = belongings(packed / "theirs")
    refused(here(packed, "run", "next.toml", "--to", "tokenizer"), "a token of id 4,000,000,000", "theirs")
    assert belongings(packed / "theirs") == before


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("generate", "run", "Kord", "--seed", str(2**64)), "give a number from 0 to 4294967295"),
        (("generate", "run", "Kord", "--seed", "-1"), "give a number from 0 to 4294967295"),
        (("generate", "run", "Kord \udcff"), "PROMPT is not UTF-8"),
        *(
            (("plan", "estonian_llama31_8b", "--failures", rate), "nor a number from")
            for rate in ("1e308", "1e7", "1e-308", "nan", "inf", "0", "-1")
        ),
    ],
)
def test_numbers_and_words_that_no_machine_takes(packed: Path, here, arguments, reason: str) -> None:
    refused(here(packed, *arguments), reason)


LINES = (
    "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ (m.calls or '') ~ '<|endoftext|>' }}{% endfor %}"
)


def conversation(turns: int, of_answers: dict[str, Any]) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [
        {"role": roles[number % 2], "content": f"<|endoftext|> {number}"} | (of_answers if number % 2 else {})
        for number in range(turns)
    ]


def test_a_conversation_of_sixty_thousand_turns(packed: Path) -> None:
    """In a time that grows with the turns, and laid out as short ones are: an end after each answer."""
    folder = packed / "run" / "tokenizer"
    (folder / "chat_template.jinja").write_text(LINES, encoding="utf-8")
    template = ChatTemplate(load_tokenizer(folder))
    seconds = {}
    for turns in (4_000, 60_000):
        began = time.monotonic()
        (found,) = template.lay_out([("one", conversation(turns, {}))])
        seconds[turns] = time.monotonic() - began
        ends = np.flatnonzero(
            np.array(found.ids) == load_tokenizer(folder).whole.token_to_id("<|endoftext|>")
        )
        assert len(ends) == turns and list(found.is_answer[ends]) == [False, True] * (turns // 2)
    assert seconds[60_000] < 60 * seconds[4_000] + 30  # 15 times the turns; a square would be 225 times
    with pytest.raises(KieloError, match=r"one: 30,000 answers of 60,000 messages have more than text"):
        template.lay_out([("one", conversation(60_000, {"calls": "f()"}))])
    few = conversation(2 * MOST_RICH + 2, {"other": 1})  # more than text, which the template leaves out
    (found,) = template.lay_out([("one", few)])
    assert found.is_answer.sum() > MOST_RICH
