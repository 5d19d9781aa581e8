"""`kielo export`: which checkpoint is meant, where its tokenizer is, and what is told."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from kielo.artifact.run_format import with_version
from kielo.checkpoint import llama_cpp
from kielo.checkpoint.average import average
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.cli.main import main
from kielo.models.llama.model import Llama
from tests.checkpoint.layouts import config


@pytest.fixture
def run(tmp_path) -> Path:
    """A run folder with two checkpoints and a tokenizer that names one token."""
    folder = tmp_path / "run"
    plain = {"identity": with_version({"name": "tiny", "model": config().model_dump(mode="json")})}
    checkpointer = Checkpointer(folder / "train" / "checkpoints")
    for step in (1, 2):
        checkpointer.save(
            step, {f"model/{name}": value for name, value in Llama(config()).state_dict().items()}, plain
        )
    checkpointer.settle()
    checkpointer.close()
    (folder / "tokenizer").mkdir()
    Tokenizer(WordLevel({"<s>": 7}, unk_token="<s>")).save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    return folder


def test_a_run_a_checkpoint_and_an_average_are_found_with_their_tokenizer(run, tmp_path, capsys):
    """A run means its newest whole checkpoint; a folder elsewhere needs --tokenizer; the same command twice
    is one export.
    """

    def ask(*arguments: str | Path):
        assert main(["export", *map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    checkpoints = run / "train" / "checkpoints"
    newest = ask(run, "--to", tmp_path / "hf", "--dtype", "bf16", "--max-shard-gb", "0.00001")
    assert newest["step"] == 2 and newest["dtype"] == "bf16" and newest["tensors"] == 21
    assert (
        newest["checkpoint"] == str(checkpoints / "step_00000002")
        and newest["sha256"].keys() == newest["bytes"].keys()
    )
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 2
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["bos_token_id"] == 7
    assert ask(run, "--to", tmp_path / "hf", "--dtype", "bf16", "--max-shard-gb", "0.00001") == newest
    assert main(["export", str(run), "--to", str(tmp_path / "hf")]) == 1
    assert "exists already" in capsys.readouterr().err

    (checkpoints / "step_00000002" / "rank_00000.safetensors").write_bytes(b"damaged")
    assert ask(run, "--to", tmp_path / "older")["step"] == 1
    assert ask(checkpoints / "step_00000001", "--to", tmp_path / "named")["dtype"] == "fp32"


RECIPE = """
name = "tiny"
folder = "run"
language = "et"
[corpus]
sources = [{ name = "help", path = "text.txt", language = ["et", "fi"] }]
[report]
license = "mit"
"""


def front_matter(folder: Path) -> dict:
    return ModelCard.load(folder / "README.md").data.to_dict()


def test_a_recipe_names_its_run_and_the_card_has_its_facts(run, tmp_path, capsys, monkeypatch):
    """So do a run folder and a checkpoint in it by the recipe there; a recipe that says other facts since
    renews the card, unless a person wrote it.
    """
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(RECIPE)
    facts = {"license": "mit", "language": ["et", "fi"]}
    assert main(["export", "run", "--to", "bare"]) == 0
    assert "run: has no recipe.toml, so the model card has no licence" in capsys.readouterr().err
    assert not facts.keys() & front_matter(Path("bare")).keys()
    shutil.copy("tiny.toml", "run/recipe.toml")
    for number, named in enumerate(("tiny.toml", "run", "run/train/checkpoints/step_00000001")):
        assert main(["export", named, "--to", f"hf{number}"]) == 0
        assert facts.items() <= front_matter(Path(f"hf{number}")).items()
    told = capsys.readouterr()
    assert "transformers.AutoModelForCausalLM.from_pretrained('hf2', dtype=\"auto\")" in told.out
    assert not told.err
    assert main(["export", "tiny.toml", "--to", "hf0", "--set", "report.license=apache-2.0"]) == 0
    assert front_matter(Path("hf0"))["license"] == "apache-2.0"
    size = config().hidden_size
    assert main(["export", "tiny.toml", "--to", "hf0", "--set", f"model.hidden_size={size}"]) == 0
    assert main(["export", "tiny.toml", "--to", "hf3", "--set", f"model.hidden_size={2 * size}"]) == 1
    told = f"kielo: --set model.hidden_size={2 * size}: the model of "
    said = capsys.readouterr().err
    assert told in said and f" has hidden_size = {size}. Fix: leave it out" in said
    assert not Path("hf3").exists()
    Path("hf0/README.md").write_text("mine")
    assert main(["export", "tiny.toml", "--to", "hf0"]) == 0
    assert Path("hf0/README.md").read_text() == "mine" and "changed by hand" in capsys.readouterr().err


def test_a_recipe_that_cannot_be_read_does_not_keep_weights_back(run, tmp_path, capsys):
    """Such as one of another version, in the run folder: the card says less, and the reason is told."""
    (run / "recipe.toml").write_text(RECIPE + "[trian]\n")
    assert main(["export", str(run), "--to", str(tmp_path / "hf")]) == 0
    assert "trian" in capsys.readouterr().err and "license" not in front_matter(tmp_path / "hf")


def test_an_average_goes_out_too(run, tmp_path, capsys):
    """Inside the run's folder its tokenizer is found; elsewhere --tokenizer is asked for by name."""
    steps = sorted((run / "train" / "checkpoints").glob("step_*"))
    inside = average(steps, run / "averages" / "last")
    assert main(["export", str(inside), "--to", str(tmp_path / "hf")]) == 0
    assert (
        "the average of 2 checkpoints up to step 2 of the run tiny"
        in (tmp_path / "hf" / "README.md").read_text()
    )
    away = shutil.copytree(inside, tmp_path / "away")
    assert main(["export", str(away), "--to", str(tmp_path / "again")]) == 1
    assert "give --tokenizer DIR" in capsys.readouterr().err
    tokenizer = str(run / "tokenizer")
    assert main(["export", str(away), "--to", str(tmp_path / "again"), "--tokenizer", tokenizer]) == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert all(first[name].equal(second[name]) for name in first)


def test_what_cannot_be_exported_is_named(run, tmp_path, capsys):
    """Exit code 1 and the fix; nothing is made."""
    checkpoint = run / "train" / "checkpoints" / "step_00000001"
    for arguments, told in (
        ([tmp_path / "gone"], "gone: no folder, checkpoint or recipe"),
        ([run, "--tokenizer", tmp_path], "name a folder that has one"),
        ([run, "--max-shard-gb", "0"], "--max-shard-gb 0"),
        ([checkpoint, "--dtype", "source"], "training began from"),
    ):
        assert main(["export", *map(str, arguments), "--to", str(tmp_path / "hf")]) == 1
        assert told in capsys.readouterr().err
    assert not list(tmp_path.glob("hf*"))


@pytest.mark.parametrize("place", ["run/averages/last", "an average"])
def test_the_command_that_follows_an_average_works(run, tmp_path, capsys, monkeypatch, place):
    """`kielo checkpoint average` prints how to export what it wrote, also outside of the run's folder."""
    monkeypatch.chdir(tmp_path)
    steps = sorted(map(str, Path("run/train/checkpoints").glob("step_*")))
    assert main(["checkpoint", "average", *steps, "--to", place]) == 0
    printed = shlex.split(re.search("`(.*)`", capsys.readouterr().out)[1])
    assert printed[0] == "kielo" and ("--tokenizer" in printed) == (place == "an average")
    assert main(printed[1:]) == 0
    assert json.loads(Path(place + "_hf", "config.json").read_text())["bos_token_id"] == 7


def test_a_gguf_file_gives_the_run_s_text_in_llama_cpp(first_run, tmp_path, capsys) -> None:
    """Log-probabilities within 1e-3 of transformers on the exported folder, and the same greedy ids."""
    folder = first_run.recipe.parent / "run"
    if llama_cpp.program() is None:
        pytest.skip("pip install cyllama")
    flags = ["--to", str(tmp_path / "laptop"), "--format", "gguf"]
    assert main(["export", str(first_run.recipe), *flags]) == 0
    said = capsys.readouterr().out
    assert "texts have the same ids in llama.cpp" in said and "laptop.F32.gguf" in said
    proof = json.loads((tmp_path / "laptop" / "gguf.json").read_text())
    assert proof["ids"]["documents"] > 20 and proof["ids"]["difference"] is None
    theirs = AutoModelForCausalLM.from_pretrained(folder / "hf")
    ids = AutoTokenizer.from_pretrained(folder / "hf")("Tere tulemast koju!")["input_ids"][:16]
    with torch.no_grad():
        logs = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
    right = [logs[place, number].item() for place, number in enumerate(ids[1:])]
    (whole,) = theirs.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    (found,), (way_on,) = llama_cpp.scores_of(tmp_path / "laptop" / "laptop.F32.gguf", [ids], 8)
    assert found == pytest.approx(right, abs=1e-3) and way_on == whole[len(ids) :].tolist()
    assert main(["export", str(first_run.recipe), *flags]) == 0  # the same command twice is one export
    capsys.readouterr()
    for wrong, reason in (
        (["--max-shard-gb", "1"], "--max-shard-gb: a GGUF file is one file"),
        (["--dtype", "source"], "dtype 'source' of a GGUF file is not known"),
        (["--dtype", "q8_0"], "exists already and is not this export"),
    ):
        assert main(["export", str(first_run.recipe), *flags, *wrong]) == 1
        assert reason in capsys.readouterr().err
    assert main(["export", str(first_run.recipe), "--to", str(tmp_path / "hf"), "--dtype", "q8_0"]) == 1
    assert "dtype 'q8_0' is not known" in capsys.readouterr().err
