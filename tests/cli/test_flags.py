"""Flags of every verb: what each is without a word, and what it is when it is given. Help, and refusals."""

import argparse
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from kielo.cli.main import STAGES, command_line, main

R = {"recipe": "r", "sets": []}
MACHINE = {"cluster": None, "nodes": None, "machine": None, "json": False}
PLAN = MACHINE | {
    "recipe": None, "sets": [], "params": None, "budget": None, "corpus": None, "wide": False, "top": None,
    "all": False, "plot": None, "batch": False, "failures": None, "wall_hours": None,
}  # fmt: skip
LAUNCH = R | {
    "cluster": None, "nodes": None, "ladder": None, "corpus": None, "pack": None, "account": None,
    "dry_run": False, "partition": None, "hours": None, "jobs": None, "layout": None, "grace": None,
    "spares": 0, "torchrun": False, "preflight": False, "evaluate": False, "watch": False,
    "container": None, "venv": None, "site": None, "json": False,
}  # fmt: skip
# What is typed → the values, all of them.
TYPED: list[tuple[str, dict]] = [
    ("init", {
        "file": None, "language": None, "text": None, "params": None, "cluster": None, "budget": None,
        "model_type": None, "base": None, "from_megatron": None, "from_trainer": None, "variables": None,
    }),
    ("init f --language a --text b --params c --cluster d --budget e --model-type g --from h "
      "--from-megatron i --from-trainer j --variable k=1 --variable l=2", {
        "file": "f", "language": "a", "text": "b", "params": "c", "cluster": "d", "budget": "e",
        "model_type": "g", "base": "h", "from_megatron": "i", "from_trainer": "j",
        "variables": ["k=1", "l=2"],
    }),
    ("docs", {"open": False, "json": False}),
    ("docs --open --json", {"open": True, "json": True}),
    ("completion zsh", {"shell": "zsh"}),
    ("chat a", {"model": "a", "tokens": 200, "temperature": 0.8, "top_k": 50, "seed": 1, "plain": False}),
    ("chat a --tokens 2 --temperature 0 --top-k 3 --seed 4 --plain", {
        "model": "a", "tokens": 2, "temperature": 0.0, "top_k": 3, "seed": 4, "plain": True,
    }),
    ("run r", R | {
        "first": None, "last": None, "only": None, "again": None, "share": None, "ranks": 1, "json": False,
    }),
    ("run r --set a=b --set c=d --from pack --to train --only verify --again pack --share 2/3 --ranks 4 "
      "--json",
     {
        "recipe": "r", "sets": ["a=b", "c=d"], "first": "pack", "last": "train", "only": "verify",
        "again": "pack", "share": "2/3", "ranks": 4, "json": True,
    }),
    ("train r", R | {
        "ranks": None, "shutdown_seconds": 600, "restarts": None, "profile": None, "profile_ranks": None,
        "measure": None, "dry_run": False, "json": False,
    }),
    ("train r --ranks 3 --shutdown-seconds 5 --restarts 6 --profile --profile-ranks 0,2 --measure 7 "
      "--dry-run "
     "--json", R | {
        "ranks": 3, "shutdown_seconds": 5, "restarts": 6, "profile": 10, "profile_ranks": "0,2",
        "measure": 7, "dry_run": True, "json": True,
    }),
    ("train r --profile 8 --measure 2 --json", R | {
        "ranks": None, "shutdown_seconds": 600, "restarts": None, "profile": 8, "profile_ranks": None,
        "measure": 2, "dry_run": False, "json": True,
    }),
    ("plan", PLAN),
    ("plan r --cluster a --nodes b --machine c --json --budget d --corpus e --wide --top 3 --all --plot f "
     "--failures --wall-hours 2.5 --params g --set h=i", {
        "recipe": "r", "sets": ["h=i"], "params": "g", "cluster": "a", "nodes": "b", "machine": "c",
        "json": True, "budget": "d", "corpus": "e", "wide": True, "top": 3, "all": True, "plot": "f",
        "failures": "", "batch": False, "wall_hours": 2.5,
    }),
    ("plan --failures llama3", PLAN | {"failures": "llama3"}),
    ("plan data r", R | {"json": False}),
    ("plan data r --json", R | {"json": True}),
    ("plan compare r a b", R | MACHINE | {"layouts": ["a", "b"], "plot": None, "wall_hours": None}),
    ("plan compare r a --plot p --wall-hours 3",
     R | MACHINE | {"layouts": ["a"], "plot": "p", "wall_hours": 3.0}),
    ("plan explain r a", R | MACHINE | {"layout": "a", "plot": None, "wall_hours": None}),
    ("plan explain r a --plot p --wall-hours 4",
     R | MACHINE | {"layout": "a", "plot": "p", "wall_hours": 4.0}),
    ("plan calibrate a b --to c", {"metrics": ["a", "b"], "to": "c"}),
    ("plan resolve r", R | MACHINE | {"layout": None, "ranks": None}),
    ("plan resolve r --layout a --ranks 5", R | MACHINE | {"layout": "a", "ranks": 5}),
    ("rehearse", {
        "recipe": None, "sets": [], "params": None, "cluster": None, "nodes": None, "ranks": None,
        "rank": None, "stage": None, "all_stages": False, "evaluation": False, "json": False,
    }),
    ("rehearse r --params a --cluster b --nodes 2 --ranks 3 --rank 4 --json", {
        "recipe": "r", "sets": [], "params": "a", "cluster": "b", "nodes": 2, "ranks": 3, "rank": 4,
        "stage": None, "all_stages": False, "evaluation": False, "json": True,
    }),
    ("rehearse --all-stages --evaluation", {
        "recipe": None, "sets": [], "params": None, "cluster": None, "nodes": None, "ranks": None,
        "rank": None, "stage": None, "all_stages": True, "evaluation": True, "json": False,
    }),
    ("rehearse --stage 6", {
        "recipe": None, "sets": [], "params": None, "cluster": None, "nodes": None, "ranks": None,
        "rank": None, "stage": 6, "all_stages": False, "evaluation": False, "json": False,
    }),
    ("preflight r", R | {"ranks": None, "json": False}),
    ("preflight r --ranks 3 --json", R | {"ranks": 3, "json": True}),
    ("site", {
        "cluster": None, "to": None, "container": None, "wheels": None, "new": None, "json": False,
    }),
    ("site a --to b --container c --wheels d --new e --json", {
        "cluster": "a", "to": "b", "container": "c", "wheels": "d", "new": "e", "json": True,
    }),
    ("prefetch r --to a", R | {"to": "a", "wheels": None, "json": False}),
    ("prefetch r --to a --wheels 3.12 --json", R | {"to": "a", "wheels": "3.12", "json": True}),
    ("prefetch r --to a --wheels", R | {
        "to": "a", "wheels": ".".join(platform.python_version().split(".")[:2]), "json": False,
    }),
    ("launch r", LAUNCH),
    ("launch r --cluster a --nodes 2 --ladder b --corpus 2 --pack 3 --account c --dry-run --partition d "
     "--hours 1.5 --jobs 4 --evaluate --watch --layout e --grace 5 --spares 6 --torchrun --preflight "
     "--container f --venv g --site h --json", {
        "recipe": "r", "sets": [], "cluster": "a", "nodes": 2, "ladder": "b", "corpus": 2, "pack": 3,
        "account": "c", "dry_run": True, "partition": "d", "hours": 1.5, "jobs": 4, "layout": "e",
        "grace": 5, "spares": 6, "torchrun": True, "preflight": True, "container": "f", "venv": "g",
        "site": "h", "json": True, "evaluate": True, "watch": True,
    }),
    ("export a --to b", {
        "checkpoint": "a", "to": "b", "dtype": None, "max_shard_gb": None, "tokenizer": None, "json": False,
        "sets": [], "format": None,
    }),
    ("export a --to b --dtype bf16 --max-shard-gb 2 --tokenizer c --json --set d=e", {
        "checkpoint": "a", "to": "b", "dtype": "bf16", "max_shard_gb": 2.0, "tokenizer": "c", "json": True,
        "sets": ["d=e"], "format": None,
    }),
    ("status a", {"run": "a", "json": False}),
    ("status a --json", {"run": "a", "json": True}),
    ("cancel a", {"run": "a", "now": False}),
    ("cancel a --now", {"run": "a", "now": True}),
    ("verify parity r", R | {
        "proof": "parity", "steps": None, "ranks": None, "precision": None, "sequence_length": None,
        "json": False,
    }),
    ("verify parity r --steps 3 --ranks 4 --precision bf16 --sequence-length 64 --json", R | {
        "proof": "parity", "steps": 3, "ranks": 4, "precision": "bf16", "sequence_length": 64, "json": True,
    }),
    ("verify layouts r", R | {"proof": "layouts", "cases": None, "steps": 10, "json": False}),
    ("verify layouts r --case a --case b --steps 4 --json", R | {
        "proof": "layouts", "cases": ["a", "b"], "steps": 4, "json": True,
    }),
    ("verify round-trip a", {"proof": "round-trip", "weights": "a", "keep": None, "json": False}),
    ("verify round-trip a --keep b --json", {
        "proof": "round-trip", "weights": "a", "keep": "b", "json": True,
    }),
    ("verify export a", {
        "proof": "export", "run": "a", "sets": [], "export": None, "gguf": None, "texts": 4, "json": False,
    }),
    ("verify export a --export b --gguf c --texts 2 --json --set d=e", {
        "proof": "export", "run": "a", "sets": ["d=e"], "export": "b", "gguf": "c", "texts": 2, "json": True,
    }),
    ("verify position-heads a b", {
        "proof": "position-heads", "weights": "a", "text": Path("b"), "json": False,
    }),
    ("verify position-heads a b --json", {
        "proof": "position-heads", "weights": "a", "text": Path("b"), "json": True,
    }),
    ("evaluate m", {
        "model": "m", "recipe": None, "sets": [], "ranks": None, "precision": None, "watch": False,
        "once": False, "json": False, "tasks": None, "euroeval": False,
    }),
    ("evaluate m r --json --set a=b --ranks 2 --precision fp32 --watch --once --tasks c,d --euroeval", {
        "model": "m", "recipe": "r", "sets": ["a=b"], "ranks": 2, "precision": "fp32", "watch": True,
        "once": True, "json": True, "tasks": "c,d", "euroeval": True,
    }),
    ("generate m p", {
        "model": "m", "prompt": "p", "tokens": 200, "temperature": 0.8, "top_k": 50, "seed": 1, "json": False,
    }),
    ("generate m p --tokens 3 --temperature 0.5 --top-k 4 --seed 6 --json", {
        "model": "m", "prompt": "p", "tokens": 3, "temperature": 0.5, "top_k": 4, "seed": 6, "json": True,
    }),
    ("tokenizer measure a b", {
        "subverb": "measure", "tokenizers": ["a", "b"], "text": None, "heldout": None, "parallel": None,
        "model": None, "bytes": None, "relearn": None, "cluster": None, "nodes": None, "json": False,
    }),
    ("tokenizer measure a --text c --heldout d --parallel e f --model g --bytes h --relearn i --cluster j "
     "--nodes 3 --json", {
        "subverb": "measure", "tokenizers": ["a"], "text": "c", "heldout": "d", "parallel": ["e", "f"],
        "model": "g", "bytes": "h", "relearn": "i", "cluster": "j", "nodes": 3, "json": True,
    }),
    ("tokenizer map a b", {
        "subverb": "map", "old": "a", "new": "b", "vectors": None, "examples": 20,
        "json": False,
    }),
    ("tokenizer map a b --vectors c --examples 3 --json", {
        "subverb": "map", "old": "a", "new": "b", "vectors": "c", "examples": 3, "json": True,
    }),
    ("checkpoint list a", {"subverb": "list", "run": "a", "verify": False, "json": False}),
    ("checkpoint list a --verify --json", {"subverb": "list", "run": "a", "verify": True, "json": True}),
    ("checkpoint show a", {"subverb": "show", "checkpoint": "a", "tensors": False, "json": False}),
    ("checkpoint show a --tensors --json", {
        "subverb": "show", "checkpoint": "a", "tensors": True, "json": True,
    }),
    ("checkpoint verify a", {"subverb": "verify", "checkpoint": "a", "json": False}),
    ("checkpoint verify a --json", {"subverb": "verify", "checkpoint": "a", "json": True}),
    ("checkpoint copy a --to s3://b", {
        "subverb": "copy", "checkpoint": "a", "to": "s3://b", "json": False,
    }),
    ("checkpoint copy s3://b/step_1 --to a --json", {
        "subverb": "copy", "checkpoint": "s3://b/step_1", "to": "a", "json": True,
    }),
    ("checkpoint average a b --to c", {"subverb": "average", "checkpoints": ["a", "b"], "to": "c"}),
    ("data r --step 3", R | {"step": 3, "json": False}),
    ("data r --step 4 --json", R | {"step": 4, "json": True}),
    ("show r", R | {"json": False}),
    ("show r --json", R | {"json": True}),
    ("recipes", {"copy": None, "json": False}),
    ("recipes --copy a --json", {"copy": "a", "json": True}),
    ("schema", {"of": None}),
    ("schema --of recipe", {"of": "recipe"}),
    ("clusters", {"json": False}),
    ("clusters --json", {"json": True}),
    ("languages", {
        "language": None, "measure": None, "identifier": "py3langid", "learn": None, "samples": None,
        "copy": False, "json": False,
    }),
    ("languages a --measure b --identifier c --learn d --sample e=f --sample g=h --copy --json", {
        "language": "a", "measure": "b", "identifier": "c", "learn": "d", "samples": ["e=f", "g=h"],
        "copy": True, "json": True,
    }),
]  # fmt: skip


def parsed(words: list[str]) -> dict:
    options = vars(command_line().parse_args(words, argparse.Namespace(verb=None)))
    return {key: value for key, value in options.items() if key not in ("handler", "verb", "version")}


@pytest.mark.parametrize(("words", "values"), TYPED, ids=[words for words, _ in TYPED])
def test_flags_have_these_values(words, values) -> None:
    assert parsed(words.split()) == values


SUBVERBS = {
    "plan": ["data", "compare", "explain", "calibrate", "resolve"],
    "verify": ["parity", "layouts", "round-trip", "export", "position-heads"],
    "tokenizer": ["measure", "map"],
    "checkpoint": ["list", "show", "verify", "copy", "average"],
}
VERBS = (
    "init recipes languages docs completion tokenizer data prefetch run train verify show report checkpoint "
    "schema clusters plan rehearse site preflight launch status cancel evaluate generate chat export publish"
)


def test_each_verb_has_its_examples(capsys) -> None:
    """At the end of its help, each of its own verb; a required argument is asked for with the first."""
    listed = [[verb] for verb in VERBS.split(" ")]
    listed += [[verb, subverb] for verb, subverbs in SUBVERBS.items() for subverb in subverbs]
    for words in listed:
        assert main([*words, "--help"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: {' '.join(['kielo', *words])} ")
        begin = {"preflight": "", "average": "cd runs/"}.get(words[-1], "")
        assert f"\nexample: {begin or ' '.join(['kielo', *words])}" in shown, words
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    parts = [line for line in shown.splitlines() if line and len(line.split()) == 1]
    assert parts == ["begin", "text", "train", "look", "cluster", "models"]
    assert shown.count("\n  kielo ") == 8  # for a newcomer
    assert [line.split()[0] for line in shown.splitlines() if line.startswith("    ") and line[4] != " "] == (
        VERBS.split(" ")
    )
    assert main([]) == 2 and capsys.readouterr().out == shown
    assert STAGES == ("corpus", "tokenizer", "pack", "train", "verify", "evaluate", "export", "report")


def test_long_examples_are_folded_before_a_flag(capsys) -> None:
    """In lines of 80 columns, as a shell takes them; the indent of what goes on is two more."""
    assert main(["tokenizer", "measure", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown[shown.index("example:") :] == (
        "example: kielo tokenizer measure runs/demo_estonian/tokenizer \\\n"
        "           --text file.txt\n"
        "         kielo tokenizer measure A B --heldout runs/demo_estonian \\\n"
        "           --parallel et.txt en.txt\n"
        "         kielo tokenizer measure OLD NEW --text et.txt \\\n"
        "           --model estonian_llama31_70b --nodes 16\n"
    )
    assert main(["checkpoint", "average", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown[shown.index("example:") :] == (
        "example: cd runs/demo_estonian/train \\\n"
        "           && kielo checkpoint average checkpoints/step_* --to averages/last\n"
    )


def test_a_list_of_subverbs_is_in_the_help(capsys) -> None:
    """Those that may be left out are a group of their own, in columns."""
    assert main(["plan", "--help"]) == 0
    assert (
        "subverbs (see kielo plan SUBVERB --help):\n"
        "  data       the text by source and phase: tokens, shares, epochs\n"
        "  compare    layouts side by side, with a verdict\n"
        "  explain    what bounds the speed of one layout\n"
    ) in capsys.readouterr().out
    assert main(["plan", "data", "--help"]) == 0
    assert "\n\nThe text by source and phase: tokens, shares, epochs.\n\n" in capsys.readouterr().out
    assert main(["verify", "--help"]) == 0
    assert "\n\nIs it the same model?\n\n" in capsys.readouterr().out


# What is typed → the whole answer, and exit code 2.
REFUSED = {
    "recipes --cop": "kielo recipes: argument --copy: expected one argument; for example: kielo recipes "
    "--copy "
                     "demo_estonian",
    "recipes x": "kielo recipes: unrecognized arguments: x; for example: kielo recipes --copy "
                 "demo_estonian; see kielo recipes --help",
    "clusters --jsn": "kielo clusters: unrecognized arguments: --jsn; did you mean --json?",
    "clusters --zz=3 a": "kielo clusters: unrecognized arguments: --zz=3 a; its flags are --help --json; "
                         "see kielo clusters --help",
    "show r a=b": "kielo show: unrecognized arguments: a=b; did you mean --set a=b?",
    "clusters a=b": "kielo clusters: unrecognized arguments: a=b; for example: kielo clusters; see kielo "
                    "clusters --help",
    "plan dat r": "kielo plan: unrecognized arguments: r; did you mean kielo plan data?",
    "plan r x": "kielo plan: unrecognized arguments: x; a subverb comes first: data, compare, explain, "
    "calibrate, "
                "resolve; see kielo plan --help",
    "data r --step x": "kielo data: --step 'x': give a whole number; for example: kielo data demo_estonian "
                       "--step 17",
    "launch r --hours x": "kielo launch: --hours 'x': give a number; for example: kielo launch "
    "my_recipe.toml "
                          "--account project_462000000 --hours 24 --jobs 5",
    "init --params -3M": "kielo init: --params -3M: give no negative value; for example: kielo init "
                         "--language Finnish --params 3B --cluster lumi --budget 60B",
    "run r --ranks x": "kielo run: --ranks 'x': give a whole number; see kielo run --help",
    "data r": "kielo data: the following arguments are required: --step; for example: kielo data "
    "demo_estonian "
              "--step 17",
    "rehearse --rank 1 --stage 2": "kielo rehearse: argument --stage: not allowed with argument --rank; "
    "see kielo "
                                   "rehearse --help",
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_use_has_this_answer(words, capsys) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr() == ("", REFUSED[words] + "\n")


def test_a_nearest_choice_is_offered(capsys) -> None:
    for words, near in ((["trian"], "train"), (["run", "r", "--only", "pak"], "pack")):
        assert main(words) == 2
        assert capsys.readouterr().err.endswith(f"; did you mean {near}?\n")
    assert main(["run", "r", "--only", "zzzz"]) == 2
    assert capsys.readouterr().err.endswith("; see kielo run --help\n")


def test_training_and_the_report_are_not_made_again(capsys) -> None:
    for stage in ("train", "report"):
        assert main(["run", "r", "--again", stage]) == 2
        assert f"argument --again: invalid choice: '{stage}' (choose from" in capsys.readouterr().err
    for stage in ("corpus", "tokenizer", "pack", "verify", "evaluate", "export"):
        assert parsed(["run", "r", "--again", stage])["again"] == stage


def test_flags_of_launched_runs_load_no_large_library() -> None:
    """`kielo launch --help` answers within a second on a login node."""
    code = (
        "import sys\nfrom kielo.cli.main import command_line\n"
        "for verb in ('launch', 'status', 'cancel'):\n    command_line().subverbs[verb].declare_flags()\n"
        "sys.exit(bool({'torch', 'transformers', 'matplotlib', 'pyarrow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_group_of_subverbs_needs_one(capsys) -> None:
    for words in (["tokenizer"], ["verify"], ["checkpoint"]):
        assert main(words) == 2
        assert "the following arguments are required: " in capsys.readouterr().err
