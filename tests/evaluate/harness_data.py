"""Data of the harness's tasks, as the library `datasets` keeps them in its cache after a download."""

import csv
import json
from pathlib import Path

import pytest

COMMIT = "a" * 40
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"  # beside the repository


def belebele(language: str) -> list[dict[str, str]]:
    """Return the questions of a language, as its file on the hub has them. Skip without the file."""
    path = SHARED / "belebele" / f"{language}-test.csv"
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_cached(cache: Path, repository: str, configuration: str, rows: list[dict[str, str]]) -> Path:
    """Write the split "test" of a repository into a cache of `datasets`. Return the folder of the data."""
    from datasets import Dataset, DatasetInfo, SplitDict, SplitInfo
    from datasets.arrow_writer import ArrowWriter

    name = repository.rsplit("/", maxsplit=1)[-1]
    folder = cache / repository.replace("/", "___") / configuration / "0.0.0" / COMMIT
    folder.mkdir(parents=True)
    features = Dataset.from_list(rows).features
    with ArrowWriter(path=str(folder / f"{name}-test.arrow"), features=features) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()
    split = SplitInfo("test", num_examples=len(rows), dataset_name=name)
    info = DatasetInfo(
        features=features, builder_name="csv", dataset_name=name, config_name=configuration, version="0.0.0",
        splits=SplitDict({"test": split}, dataset_name=name),
    )  # fmt: skip
    info.write_to_directory(str(folder))
    assert json.loads((folder / "dataset_info.json").read_text())["config_name"] == configuration
    return folder
