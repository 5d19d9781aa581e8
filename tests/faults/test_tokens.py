"""Ready token shards that are damaged, of another tokenizer or changed since: refused before the first step.

Each names the file, the number that is wrong and the fix, and writes nothing into the run.
"""

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kielo.artifact.token_shards import TokenShard
from tests.faults.test_runs import swap_two_tokens
from tests.faults.trial import RECIPE, belongings, refused, went_well
from tests.ready_tokens import rows_of, write_ds, write_megatron, write_npy

Documents = list[list[int]]
VOCABULARY = 320


def _ready(workplace: Path, source: str = 'tokens = "data"', tokenizer: str = "run/tokenizer") -> Path:
    """`ready.toml`, whose run goes to `ready`, and the documents of the packed run."""
    text = RECIPE.replace('folder = "run"', 'folder = "ready"').replace(
        'sources = "text.txt"', f'sources = [{{name = "web", {source}}}]'
    )
    text = text.replace(f"vocab_size = {VOCABULARY}", f'path = "{tokenizer}"' if tokenizer else "")
    (workplace / "ready.toml").write_text(text, encoding="utf-8")
    (workplace / "data").mkdir(exist_ok=True)
    return workplace / "data"


def _documents(workplace: Path) -> Documents:
    return rows_of(TokenShard(workplace / "run" / "tokens" / "text"))


def _beyond(data: Path, documents: Documents) -> None:
    write_megatron(data / "a", documents)
    documents[3][1] = VOCABULARY + 5
    write_megatron(data / "b", documents)


def _negative(data: Path, documents: Documents) -> None:
    documents[-1][1] = -7
    write_megatron(data / "b", documents, np.int32)


def _cut_index(data: Path, documents: Documents) -> None:
    write_megatron(data / "b", documents)
    index = data / "b.idx"
    index.write_bytes(index.read_bytes()[:-8])


def _past_the_data(data: Path, documents: Documents) -> None:
    """The pointer of document 2 of 40 or so leads past the `.bin`; first, last and number are right."""
    write_megatron(data / "b", documents)
    index = data / "b.idx"
    content = bytearray(index.read_bytes())
    struct.pack_into("<q", content, 34 + 4 * len(documents) + 8 * 2, 10**9)
    index.write_bytes(bytes(content))


def _odd_data(data: Path, documents: Documents) -> None:
    write_megatron(data / "b", documents)
    with open(data / "b.bin", "ab") as file:
        file.write(b"\x01")


def _without_ends(data: Path, documents: Documents) -> None:
    write_megatron(data / "b", [row[:-1] for row in documents])


def _flat_without_ends(data: Path, documents: Documents) -> None:
    write_npy(data / "b", [row[:-1] for row in documents])


def _wider(data: Path, documents: Documents) -> None:
    """uint32 ids read as the uint16 that a small vocabulary has: every other id is 0."""
    write_npy(data / "b", documents, np.uint32)


def _foreign_index(data: Path, documents: Documents) -> None:
    write_ds(data / "b", documents)
    write_ds(data / "c", documents[:5])
    (data / "c.ds.index").replace(data / "b.ds.index")
    (data / "c.ds").unlink()
    (data / "c.ds.metadata").unlink()


def _nothing(data: Path, documents: Documents) -> None:
    (data / "readme.txt").write_text("no tokens", encoding="utf-8")


@pytest.mark.parametrize(
    ("write", "reason", "named"),
    [
        (_beyond, "has ids 0 to 325, and the tokenizer has", ("b.bin", "325", "0 to 319", "tokenizer.path")),
        (_negative, "has ids -7 to 319, and the tokenizer has", ("-7", "0 to 319", "tokenizer.path")),
        (_cut_index, "but its header promises 622", ("b.idx", "cut short", "copy it again")),
        (
            _past_the_data,
            "index is damaged or another file's",
            ("b.", "index", "500,000,000", "copy both again"),
        ),
        (_odd_data, "are no whole number of ids of 2 bytes", ("b.bin",)),
        (_without_ends, "0 of 29 documents looked at end with 0", ("0 of", "end-of-text", "--append-eod")),
        (_flat_without_ends, "none of 4,260 tokens looked at", ("end-of-text", "tokenizer.path")),
        (_wider, "as if every few words were a document", ("web", "every", "tokens_dtype")),
        (_foreign_index, "does not match b.ds: its last document ends", ("b.ds.index", "copy both")),
        (_nothing, "no token file there", ("web", "data", "PREFIX.bin")),
    ],
)
def test_files_that_cannot_be_trained_on(
    packed: Path, here, write: Callable[[Path, Documents], None], reason: str, named: tuple[str, ...]
) -> None:
    """Whatever stage comes to it first; the files stay as they are, and no tokens folder is there."""
    write(_ready(packed), _documents(packed))
    before = belongings(packed / "data")
    refused(here(packed, "run", "ready.toml", "--to", "pack"), reason, *named)
    assert belongings(packed / "data") == before and not (packed / "ready" / "tokens").exists()


@pytest.mark.parametrize("change", [swap_two_tokens, None])
def test_shards_of_another_tokenizer(packed: Path, here, change) -> None:
    """Kielo's own shards tell their tokenizer, to a swap of two of its tokens; the right one is taken."""
    _ready(packed, 'tokens = "run/tokens/text"', "other")
    shutil.copytree(packed / "run" / "tokenizer", packed / "other")
    if change is None:
        went_well(here(packed, "run", "ready.toml", "--to", "pack"))
        return
    change(packed / "other")
    message = refused(
        here(packed, "run", "ready.toml", "--to", "pack"),
        "these tokens were made with tokenizer",
        "tokenizer.path",
        "manifest.json",
    )
    assert str(packed / "run" / "tokenizer") in message


def test_shards_of_another_tokenizer_without_a_manifest(packed: Path, here) -> None:
    """The same vocabulary with its ids in another order: the decoded text gives it away."""
    write_megatron(_ready(packed) / "b", _documents(packed))
    reversed_ids = [[VOCABULARY - token if token else 0 for token in row] for row in _documents(packed)]
    write_megatron(packed / "data" / "b", reversed_ids)
    refused(
        here(packed, "run", "ready.toml", "--to", "pack"),
        "what the tokenizer writes for their text",
        "web",
        "tokenizer.path",
    )


def test_files_that_changed_since_packing(packed: Path, here) -> None:
    """Another size, and other content of the same size: no step is taken, and both are named."""
    data = _ready(packed)
    write_megatron(data / "b", _documents(packed))
    went_well(here(packed, "run", "ready.toml", "--to", "pack"))
    whole = (data / "b.bin").read_bytes()
    for content in (whole[:-2], whole[:-4] + b"\x05\x00\x05\x00"):
        (data / "b.bin").write_bytes(content)
        for verb in (["train", "ready.toml"], ["data", "ready.toml", "--step", "2"]):
            refused(here(packed, *verb), "changed since the pack stage", "b.bin", "web")
    (data / "b.bin").unlink()
    refused(here(packed, "train", "ready.toml"), "cannot be read (No such file", "b.bin")


def test_files_that_were_written_again(packed: Path, here) -> None:
    """With a new time: read again, then taken where nothing else changed, and never where a middle did."""
    data = _ready(packed)
    write_megatron(data / "b", 4 * _documents(packed))
    whole = (data / "b.bin").read_bytes()
    middle = len(whole) // 4 * 2
    changed = whole[:middle] + (b"\x09\0" if whole[middle] != 9 else b"\x08\0") + whole[middle + 2 :]
    assert 4096 < middle < len(whole) - 4098  # further in than what a description looks at
    pack, train = ("run", "ready.toml", "--to", "pack"), ("train", "ready.toml")
    read = ("data", "ready.toml", "--step", "2")  # a training that has ended reads nothing
    went_well(here(packed, *pack))
    for content in (changed, whole):  # nothing was trained on yet
        (data / "b.bin").write_bytes(content)
        refused(here(packed, *train), "changed since the pack stage", "b.bin", "rewritten")
        went_well(here(packed, *pack))
    went_well(here(packed, *train))
    for part in ("b.bin", "b.idx"):
        os.utime(data / part, ns=(0, 0))
        refused(here(packed, *read), "changed since the pack stage", "b.bin", "--to pack")
        went_well(here(packed, *pack))
        went_well(here(packed, *read))
    (data / "b.bin").write_bytes(changed)
    before = belongings(packed / "ready")
    refused(here(packed, *read), "changed since the pack stage", "b.bin")
    refused(here(packed, *pack), "which was trained on it", "b.bin", "the files as they were")
    assert belongings(packed / "ready") == before


@pytest.mark.parametrize(
    ("source", "tokenizer", "reason", "named"),
    [
        ('tokens = "data"', "", "tokens are ids of a tokenizer", ("tokenizer.path", "web")),
        ('tokens = "data", path = "text.txt"', "run/tokenizer", "Fix: either tokens or raw text", ()),
        (
            'tokens = "data", max_documents = 5',
            "run/tokenizer",
            "tokens are read as they are",
            ("max_documents",),
        ),
        (
            'path = "text.txt", tokens_dtype = "uint32"',
            "run/tokenizer",
            "describes ready token files",
            ("tokens_dtype",),
        ),
    ],
)
def test_a_recipe_that_cannot_be_meant(packed: Path, here, source, tokenizer, reason, named) -> None:
    _ready(packed, source, tokenizer)
    refused(here(packed, "run", "ready.toml", "--to", "pack"), reason, *named)


def test_raw_text_beside_ready_tokens(packed: Path, here) -> None:
    """One recipe with both: packed and trained on; each source has its tokens and held-out documents."""
    data = _ready(packed)
    write_megatron(data / "b", _documents(packed))
    text = (packed / "ready.toml").read_text(encoding="utf-8")
    both = text.replace('tokens = "data"}]', 'tokens = "data"}, {name = "own", path = "text.txt"}]')
    assert both != text
    (packed / "ready.toml").write_text(both, encoding="utf-8")
    went_well(here(packed, "run", "ready.toml", "--to", "evaluate"))
    assert (packed / "ready" / "tokens" / "own.bin").is_file()
    told = went_well(here(packed, "data", "ready.toml", "--step", "1")).told
    assert "b.bin: document" in told and "own" in told
