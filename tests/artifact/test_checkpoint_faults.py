"""Each fault of a checkpoint's files is named with its file and place."""

import errno

from kielo.artifact import checkpoint_folder
from kielo.artifact.checkpoint_folder import another_version, fault_of_reading, find_fault
from kielo.artifact.checkpoint_index import read_checkpoint_manifest
from tests.artifact.small_checkpoint import checkpoint


def test_faults_of_files(tmp_path, monkeypatch) -> None:
    """Each with its file and place; sizes alone where no checksums are asked for."""
    monkeypatch.setattr(checkpoint_folder, "BLOCK_BYTES", 16)
    folder, name = checkpoint(tmp_path / "step_00000001"), "rank_00000.safetensors"
    files, path = (
        read_checkpoint_manifest(folder).files,
        tmp_path / "step_00000001" / "rank_00000.safetensors",
    )
    whole = path.read_bytes()
    size = len(whole)

    def fault(checksums: bool = True) -> str | None:
        found = find_fault(folder, [name], files, checksums)
        return found and str(found)

    assert find_fault(folder, sorted(files), files) is None and fault() is None
    path.write_bytes(whole[:-1] + b"x")
    last = (size - 1) // 16
    assert fault() == (
        f"damaged: {name} is not what was written: block {last} (bytes {16 * last} to {size - 1}) has "
        f"another "
        "checksum"
    )
    assert fault(checksums=False) is None
    path.write_bytes(whole[:17] + b"X" + whole[18:])
    assert "block 1 (bytes 16 to 31) has another checksum" in fault()
    path.write_bytes(whole[:-1])
    short = f"is {size - 1} bytes long instead of {size}"
    assert fault(checksums=False) == f"damaged: {name} {short}"
    stale = whole.replace(b"0" * 16, b"1" * 16)
    path.write_bytes(stale)
    of_another = f"is of another save ({'1' * 16} instead of {'0' * 16})"
    assert fault(checksums=False) == f"damaged: {name} {of_another}"
    path.write_bytes(stale[:-1])
    assert fault() == f"damaged: {name} {of_another}, and {short}"
    path.write_bytes(whole.replace(b"save_id", b"save_ix"))
    assert fault(checksums=False) == f"damaged: {name} does not say of which save it is"
    path.write_bytes((100_000_001).to_bytes(8, "little") + whole[8:])
    assert fault(checksums=False) == f"damaged: {name} does not say of which save it is"
    path.unlink()
    assert fault() == f"damaged: {name} is missing"
    assert str(find_fault(folder, ["other"], files)) == "damaged: other is not listed in manifest.json"
    assert fault_of_reading("f", OSError(errno.EIO, "broken")).kind == "unreadable"
    assert str(another_version("f", 3, ", by x")) == (
        "of another version: f is of version 3, by x, and this Kielo reads version 2. Fix: the Kielo "
        "that "
        "wrote it"
    )
