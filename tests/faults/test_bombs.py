"""Small files that become huge when they are read: refused by name, in bounded memory; nothing is fetched."""

import gzip
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from kielo.artifact.documents import read_documents
from tests.faults.trial import RECIPE, went_well

MIB = 1 << 20
MEMORY_BYTES = 900 * MIB  # all of the stage; the texts below have 300 MiB and more
TOO_LONG, NO_XML = "longer than corpus.max_document_bytes", "not valid XML"


def _zstd(path: Path, *parts: bytes) -> None:
    with open(path, "wb") as file, zstandard.ZstdCompressor(level=3).stream_writer(file) as writer:
        for part in parts:
            writer.write(part)


def _one_line(path: Path) -> None:
    _zstd(path, *[b"a" * MIB] * 300)


def _one_document(path: Path) -> None:
    _zstd(path, b'{"text": "', *[b"a b " * (MIB // 4)] * 300, b'"}\n')


def _zeros(path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(bytes(MIB))


def _dictionary(path: Path) -> None:
    """One text of 15 MiB, 200 times: 3 GB."""
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 200, pyarrow.int32()), ["abc" * 5 * MIB])
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)


def _entities(declared: str, used: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        units = "".join(
            f'<tu><tuv xml:lang="et"><seg>{used} lause number {number} on siin.</seg></tuv>'
            f'<tuv xml:lang="en"><seg>sentence number {number} is here.</seg></tuv></tu>'
            for number in range(20)
        )
        path.write_text(
            f'<?xml version="1.0"?>{declared}<tmx version="1.4"><header/><body>{units}</body></tmx>'
        )

    return write


LONG = f'<!DOCTYPE t [<!ENTITY b "{"x" * 9_999}">]>'
LAUGHS = "".join(f'<!ENTITY a{number} "{f"&a{number - 1};" * 10}">' for number in range(1, 12))
BOMBS = {
    "one line": ("a.txt.zst", _one_line, TOO_LONG),
    "one document": ("a.jsonl.zst", _one_document, TOO_LONG),
    "zeros": ("a.txt.gz", _zeros, TOO_LONG),
    "a dictionary": ("a.parquet", _dictionary, TOO_LONG),
    "a billion laughs": ("a.tmx", _entities(f'<!DOCTYPE t [<!ENTITY a0 "ha">{LAUGHS}]>', "&a11;"), NO_XML),
    "a long entity": ("a.tmx", _entities(LONG, "&b;" * 9_999), NO_XML),
    "a file of the machine": (
        "a.tmx",
        _entities('<!DOCTYPE t [<!ENTITY x SYSTEM "file:///etc/passwd">]>', "&x;"),
        "undefined entity",
    ),
}  # fmt: skip


def _recipe(workplace: Path, name: str) -> Path:
    more = ', kind = "parallel", language = ["en", "et"]' if name.endswith(".tmx") else ""
    source = f'[{{name = "own", path = "text.txt"}}, {{name = "theirs", path = "{name}"{more}}}]'
    path = workplace / "bomb.toml"
    path.write_text(RECIPE.replace('sources = "text.txt"', f"sources = {source}"), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", BOMBS)
def test_a_file_that_becomes_huge(workplace: Path, kind: str) -> None:
    """Within a limit of all memory, by which the kernel would end the stage."""
    name, write, reason = BOMBS[kind]
    write(workplace / name)
    found = subprocess.run(
        [sys.executable, "-m", "kielo", "run", _recipe(workplace, name), "--to", "corpus"],
        cwd=workplace, capture_output=True, text=True, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES)),
    )  # fmt: skip
    assert found.returncode == 1 and reason in found.stderr and name in found.stderr, found.stderr
    assert "Traceback" not in found.stderr and "root:" not in found.stdout + found.stderr
    assert not (workplace / "run" / "corpus").exists()


@pytest.mark.parametrize(
    "declared",
    ['<!DOCTYPE tmx SYSTEM "http://127.0.0.1:9/tmx14.dtd">', '<!DOCTYPE t [<!ENTITY own "Eesti">]>', ""],
)
def test_a_plain_memory_is_read(workplace: Path, here, declared: str) -> None:
    """With the DTD that TMX names, which is not fetched, and with an entity of its own."""
    _entities(declared, "&own;" if "own" in declared else "Eesti")(workplace / "a.tmx")
    went_well(here(workplace, "run", _recipe(workplace, "a.tmx"), "--to", "corpus"))
    files = (workplace / "run" / "corpus").rglob("*.jsonl*")
    texts = [document["text"] for file in files for document in read_documents(file)]
    assert sum("Eesti lause number" in text for text in texts) == 20
