"""Wrong usages, as people type them: each is answered by one line that names the fix.

No traceback, no words of pydantic or argparse's usage, no file: exit code 1, or 2 for flags and verbs.
"""

import re
from pathlib import Path

import pytest

from kielo.cli.main import main

OUT = ["--set", "folder=out"]


def setting(value: str) -> list[str]:
    return ["show", "demo_estonian", "--set", value]


# What is typed → a part of the answer that helps.
WRONG: dict[str, tuple[list[str], str]] = {
    "a section set to a number": (setting("train=5"), "a key of it, such as train.tokens"),
    "a language by its name": (setting("language=finnish"), "did you mean fi?"),
    "a cluster by half its name": (setting("cluster=lumi"), "did you mean lumi_g?"),
    "a name with a space": (setting("name=my model"), "my_model"),
    "an empty name": (setting("name="), "Latin letters"),
    "an empty size": (["plan", "--params", ""], "such as 350M or 3B"),
    "a switch for a number": (setting("model.num_hidden_layers=true"), "Fix: a number"),
    "a switch for a rate": (setting("train.learning_rate=true"), "Fix: a number"),
    "a negative budget": (setting("train.tokens=-5"), "a number greater than 0"),
    "a broken budget": (setting("train.tokens=1.5"), "a whole number"),
    "a budget in words": (setting("train.tokens=3 billion"), "3B, 350M"),
    "a learning rate of zero": (setting("train.learning_rate=0"), "greater than 0"),
    "a learning rate in words": (setting("train.learning_rate=high"), "Fix: a number"),
    "a family misspelt": (setting("model.model_type=lama"), "did you mean llama?"),
    "a schedule misspelt": (setting("train.schedule=cosin"), "did you mean cosine?"),
    "a precision of others": (setting("train.precision=fp16"), "'fp32', 'bf16' or 'fp8'"),
    "a switch for a choice": (setting("layout.recompute=yes"), "'none', 'attention'"),
    "a degree that ZeRO lacks": (setting("layout.zero=4"), "1, 2 or 3"),
    "no source": (setting("corpus.sources="), "one entry or more"),
    "a number for a source": (setting("corpus.sources=5"), "a list in [ ]"),
    "a share above a half": (setting("dataset.heldout_share=2"), "less than 0.5"),
    "a tiny vocabulary": (setting("tokenizer.vocab_size=100"), "258 or more"),
    "weights without hf:": (setting("model.weights=OWNER/NAME"), "hf:OWNER/NAME"),
    "weights without a tokenizer": (setting("model.weights=hf:gone"), "Fix: tokenizer.path"),
    "a transplant without weights": (setting("model.transplant=mean"), "model.weights = hf:FOLDER"),
    "a transplant of another kind": (setting("model.transplant=wechsel"), "mean"),
    "similarity without vectors": (
        [*setting("model.transplant=focus"), "--set", "model.weights=hf:x"],
        "model.transplant_vectors = FILE",
    ),
    "vectors without similarity": (setting("model.transplant_vectors=a.vec"), 'model.transplant = "focus"'),
    "phases as a number": (setting("phases=3"), "a list in [ ]"),
    "a ramp as a number": (setting("train.batch_ramp=5"), "a table in { }"),
    "a key of another section": (setting("train.compile=true"), "layout.compile"),
    "a key of other tools": (setting("lr=1"), "train.learning_rate"),
    "a key misspelt": (setting("train.token=1"), "train.tokens"),
    "no value": (setting("train.tokens"), "section.key=value"),
    "a size beside a shape": (
        [*setting("model.params=3B"), "--set", "model.hidden_size=64"],
        "Fix: leave one out",
    ),
    "a recipe misspelt": (["show", "demo_estonia"], "did you mean demo_estonian?"),
    "broken TOML": (["show", "bad.toml"], "line 1"),
    "a share of all stages": (["run", "own_text", "--share", "1/2", *OUT], "--only pack"),
    "a share beyond the last": (
        ["run", "own_text", "--only", "pack", "--share", "3/2", *OUT],
        "K from 1 to N",
    ),
    "a folder of no run": (["run", "empty"], "recipe.toml"),
    "text that is not there": (["run", "own_text", "--set", "corpus.sources=gone.txt", *OUT], "gone.txt"),
    "text of an unknown format": (["run", "own_text", "--set", "corpus.sources=a.csv", *OUT], ".parquet"),
    "a folder without text": (["run", "own_text", "--set", "corpus.sources=empty", *OUT], ".jsonl"),
    "a file for the run folder": (["run", "own_text", "--set", "folder=a.csv"], "name another folder"),
    "an unknown case of layouts": (
        ["verify", "layouts", "own_text", "--case", "tp2", *OUT],
        "'context2*'",
    ),
    "a stage misspelt": (["run", "own_text", "--only", "trian"], "did you mean train?"),
    "stages in the wrong order": (
        ["run", "own_text", "--from", "train", "--to", "pack"],
        "corpus, tokenizer",
    ),
    "no ranks": (["run", "own_text", "--ranks", "0"], "give 1 or more"),
    "ranks in words": (["run", "own_text", "--ranks", "many"], "'many': give a whole number"),
    "no recipe": (["run"], "for example: kielo run demo_estonian"),
    "a verb misspelt": (["trian", "own_text"], "did you mean train?"),
    "a flag misspelt": (["train", "own_text", "--rank", "2", "--dryrun"], "did you mean --dry-run?"),
    "no steps to profile": (["train", "own_text", "--profile", "0"], "give 1 or more"),
    "a size in words": (["plan", "--params", "3 billion"], "3B, 350M"),
    "nothing to plan": (["plan"], "--params 3B"),
    "compute in words": (["plan", "--budget", "much", "--corpus", "6B"], "20000h, or FLOPs"),
    "a budget of tokens": (["plan", "--budget", "60B", "--corpus", "6B"], "20000h, or FLOPs"),
    "device-hours of no devices": (["plan", "--budget", "9h", "--corpus", "6B"], "--cluster lumi_g"),
    "a budget without text": (["plan", "--budget", "1e22"], "--corpus 6.6B"),
    "a budget for text that is not there": (["plan", "poro_34b", "--budget", "1e22"], "--corpus 6.6B"),
    "a corpus in words": (["plan", "--budget", "1e22", "--corpus", "all"], "--corpus 6.6B"),
    "a corpus without a budget": (["plan", "--corpus", "6B"], "--budget 20000h"),
    "a budget with layouts": (
        ["plan", "--budget", "1e22", "--corpus", "6B", "--nodes", "4"],
        "Fix: one of them",
    ),
    "more nodes than there are": (["plan", "poro_34b", "--nodes", "9999"], "Fix: 2978"),
    "a card that is not there": (["plan", "poro_34b", "--machine", "gone.toml"], "kielo plan calibrate"),
    "a cluster without a card": (["plan", "--params", "3B", "--cluster", "mine"], "kielo site --new mine"),
    "such a card that is not there": (
        ["plan", "poro_34b", "--cluster", "mine.toml"],
        "kielo site --new mine",
    ),
    "a site misspelt": (["site", "lumi"], "did you mean lumi_g?"),
    "a site without jobs": (["site", "laptop"], "kielo site --new NAME"),
    "an image by half its path": (["site", "lumi_g", "--container", "a.sif"], "docker://NAME"),
    "an image without a container": (
        ["site", "karolina", "--container", "/a.sif"],
        "the card of karolina does not say",
    ),
    "a folder of no site": (["site", "--to", "sites"], "kielo site lumi_g --to DIR"),
    "a new site of an old name": (["site", "--new", "lumi_g"], "has a card already"),
    "a new site with blanks": (["site", "--new", "my site"], "such as my_site"),
    "a new site beside an old one": (
        ["site", "lumi_g", "--new", "mine"],
        "excludes lumi_g. Fix: leave it out",
    ),
    "a folder for nothing": (["prefetch", "own_text"], "--to"),
    "wheels of no Python": (["prefetch", "own_text", "--to", "x", "--wheels", "new"], "Fix: --wheels 3.12"),
    "a launch in a site that was not made": (
        ["launch", "poro_34b", "--cluster=lumi_g", "--nodes=64", "--account=project_1", "--site=empty"],
        "kielo site lumi_g --to empty",
    ),
    "a launch in two environments": (
        [
            "launch",
            "poro_34b",
            "--cluster=lumi_g",
            "--nodes=64",
            "--account=project_1",
            "--site=a",
            "--venv=b",
        ],
        "no --container and no --venv",
    ),
    "one layout twice": (
        ["plan", "compare", "poro_34b", "tp2", "tp2", "--nodes", "16"],
        "two different layouts",
    ),
    "no layout's name": (["plan", "explain", "poro_34b", "zz", "--nodes", "16"], "Fix: tp8"),
    "no such rank": (["rehearse", "poro_34b", "--rank", "9000000"], "ranks 0 to"),
    "no such proof": (["verify", "all", "own_text"], "parity"),
    "a run without training": (["verify", "parity", "own_text", *OUT], "--to train"),
    "a model that is not there": (["verify", "round-trip", "hf:gone"], "hf:OWNER/NAME"),
    "no prompt": (["generate", "own_text"], "for example: kielo generate"),
    "no run to export": (["export", "gone", "--to", "x"], "kielo checkpoint list"),
    "no checkpoints to list": (["checkpoint", "list", "gone"], "runs/demo_estonian"),
    "a subverb misspelt": (["checkpoint", "lst", "gone"], "did you mean list?"),
    "no step": (["data", "own_text"], "for example: kielo data"),
    "a format misspelt": (["schema", "--of", "recip"], "did you mean recipe?"),
    "no such recipe to copy": (["recipes", "--copy", "demo"], "demo_estonian"),
    "a tokenizer that is not there": (["tokenizer", "measure", "gone", "--text", "a.csv"], "tokenizer.json"),
    "a language without a card": (["init", "--language", "Elbonian"], "`kielo languages` lists all"),
    "a recipe in Latin 1": (["show", "latin1.toml"], "iconv -f LATIN1 -t UTF-8 latin1.toml"),
    "a recipe in UTF-16": (["run", "utf16.toml"], "iconv -f UTF-16"),
    "a text without quotes": (["show", "bare.toml"], "text in quotes"),
    "text for a recipe": (["run", "text.txt"], "corpus.sources=text.txt"),
    "weights for a recipe": (["show", "hf:run/hf"], "--set model.weights=hf:run/hf"),
    "a folder inside of a run": (["verify", "parity", "run/hf"], "Did you mean run?"),
    "a run folder for weights": (["verify", "round-trip", "run"], "Fix: run/hf"),
    "a run folder for a tokenizer": (
        ["tokenizer", "measure", "run", "--text", "text.txt"],
        "Fix: run/tokenizer",
    ),
    "a folder of nothing for a model": (["evaluate", "empty", "own_text"], "kielo checkpoint list RUN"),
    "another run's recipe": (["evaluate", "run", "own_text"], "run/hf or"),
    "quotes of a text processor": (["show", "“own_text”"], "“ ” are letters to a shell"),
    "such quotes around a setting": (setting("“train.tokens=5”"), "letters to a shell"),
    "a setting without --set": (["show", "own_text", "train.tokens=5"], "mean --set train.tokens=5?"),
    "a decimal comma": (setting("train.learning_rate=0,001"), "Fix: 0.001"),
    "bytes for tokens": (setting("train.tokens=10 MB"), "3B, 350M"),
    "a subverb of plan misspelt": (["plan", "compar", "own_text", "tp2"], "did you mean kielo plan compare?"),
    "a layout without a subverb": (["plan", "poro_34b", "tp2"], "a subverb comes first: data, compare"),
    "a flag of other tools": (["plan", "poro_34b", "--gpus", "8"], "its flags are --help --set --params"),
    "a flag without its value": (["recipes", "--copy"], "for example: kielo recipes --copy demo_estonian"),
    "nodes as a range": (["rehearse", "poro_34b", "--nodes", "4..8"], "'4..8': give a whole number"),
    "a step in words": (["data", "own_text", "--step", "last"], "--step 17"),
    "a prompt without quotes": (["generate", "own_text", "Kord", "oli"], 'demo_estonian "Dokumendi'),
    "a plot beside JSON of one size": (
        ["plan", "poro_34b", "--nodes", "64", "--json", "--plot", "x"],
        "--nodes 4..256",
    ),
}
_FOREIGN = re.compile(r"Traceback|pydantic|Tuple|Input should|valid dictionary|usage:|BatchRamp")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_usage_gets_one_line_that_helps(name, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text("name = \n")
    (tmp_path / "a.csv").write_text("a,b\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("Kord oli\n")
    (tmp_path / "latin1.toml").write_bytes('name = "hälytys"\n'.encode("latin-1"))
    (tmp_path / "utf16.toml").write_text('name = "x"\n', encoding="utf-16")
    (tmp_path / "bare.toml").write_text("name = mine\n")
    for file in ("recipe.toml", "hf/config.json", "tokenizer/tokenizer.json"):
        (tmp_path / "run" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / file).write_text("")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    arguments, helps = WRONG[name]
    assert main(arguments) in (1, 2)
    error = capsys.readouterr().err
    answer = [line for line in error.splitlines() if not line.startswith("not set in the recipe")]
    assert len(answer) == 1 and answer[0].startswith("kielo") and helps in answer[0]
    assert not _FOREIGN.search(error)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before
