"""Damage to every file of every stage: truncated, emptied, deleted, one bit flipped, or replaced by another
run's. A verb that reads it names it, or the stage is rebuilt to the last byte; nothing else changes.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.faults.trial import belongings, refused, went_well

HF = ("README.md", "config.json", "generation_config.json", "model.safetensors",
    "model.safetensors.index.json",
      "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")  # fmt: skip
MADE_ANEW = {
    "pack": [
        "heldout.bin",
        "heldout.idx",
        "heldout.ids.txt",
        "heldout.jsonl.zst",
        "text.bin",
        "text.idx",
        "text.ids.txt",
    ],
    "tokenizer": ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "measure.json"],
}
FOLDERS = {"pack": "tokens", "tokenizer": "tokenizer"}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def gone(path: Path) -> None:
    path.unlink()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def no_object(path: Path) -> None:
    path.write_text("[1, 2]\n")


def nothing(path: Path) -> None:
    path.write_text("null\n")


SHORTER = (cut, empty, gone)


@pytest.mark.parametrize("damage", SHORTER)
@pytest.mark.parametrize(
    ("stage", "name"), [(stage, name) for stage, names in MADE_ANEW.items() for name in names]
)
def test_a_stage_with_a_damaged_file_is_made_anew(here, packed, stage, name, damage):
    """The same bytes are there again, and the files of the other stages are as they were."""
    before = belongings(packed / "run" / FOLDERS[stage])
    del before["manifest.json"]  # holds the time of writing
    damage(packed / "run" / FOLDERS[stage] / name)
    went_well(here(packed, "run", "tiny.toml", "--only", stage))
    after = belongings(packed / "run" / FOLDERS[stage])
    assert before.items() <= after.items()


@pytest.mark.parametrize("damage", SHORTER)
@pytest.mark.parametrize("name", HF[1:])
def test_an_export_with_a_damaged_file_is_made_anew(here, finished, name, damage):
    """`--only export` leaves the very bytes of the first export, though the checkpoint did not change."""
    folder = finished / "run" / "hf"
    before = belongings(folder)[name]
    damage(folder / name)
    went_well(here(finished, "run", "tiny.toml", "--only", "export"))
    assert belongings(folder)[name] == before


READERS = {
    ("corpus/manifest.json", "run --only tokenizer"): "corpus",
    ("corpus/manifest.json", "run --only pack"): "corpus",
    ("tokenizer/manifest.json", "run --only pack"): "tokenizer",
    ("tokens/manifest.json", "plan resolve"): "tokens",
    ("tokens/manifest.json", "data --step 3"): "tokens",
    ("tokens/manifest.json", "evaluate"): "tokens",
    ("tokens/text.idx", "data --step 3"): "text",
    ("tokens/text.ids.txt", "data --step 3"): "text.ids.txt",
    ("tokenizer/tokenizer.json", "plan resolve"): "tokenizer.json",
    ("tokenizer/tokenizer.json", "data --step 3"): "tokenizer.json",
    ("train/manifest.json", "run --only verify"): "train",
    ("evaluate/scores.json", "run --only report"): "scores.json",
    ("verify/parity.json", "run --only report"): "parity.json",
    ("corpus/funnel.json", "run --only report"): "funnel.json",
    ("tokenizer/measure.json", "run --only report"): "measure.json",
}


@pytest.mark.parametrize(("name", "words", "damage"), [
    (name, words, damage) for name, words in READERS
    for damage in ((cut, empty, no_object, nothing) if name.endswith(".json") else (cut, empty))
])  # fmt: skip
def test_a_reader_names_the_damaged_file(here, finished, name, words, damage):
    """Each reader names the file, also where it is whole JSON of another shape than was written."""
    damage(finished / "run" / name)
    before = belongings(finished / "run")
    told = "not as Kielo writes it"
    if name.endswith("manifest.json"):
        told = "not a readable manifest of Kielo's"
    elif name.startswith("tokens"):
        told = "of 8 documents, so it is cut short" if "ids" in name else "but the stage wrote 622"
    elif name == "tokenizer/tokenizer.json":
        told = "not a readable tokenizer"
    verbs, dashes, options = words.partition(" --")
    refused(
        here(finished, *verbs.split(), "tiny.toml", *f"{dashes}{options}".split()), told, READERS[name, words]
    )
    assert belongings(finished / "run") == before


@pytest.mark.parametrize("name", ["manifest.json", "index.json", "rank_00000.safetensors"])
@pytest.mark.parametrize("damage", [cut, empty, gone, flip])
@pytest.mark.parametrize("verb", ["verify", "export", "show", "average"])
def test_a_damaged_checkpoint_is_named(here, trained, name, damage, verb):
    """No verb takes it for whole when given its path, and none changes it."""
    checkpoint = trained / "run" / "train" / "checkpoints" / "step_00000020"
    damage(checkpoint / name)
    before = belongings(trained)
    arguments = {
        "verify": ("checkpoint", "verify", checkpoint), "show": ("checkpoint", "show", checkpoint),
        "export": ("export", checkpoint, "--to", "out"),
        "average":
            ("checkpoint", "average", checkpoint, checkpoint.with_name("step_00000015"), "--to", "mean"),
    }[verb]  # fmt: skip
    outcome = here(trained, *arguments)
    if verb == "verify":
        assert outcome.code == 1 and f"{checkpoint}\tdamaged: {name}" in outcome.out.replace(
            f"{checkpoint}/", ""
        )
    elif verb == "show" and name == "rank_00000.safetensors":
        went_well(outcome)  # the index tells what there is; sizes are compared, every byte is `verify`'s
        assert ("damaged: " in outcome.out) == (damage is not flip)
    elif verb == "show" and outcome.code == 0:
        assert "damaged: " in outcome.out
    else:
        told = "is damaged: "
        if name == "index.json":
            told = "is not a checkpoint: index.json is missing"
            if damage is not gone:  # a flipped bit may leave valid JSON, with another checksum
                told = _first_fault_of_json(checkpoint / name)
            elif verb == "export":
                told = "no checkpoint (no index.json there)"
        elif name == "manifest.json" and verb == "export":
            told = "no manifest.json, so this" if damage is gone else "not a readable manifest of Kielo's"
            if damage is flip and "its own checksum differs" in outcome.err:  # a bit of a value
                told = "manifest.json differs from what was written"
        refused(outcome, told, "step_00000020")
    assert belongings(trained) == before


@pytest.mark.parametrize("damage", [cut, empty, gone, flip])
def test_the_newest_checkpoint_is_passed_over_and_said(here, trained, damage):
    """`list --verify` tells which is whole; `export RUN` takes that one with a warning."""
    damage(trained / "run" / "train" / "checkpoints" / "step_00000020" / "rank_00000.safetensors")
    listed = json.loads(went_well(here(trained, "checkpoint", "list", "run", "--verify", "--json")).out)
    assert [row["state"].split(":")[0] for row in listed] == ["damaged", "verified"] and listed[1]["newest"]
    exported = went_well(here(trained, "export", "run", "--to", "out", "--json"))
    assert "step_00000020 is damaged" in exported.told
    assert json.loads(exported.out[exported.out.index("{") :])["checkpoint"].endswith("step_00000015")


def _first_fault_of_json(path: Path) -> str:
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return "not a checkpoint index"
    return "index.json is not what was written"


INDEX_EDITS = {
    "another version": (
        "is of another version",
        lambda index: index.update(version=999),
    ),
    "no version": (
        "not a checkpoint index",
        lambda index: index.pop("version"),
    ),
    "a file outside": (
        "is not listed in manifest.json",
        lambda index: _first_chunk(index).update(file="../../../../text.txt"),
    ),
    "an absolute file": (
        "is not listed in manifest.json",
        lambda index: _first_chunk(index).update(file="/etc/passwd"),
    ),
    "a negative offset": (
        "bytes long instead of",
        lambda index: _first_chunk(index).update(offset=[-1, 0]),
    ),
    "a shape of billions": (
        "do not make up its shape",
        lambda index: _first(index).update(shape=[10**9, 10**9]),
    ),
    "a shape of words": (
        "do not make up its shape",
        lambda index: _first(index).update(shape=["many"]),
    ),
    "another dtype": (
        "is not what was written",
        lambda index: _first(index).update(dtype="OBJECT"),
    ),
    "no tensors": (
        "does not hold model/embed.weight",
        lambda index: index.update(tensors={}),
    ),
    "tensors as a list": (
        "not a checkpoint index",
        lambda index: index.update(tensors=[]),
    ),
    "an alias of nothing": (
        "is tied to model/nobody, which does not exist",
        lambda index: index.update(aliases={"model/x": "model/nobody"}),
    ),
    "another step": (
        "bytes long instead of",
        lambda index: index.update(step=7),
    ),
    "no identity": (
        "does not name its model",
        lambda index: index["plain"].pop("identity"),
    ),
    "a model of code": (
        "is not a model of this Kielo",
        lambda index: index["plain"]["identity"]["model"].update(model_type="__import__('os')"),
    ),
}


def _first(index: dict) -> dict:
    return next(iter(index["tensors"].values()))


def _first_chunk(index: dict) -> dict:
    return _first(index)["chunks"][0]


@pytest.mark.parametrize("what", INDEX_EDITS)
def test_an_edited_index_is_not_believed(here, trained, what):
    """Whatever a hand (or a stranger) wrote into index.json,
    the manifest does not vouch for it: export refuses.
    """
    path = trained / "run" / "train" / "checkpoints" / "step_00000020" / "index.json"
    index = json.loads(path.read_text())
    told, change = INDEX_EDITS[what]
    change(index)
    path.write_text(json.dumps(index))
    refused(here(trained, "export", path.parent, "--to", "out"), told, "step_00000020")
    assert not (trained / "out").exists()


def test_another_runs_checkpoint_under_this_runs_name(here, trained):
    """The files of step 15 in the folder of step 20, and step 20 copied as step 40:
    neither is what its name says.
    """
    checkpoints = trained / "run" / "train" / "checkpoints"
    shutil.copytree(checkpoints / "step_00000020", checkpoints / "step_00000040")
    refused(
        here(trained, "export", checkpoints / "step_00000040", "--to", "out"),
        "is the manifest of another checkpoint",
        "20",
    )
    exported = went_well(here(trained, "export", "run", "--to", "out"))
    assert "step_00000040 is damaged" in exported.told


PICKLES = (
    "pytorch_model.bin",
    "optimizer.pt",
    "rank_00000.pkl",
    "__init__.py",
    "modeling_tiny.py",
    "conftest.py",
)


@pytest.mark.parametrize("name", PICKLES)
def test_nobodys_code_runs(here, finished, name):
    """A pickle or a module that a stranger laid into a run folder is never opened: it would write `owned`."""
    owned = finished / "owned"
    code = f"import pathlib; pathlib.Path({str(owned)!r}).write_text('x')\n"
    pickle = b"cposix\nsystem\n(S'touch " + str(owned).encode() + b"'\ntR."
    for folder in (
        finished,
        finished / "run",
        finished / "run" / "hf",
        finished / "run" / "train" / "checkpoints" / "step_00000020",
    ):
        (folder / name).write_bytes(code.encode() if name.endswith(".py") else pickle)
    went_well(here(finished, "checkpoint", "list", "run"))
    went_well(here(finished, "checkpoint", "show", "run"))
    went_well(here(finished, "export", "run", "--to", "out"))
    went_well(here(finished, "run", "tiny.toml", "--only", "report"))
    here(finished, "verify", "round-trip", "run/hf")
    here(finished, "evaluate", "run/hf", "tiny.toml")
    assert not owned.exists()


def test_weights_that_are_a_pickle_of_code(here, finished):
    """pytorch_model.bin alone, whose unpickling would run a command: refused, nothing is run."""
    folder, owned = finished / "run" / "hf", finished / "owned"
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (folder / name).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch " + str(owned).encode() + b"'\ntR.")
    refused(here(finished, "verify", "round-trip", "run/hf"), "not a zip: cut short", "pytorch_model.bin")
    refused(
        here(finished, "evaluate", "run/hf", "tiny.toml"),
        "not a causal language model that transformers can load",
        "hf",
    )
    assert not owned.exists()


@pytest.mark.parametrize("key", ["auto_map", "trust_remote_code"])
def test_a_config_that_asks_for_its_own_code(here, finished, key):
    """config.json with `auto_map` points at a module beside it; nobody imports it."""
    folder, owned = finished / "run" / "hf", finished / "owned"
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "auto_map": {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Evil"},
        key: config.get(key, True),
    }
    (folder / "config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "evil.Evil"}})
    )
    (folder / "evil.py").write_text(
        f"import pathlib; pathlib.Path({str(owned)!r}).write_text('x')\nclass Evil: pass\n"
    )
    here(finished, "evaluate", "run/hf", "tiny.toml")
    here(finished, "verify", "round-trip", "run/hf")
    assert not owned.exists()
