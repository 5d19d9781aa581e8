"""Indexes of token files are described, or refused with the file and the number."""

import struct

import pytest

from kielo.artifact.token_file_formats import describe
from kielo.artifact.token_shards import TokenShard
from kielo.recipe.errors import KieloError


def test_indexes_of_others_that_cannot_be_read(tmp_path) -> None:
    """Another version, a type that is no whole number, half a header; each is named."""
    (tmp_path / "s.bin").write_bytes(bytes(4))

    def written(version: int, code: int, cut: int = 0) -> None:
        content = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code, 1, 2)
        content += struct.pack("<iqqq", 2, 0, 0, 1)
        (tmp_path / "s.idx").write_bytes(content[: len(content) - cut])

    written(1, 8)
    assert describe(tmp_path / "s.bin", 2).tokens == 2 and TokenShard(tmp_path / "s").num_tokens == 2
    for version, code in ((2, 8), (0, 8), (1, 9), (1, 6), (1, 7)):
        written(version, code)
        for read in (lambda: describe(tmp_path / "s.bin", 2), lambda: TokenShard(tmp_path / "s")):
            with pytest.raises(
                KieloError, match=f"s.idx: version {version}, dtype code {code}; version 1 with"
            ):
                read()
    written(1, 8, cut=1)
    for read in (lambda: describe(tmp_path / "s.bin", 2), lambda: TokenShard(tmp_path / "s")):
        with pytest.raises(
            KieloError, match="s.idx: 61 bytes, but its header promises 62; the file is cut short"
        ):
            read()
    (tmp_path / "s.idx").write_bytes(b"MMIDIDX\0\0" + bytes(24))
    for read in (lambda: describe(tmp_path / "s.bin", 2), lambda: TokenShard(tmp_path / "s")):
        with pytest.raises(KieloError, match="not a Megatron index"):
            read()
