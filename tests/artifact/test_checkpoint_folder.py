"""Names of checkpoints and of their files, and the folders that are listed by them."""

from kielo.artifact.checkpoint_folder import (
    rank_file_name,
    rank_of,
    run_around,
    step_folder_name,
    step_folders,
    step_of,
)


def test_names_of_checkpoints(tmp_path) -> None:
    """Eight digits or more; folders alone, newest first."""
    assert [step_folder_name(step) for step in (1, 123456789)] == ["step_00000001", "step_123456789"]
    assert (rank_file_name(12), rank_of("rank_00012.safetensors"), rank_of("index.json")) == (
        "rank_00012.safetensors", 12, None,
    )  # fmt: skip
    names = {"step_00000010": 10, "step_0000001": None, "step_00000010.damaged": None, "newest": None}
    assert {name: step_of(tmp_path / name) for name in names} == names
    for name in ("step_00000010", "step_00000002", "step_100000000", "step_00000001.damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000007").touch()
    assert [step_of(path) for path in step_folders(tmp_path)] == [100000000, 10, 2]
    assert step_folders(tmp_path / "gone") == [] == step_folders(tmp_path / "step_00000007")
    (tmp_path / "run" / "train" / "checkpoints" / "step_00000001").mkdir(parents=True)
    inside = tmp_path / "run" / "train" / "checkpoints" / "step_00000001"
    assert run_around(inside) == (tmp_path / "run").resolve() and run_around(tmp_path) is None
