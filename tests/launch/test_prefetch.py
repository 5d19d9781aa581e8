"""What `kielo prefetch` brings is all that a machine without a network needs; a hub here serves it."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kielo.artifact.manifest import read_manifest
from kielo.artifact.prefetched import Prefetched
from kielo.artifact.stage_json import read_json
from kielo.artifact.weights_folder import resolve_tokenizer, resolve_weights
from kielo.cli.main import main
from kielo.launch.site import source_of_kielo
from tests.faults.trial import rest_marked_full
from tests.launch.hub import COMMIT


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nlanguage = "et"\n[tokenizer]\npath = "hf:org/one"\n[model]\nweights = "hf:org/one"\n'
        '[[corpus.sources]]\nname = "wiki"\nhuggingface_dataset = "org/one"\nhuggingface_subset = "et"\n'
        "clean = false\n"
    )
    return path


@contextlib.contextmanager
def no_network(monkeypatch):
    """Every connection fails at once, and so does every name."""

    def refuse(*words, **options):
        raise OSError("no network here")

    with monkeypatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        patch.setattr(socket, "create_connection", refuse)
        yield


def test_a_machine_without_a_network_finds_all_of_it(tmp_path, monkeypatch, hub, recipe, capsys) -> None:
    """Text, weights and tokenizer; the folder may have moved, and nothing else is looked for."""
    assert main(["prefetch", "mine.toml", "--to", "brought", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["kind"] for one in told["brought"]] == ["text", "weights", "tokenizer"]
    assert not any("onnx" in one for one in hub.asked if one.startswith("GET"))
    shutil.move("brought", "carried")
    monkeypatch.setenv("KIELO_PREFETCHED", str(tmp_path / "carried"))
    with no_network(monkeypatch):
        assert (resolve_weights("hf:org/one") / "model.safetensors").read_bytes() == b"w" * 5000
        assert resolve_tokenizer("hf:org/one@main").name == COMMIT
        assert main(["run", "mine.toml", "--only", "corpus"]) == 0
    origin = read_manifest(tmp_path / "runs/mine/corpus").counts["sources"][0]["origin"]
    assert (
        origin == f"Hugging Face dataset org/one et revision {COMMIT}"
        and not (tmp_path / "runs/mine/raw/wiki").exists()
    )


def killed_at(hub, number: int) -> subprocess.Popen:
    """`kielo prefetch` in a process of its own, killed in the middle of the answer to one request."""
    words = [sys.executable, "-m", "kielo", "prefetch", "mine.toml", "--to", "brought"]
    variables = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}
    variables["HF_ENDPOINT"] = hub.address
    process = subprocess.Popen(words, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def cut(request: int) -> bool:
        if request == number:
            process.kill()
        return request == number

    hub.cut = cut
    process.wait(timeout=120)
    hub.cut = lambda request: False
    return process


@pytest.mark.parametrize("number", rest_marked_full(range(12), [2, 9]))
def test_a_kill_at_any_request_loses_nothing(tmp_path, hub, recipe, capsys, number: int) -> None:
    """The same call brings the rest, and ends with what an undisturbed call brings."""
    process = killed_at(hub, number)
    assert process.returncode == -signal.SIGKILL
    assert main(["prefetch", "mine.toml", "--to", "brought"]) == 0
    assert main(["prefetch", "mine.toml", "--to", "whole"]) == 0
    found = {name: brought(tmp_path / name) for name in ("brought", "whole")}
    assert found["brought"] == found["whole"] and len(found["whole"]) == 4
    left = [*(tmp_path / "brought").rglob("*.incomplete")]
    assert (f"{len(left)} unfinished files" in capsys.readouterr().err) == bool(left)


def brought(folder: Path) -> dict[str, bytes]:
    """Returns what a run reads of it: texts, and files of the hub by name; no records with times."""
    files = [*folder.rglob("*.jsonl"), *folder.rglob("*.safetensors"), *folder.rglob("snapshots/*/*.json")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_it_goes_on_and_mends_what_is_damaged(tmp_path, hub, recipe, capsys) -> None:
    """A second call fetches nothing; a damaged file of the hub is seen by its hash, and fetched again."""
    hub.damage["model.safetensors"] = b"v" * 5000
    assert main(["prefetch", "mine.toml", "--to", "brought"]) == 0
    assert "model.safetensors is damaged" in capsys.readouterr().err
    fetched = [one for one in hub.asked if one == f"GET /org/one/resolve/{COMMIT}/model.safetensors"]
    assert len(fetched) == 2
    hub.asked.clear()
    assert main(["prefetch", "mine.toml", "--to", "brought"]) == 0
    assert not [one for one in hub.asked if one.startswith("GET /org") or "datasets" in one]
    assert len(read_json(tmp_path / "brought", Prefetched).brought) == 3


def test_a_lost_file_is_fetched_and_a_link_of_a_person_stays(tmp_path, hub, recipe, capsys) -> None:
    """The client's links may lead nowhere; one that leads out of the folder is refused."""
    assert main(["prefetch", "mine.toml", "--to", "brought"]) == 0
    (weights,) = (tmp_path / "brought/hub").rglob("snapshots/*/model.safetensors")
    (weights.parent / "notes").mkdir()
    weights.resolve().unlink()
    assert main(["prefetch", "mine.toml", "--to", "brought"]) == 0
    assert weights.read_bytes() == b"w" * 5000
    own = tmp_path / weights.resolve().name  # named as the hub would, and of other content
    own.write_bytes(b"mine")
    weights.unlink()
    weights.symlink_to(own)
    capsys.readouterr()
    assert main(["prefetch", "mine.toml", "--to", "brought"]) == 1
    assert "which Kielo did not write" in capsys.readouterr().err and own.read_bytes() == b"mine"


def test_what_was_not_brought_is_refused_and_not_looked_for(
    tmp_path, monkeypatch, hub, recipe, capsys
) -> None:
    """Each in one line with the command that brings it; a folder that is not whole is no such folder."""
    assert main(["prefetch", "mine.toml", "--to", "brought"]) == 0
    monkeypatch.setenv("KIELO_PREFETCHED", str(tmp_path / "brought"))
    hub.asked.clear()
    capsys.readouterr()
    other = ["--set", "model.weights=hf:org/two", "--set", "tokenizer.path=hf:org/two"]
    assert (
        main(["plan", "mine.toml", *other, "--cluster", "lumi_g", "--nodes", "1", "--set", "train.tokens=1B"])
        == 1
    )
    assert "kielo prefetch RECIPE --to DIR" in capsys.readouterr().err
    text = recipe.read_text().replace('subset = "et"', 'subset = "fi"')
    recipe.write_text(text)
    assert main(["run", "mine.toml", "--only", "corpus"]) == 1
    assert "corpus.sources, wiki: is not in KIELO_PREFETCHED" in capsys.readouterr().err and hub.asked == []
    (tmp_path / "brought/prefetched.json").unlink()
    assert main(["run", "mine.toml", "--only", "corpus"]) == 1
    assert "copy the whole folder" in capsys.readouterr().err


def test_a_launch_on_an_offline_site_says_what_it_lacks(tmp_path, monkeypatch, hub, recipe, capsys) -> None:
    """One line beside the plan; with the folder none, and jobs are told where it is."""
    flags = ["--cluster", "leonardo_booster", "--account", "a", "--nodes", "1", "--dry-run"]
    small = ["--set", 'corpus.sources=[{name="wiki",huggingface_dataset="org/one"}]']
    assert main(["launch", "viking_7b", *flags, "--nodes", "16", *small]) == 0
    told = capsys.readouterr().out
    assert "the text of wiki" in told and "kielo prefetch" in told
    assert (
        main(
            [
                "launch",
                "viking_7b",
                *flags,
                "--nodes",
                "16",
                *small,
                "--cluster",
                "lumi_g",
                "--account",
                "project_1",
            ]
        )
        == 0
    )
    assert "kielo prefetch" not in capsys.readouterr().out


@pytest.fixture
def asked_of_pip(tmp_path, monkeypatch) -> list:
    """Return what pip is asked, and the constraints that it gets. This pip makes wheels by name."""
    asked, real = [], subprocess.run

    def pip(command, **options):
        if "pip" not in command:
            return real(command, **options)
        asked.append(command[4:])
        place = Path(command[command.index("--dest" if "download" in command else "--wheel-dir") + 1])
        (place / ("torch-2.10.0-cp312.whl" if "download" in command else "kielo-0.1.0-py3.whl")).touch()
        if "--constraint" in command:
            asked.append(Path(command[command.index("--constraint") + 1]).read_text())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("Kord elas kuningas\n")
    monkeypatch.setattr(subprocess, "run", pip)
    return asked


@pytest.mark.parametrize("sets, extras", [
    ("corpus.near_copies=hplt", "near-copies"), ("corpus.engine=ray", "ray"),
    ("corpus.words=icu", "segmentation"), ("corpus.mask_personal_data=['email']", "quality"),
    ("corpus.sources=crawl/a.wet.gz", "warc"), ("corpus.sources=crawl/*.gz", "warc"),
    ("corpus.sources=crawl", "warc"), ("corpus.sources=elsewhere/*.warc.gz", "warc"),
    ("corpus.sources=elsewhere", ""), ("train.precision=fp8", "fp8"), ("train.precision=bf16", ""),
    ("train.precision_changes=[[50,'fp8']]", "fp8"), ("checkpoint.copy_to=s3://bucket/run", "remote"),
    ("model.model_type=modernbert model.num_key_value_heads=4 train.objective=masked_tokens "
     "evaluate.part_of_speech.train=a.conllu evaluate.part_of_speech.dev=b.conllu", "tagging"),
])  # fmt: skip
def test_wheels_have_the_packages_of_the_recipe(tmp_path, asked_of_pip, sets, extras) -> None:
    """Wheels come for keys, and for web archives, which are known by files here or by the path."""
    (tmp_path / "crawl").mkdir()
    (tmp_path / "crawl" / "a.wet.gz").touch()
    own = [word for set in ("corpus.sources=a.txt", *sets.split()) for word in ("--set", set)]
    assert main(["prefetch", "own_text", *own, "--to", "brought", "--wheels", "3.12"]) == 0
    (wanted,) = (word for word in asked_of_pip[1] if word.startswith("kielo["))
    assert wanted == f"kielo[{','.join(filter(None, ['train', extras]))}]"
    known = tomllib.loads(Path(source_of_kielo(), "pyproject.toml").read_text())["project"]
    assert set(wanted[6:-1].split(",")) <= set(known["optional-dependencies"])


def test_a_package_that_pip_cannot_bring_is_told(asked_of_pip, capsys) -> None:
    own = ["--set", "corpus.sources=a.txt", "--set", "corpus.quality=hplt"]
    assert main(["prefetch", "own_text", *own, "--to", "brought", "--wheels", "3.12"]) == 0
    assert "not brought: docscorer" in capsys.readouterr().err


def test_wheels_are_those_of_the_nodes(tmp_path, asked_of_pip, capsys) -> None:
    """pip is asked for the cluster's processors, Python and torch; what came is pinned for site.sh."""
    own = ["--set", "corpus.sources=a.txt", "--set", "cluster=roihu"]
    assert main(["prefetch", "own_text", *own, "--to", "brought", "--wheels", "3.12"]) == 0
    assert "copy the recipe's own files yourself: a.txt" in capsys.readouterr().out
    wheel, download, pin = asked_of_pip
    assert wheel[1:3] == ["wheel", "--no-deps"] and pin == "torch==2.10.*\n"
    assert {"--python-version=3.12", "--platform=manylinux_2_28_aarch64", "kielo[train]"} <= set(download)
    pins = (tmp_path / "brought/wheels/constraints.txt").read_text()
    assert pins == "# written by kielo prefetch\nkielo==0.1.0\ntorch==2.10.0\n"
    assert [path.name for path in (tmp_path / "brought/wheels").iterdir() if path.name[0] == "."] == []
    (tmp_path / "brought/wheels/constraints.txt").write_text("mine\n")
    assert main(["prefetch", "own_text", *own, "--to", "brought", "--wheels", "3.12"]) == 1
    assert (tmp_path / "brought/wheels/constraints.txt").read_text() == "mine\n"
