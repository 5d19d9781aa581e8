"""Files of parts, joined in their order."""

import numpy as np
import pytest

from kielo.artifact import token_shards as module
from kielo.artifact.token_shards import TokenShard, TokenShardWriter, join_files, join_token_shards


@pytest.mark.parametrize("read_bytes", [1, 2, 3, 100])
def test_bytes_of_all_parts(read_bytes, tmp_path, monkeypatch) -> None:
    assert module.READ_BYTES == 8 * 1024 * 1024
    monkeypatch.setattr(module, "READ_BYTES", read_bytes)
    parts = [tmp_path / name for name in ("b", "none", "a")]
    for path, content in zip(parts, (b"12345", b"", b"678")):
        path.write_bytes(content)
    join_files(parts, tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == b"12345678"


def test_shards_with_and_without_a_mask(tmp_path) -> None:
    for has_mask in (True, False):
        folder = tmp_path / str(has_mask)
        for name, rows in (("x", [[7, 8], []]), ("y", [[9]])):
            with TokenShardWriter(folder / name, 70_000, has_mask) as shard:
                for row in rows:
                    shard.add(np.array(row, int), np.zeros(len(row), bool))
        join_token_shards([folder / "x", folder / "y"], folder / "whole.all")
        found = TokenShard(folder / "whole.all")
        assert found.read(0, 3).tolist() == [7, 8, 9] and found.document_offsets.tolist() == [0, 2, 2, 3]
        assert found.dtype == np.int32 and (found.loss_mask is not None) is has_mask
        assert not has_mask or found.loss_mask[:].tolist() == [0, 0, 0]
