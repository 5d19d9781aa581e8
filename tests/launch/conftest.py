"""Launch folders for the tests of what stands in them, each written once."""

import contextlib
import json
from pathlib import Path

import pytest

from kielo.cli.main import main
from kielo.corpus import download
from tests.launch.hub import CONFIG, TEXT, Hub

# Name of a folder → flags. A recipe with a layout that fits each of the machines.
LAUNCHED = {
    "lumi_g": [
        "--cluster",
        "lumi_g",
        "--nodes",
        "64",
        "--account",
        "project_462000000",
        "--spares",
        "2",
        "--preflight",
    ],
    "lumi_g torchrun": [
        "--cluster",
        "lumi_g",
        "--nodes",
        "64",
        "--account",
        "project_462000000",
        "--torchrun",
    ],
    "abci3": ["--cluster", "abci3", "--nodes", "16", "--account", "gaa00000"],
    "tsubame4": ["--cluster", "tsubame4", "--nodes", "16", "--account", "tga-group"],
}


@pytest.fixture(scope="package")
def launched(tmp_path_factory) -> dict[str, Path]:
    """Name → the folder that `kielo launch poro_34b --dry-run` wrote."""
    folder, found = tmp_path_factory.mktemp("launched"), {}
    with contextlib.chdir(folder):
        for number, (name, flags) in enumerate(LAUNCHED.items(), start=1):
            assert main(["launch", "poro_34b", *flags, "--dry-run"]) == 0
            found[name] = folder / "runs" / "poro_34b" / "launch" / f"{number:04d}"
    return found


@pytest.fixture
def hub(monkeypatch):
    import huggingface_hub.constants

    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    }
    found = Hub({
        "config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"w" * 5000,
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "onnx/model.safetensors": b"other", "datasets/et/0.jsonl": TEXT.encode(),
    })  # fmt: skip
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", found.address)
    address = found.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    monkeypatch.setattr(download.shutil, "which", lambda program: None)  # no apt here
    yield found
    found.server.shutdown()
    found.server.server_close()
