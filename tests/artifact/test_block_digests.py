"""Checksums of a file by blocks, and the block that is not as it was written."""

import xxhash

from kielo.artifact import checkpoint_folder
from kielo.artifact.checkpoint_folder import BlockDigests, first_wrong_block


def digests(*blocks: bytes) -> list[str]:
    return [xxhash.xxh3_64_hexdigest(block) for block in blocks]


def test_digests_of_blocks(tmp_path, monkeypatch) -> None:
    """However the bytes come; a last block may be shorter, none is empty; the first other one is named."""
    assert checkpoint_folder.BLOCK_BYTES == 64 * 1024 * 1024  # part of the format of checkpoints
    monkeypatch.setattr(checkpoint_folder, "BLOCK_BYTES", 4)
    for parts in ((b"abcdefghij",), (b"ab", b"cdef", b"", b"ghij"), (b"abcd", b"efgh", b"ij")):
        found = BlockDigests()
        for part in parts:
            found.update(part)
        assert found.hexdigests() == digests(b"abcd", b"efgh", b"ij")
    assert BlockDigests().hexdigests() == []
    whole = BlockDigests()
    whole.update(b"abcdefgh")
    assert whole.hexdigests() == digests(b"abcd", b"efgh")
    path = tmp_path / "file"
    path.write_bytes(b"abcdefghij")
    sound = digests(b"abcd", b"efgh", b"ij")
    assert first_wrong_block(path, sound) is None
    assert first_wrong_block(path, [sound[0], "0", sound[2]]) == 1
    assert first_wrong_block(path, sound[:2]) == 2 and first_wrong_block(path, [*sound, "0"]) == 3
