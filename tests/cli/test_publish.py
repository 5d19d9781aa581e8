"""`kielo publish` to a stand-in of the hub, and into a folder: what arrives, what is asked, what goes on."""

import json
import shutil
from pathlib import Path

import pytest

from kielo.cli.main import main
from tests.cli.uploads import Uploads

TOKEN = "hf_secret_of_this_test"


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Uploads:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return Uploads()


@pytest.fixture
def run(first_run, tmp_path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(first_run.recipe.parent / "run", folder)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def test_an_export_arrives_whole_and_private(run, hub, capsys) -> None:
    before = files_of(run)
    command = ["publish", str(run), "team/model", "--endpoint", hub.address, "--yes"]
    assert main(command) == 0
    said = capsys.readouterr()
    there = hub.repositories["team/model"]["main"]
    manifest = json.loads((run / "hf" / "manifest.json").read_text())
    wanted = {name: (run / "hf" / name).read_bytes() for name in [*manifest["files"], "README.md"]}
    certificates = {f"verify/{one.name}": one.read_bytes() for one in (run / "verify").glob("*.json")}
    certificates.pop("verify/manifest.json", None)
    assert certificates and there == wanted | certificates and hub.private == {"team/model": True}
    assert "private unless it exists" in said.out and "model.safetensors" in said.out
    # Nothing in the run has changed, and nothing that was printed has the token, which the server got.
    assert files_of(run) == before and TOKEN not in said.out + said.err and f"Bearer {TOKEN}" in hub.tokens
    hub.asked.clear()
    assert (
        main([*command, "--public", "--json"]) == 0
    )  # again: nothing is sent, and the server's choice stays
    assert not [one for one in hub.asked if "/commit/" in one] and hub.private == {"team/model": True}
    assert json.loads(capsys.readouterr().out)["address"].endswith("/team/model")


def test_an_export_at_an_address(run, tmp_path, capsys) -> None:
    """Each file arrives, a second call sends nothing, and a file of other content there is refused."""
    place = tmp_path / "there"
    command = ["publish", str(run), f"file://{place}", "--yes"]
    assert main(command) == 0 and "copied" in capsys.readouterr().out
    manifest = json.loads((run / "hf" / "manifest.json").read_text())
    for name in [*manifest["files"], "README.md"]:
        assert (place / name).read_bytes() == (run / "hf" / name).read_bytes(), name
    assert main(command) == 0 and "copied 0 of " in capsys.readouterr().out
    (place / "config.json").write_text("other")
    assert (
        main(command) == 1 and "config.json is there already, with other content" in capsys.readouterr().err
    )
    assert main(["publish", str(run), "s3://me:word@bucket/x", "--yes"]) == 1
    assert "has a name or password in it" in capsys.readouterr().err


def test_an_interrupted_publication_goes_on(run, hub, capsys, monkeypatch) -> None:
    """The weights arrive, the small files are refused; the card comes last of all."""
    monkeypatch.setattr("kielo.stages.publication.LARGE_BYTES", 20_000)
    command = ["publish", str(run), "team/model", "--endpoint", hub.address, "--yes"]
    hub.refuse = lambda command, path: (
        413 if "/commit/" in path and hub.repositories["team/model"]["main"] else None
    )
    assert main(command) == 1
    assert "the server answered 413" in capsys.readouterr().err
    assert list(hub.repositories["team/model"]["main"]) == ["model.safetensors"]
    hub.refuse = lambda command, path: None
    hub.asked.clear()
    assert main(command) == 0
    assert not [one for one in hub.asked if one.startswith("PUT")]
    assert list(hub.repositories["team/model"]["main"])[-1] == "README.md"


def test_checkpoints_are_revisions(run, hub, capsys) -> None:
    steps = sorted(int(one.name[5:]) for one in (run / "train" / "checkpoints").glob("step_*"))
    flags = ["--endpoint", hub.address, "--yes", "--revisions"]
    assert main(["publish", str(run), "team/model", *flags, f"{steps[0]}"]) == 0
    there = hub.repositories["team/model"]
    name = f"step_{steps[0]:08d}"
    assert set(there) == {"main", name}
    exported = (run / "revisions" / name / "model.safetensors").read_bytes()
    assert there[name]["model.safetensors"] == exported != there["main"]["model.safetensors"]
    manifest = json.loads((run / "revisions" / name / "manifest.json").read_text())
    wanted = {*manifest["files"], "README.md"}
    assert set(there[name]) == wanted < set(there["main"])  # without main's certificates
    for wrong, reason in (
        ("7777", "has no checkpoint of step 7777. Fix: one of"),
        ("first", "give all, or steps"),
    ):
        assert main(["publish", str(run), "team/model", *flags, wrong]) == 1
        assert reason in capsys.readouterr().err


def test_files_of_an_earlier_publication_are_named_and_only_replaced_as_asked(run, hub, capsys) -> None:
    """transformers loads an old model.safetensors before new shards."""
    old = ("model-00001-of-00001.safetensors", "old.safetensors.index.json", "old.gguf", "verify/old.json")
    files = dict.fromkeys((*old, "README.md", "notes.txt", ".gitattributes"), b"old")
    hub.repositories["team/model"] = {"main": dict(files)}
    command = ["publish", str(run), "team/model", "--endpoint", hub.address, "--yes"]
    assert main(command) == 1
    said = capsys.readouterr()
    assert all(f"main\t{name}\tdeleted" in said.out for name in old)
    assert "main\tREADME.md\treplaced" in said.out and "notes.txt" not in said.out
    assert "Nothing was sent. Fix: --replace" in said.err
    assert hub.repositories["team/model"]["main"] == files
    hub.asked.clear()
    assert main([*command, "--replace"]) == 0
    there = hub.repositories["team/model"]["main"]
    assert there["README.md"] == (run / "hf" / "README.md").read_bytes() and not set(old) & set(there)
    assert there["notes.txt"] == there[".gitattributes"] == b"old"
    del there["config.json"]
    there["pytorch_model.bin"] = b"old"
    assert main([*command, "--replace"]) == 0
    assert "main: Add config.json and Delete pytorch_model.bin" in capsys.readouterr().out
    assert main([*command[:2], "./folder", "--yes", "--replace"]) == 1
    assert "--replace: files of a folder are never replaced" in capsys.readouterr().err


def test_a_gguf_file_of_another_checkpoint_is_refused(run, hub, tmp_path, capsys) -> None:
    command = ["publish", str(run), "team/model", "--endpoint", hub.address, "--yes"]
    steps = sorted((run / "train" / "checkpoints").glob("step_*"))
    for step in (steps[-1], steps[0]):
        to = tmp_path / step.name
        assert main(["export", str(step), "--to", str(to), "--format", "gguf"]) == 0
        (to / "README.md").write_text("of the GGUF folder")
    capsys.readouterr()
    assert main([*command, "--gguf", str(tmp_path / steps[0].name)]) == 1
    assert "is an export of another checkpoint than" in capsys.readouterr().err and not hub.repositories
    assert main([*command, "--gguf", str(tmp_path / steps[-1].name)]) == 0
    there = hub.repositories["team/model"]["main"]
    assert there["README.md"] == (run / "hf" / "README.md").read_bytes()
    assert f"{steps[-1].name}.F32.gguf" in there


def test_a_folder_gets_the_files_and_keeps_others(run, tmp_path, capsys) -> None:
    to = tmp_path / "shared"
    to.mkdir()
    (to / "notes.txt").write_text("ours")
    assert main(["publish", str(run), str(to), "--yes"]) == 0
    assert (to / "notes.txt").read_text() == "ours"
    assert (to / "model.safetensors").read_bytes() == (run / "hf" / "model.safetensors").read_bytes()
    assert main(["publish", str(run), str(to), "--yes"]) == 0
    assert "copied 0 of" in capsys.readouterr().out
    (to / "config.json").write_text("{}")
    assert main(["publish", str(run), str(to), "--yes"]) == 1
    assert "config.json: is there already, with other content" in capsys.readouterr().err
    assert (to / "config.json").read_text() == "{}"
    shutil.copy(run / "hf" / "config.json", to)
    (to / "old.safetensors").write_bytes(b"old")
    assert main(["publish", str(run), str(to), "--yes"]) == 1
    assert "old.safetensors: is of another export" in capsys.readouterr().err


def test_a_copy_overwrites_nothing_that_appears_meanwhile(run, tmp_path, capsys, monkeypatch) -> None:
    to = tmp_path / "shared"
    to.mkdir()
    (to / "config.json.partial").write_text("a person's")
    copy = shutil.copyfile

    def meanwhile(source: Path, aside: Path) -> None:
        copy(source, aside)
        if source.name == "config.json":
            (to / "config.json").write_text("a person's")

    monkeypatch.setattr("kielo.stages.publication.shutil.copyfile", meanwhile)
    assert main(["publish", str(run), str(to), "--yes"]) == 1
    assert "config.json: appeared during the copy, and stays" in capsys.readouterr().err
    assert (to / "config.json").read_text() == (to / "config.json.partial").read_text() == "a person's"
    assert not list(to.rglob("*kielo-partial"))


@pytest.mark.parametrize(
    ("damage", "arguments", "reason"),
    [
        (
            lambda run: (run / "hf" / "model.safetensors").write_bytes(b"x"),
            ["--yes"],
            "not as it was exported",
        ),
        (lambda run: shutil.rmtree(run / "hf"), ["--yes"], "no run folder with an export"),
        (lambda run: None, [], "nobody is here to say yes, and nothing was sent. Fix: --yes"),
        (
            lambda run: None,
            ["--yes", "--gguf", "none"],
            "none: no finished export is there. Fix: kielo export",
        ),
    ],
)
def test_what_is_not_whole_or_not_wished_is_not_sent(
    run, hub, capsys, monkeypatch, damage, arguments, reason
):
    damage(run)
    assert main(["publish", str(run), "team/model", "--endpoint", hub.address, *arguments]) == 1
    assert reason in capsys.readouterr().err and not hub.repositories


def test_refusals_of_the_server_are_named(run, hub, capsys) -> None:
    for status, fix in ((401, "hf auth login"), (403, "a token with the right to write there")):
        hub.refuse = lambda command, path, status=status: status
        assert main(["publish", str(run), "team/model", "--endpoint", hub.address, "--yes"]) == 1
        error = capsys.readouterr().err
        assert fix in error and TOKEN not in error
    for target, reason in (("model", "has no owner. Fix: OWNER/model"), ("a/b/c", "no name on the hub")):
        assert main(["publish", str(run), target, "--endpoint", hub.address, "--yes"]) == 1
        assert reason in capsys.readouterr().err
    hub.server.shutdown()
    hub.server.server_close()
    address = hub.address.replace("://", "://mari:secret@")
    assert main(["publish", str(run), "team/model", "--endpoint", address, "--yes"]) == 1
    said = capsys.readouterr()
    assert f"{hub.address} cannot be reached" in said.err and "secret" not in said.err + said.out
