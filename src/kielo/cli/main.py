"""The words: parse, then call one verb. A room is imported only when its verb is used, so `--help` stays quick.

Exit codes: 0 done, 1 failed with a message that says what would work, 2 usage, 75 stopped on purpose (requeue), 130
interrupted. With KIELO_TRACEBACK=1 in the environment a failure shows its traceback as well.
"""

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from kielo import __version__
from kielo.cli.failure import report_unexpected, sentence
from kielo.cli.terminal import lasting_output, open_standard_streams
from kielo.train.signals import INTERRUPTED

STAGES = ("corpus", "tokenizer", "pack", "train", "verify", "evaluate", "export", "report")
REQUEUE = 75
_WORKS_ON = ("run", "train")  # their exit code is that of the work, whatever becomes of the output

_RECIPE_HELP = "path of a recipe, or the name of a shipped one (see `kielo recipes`)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kielo",
        description="From a language's raw text to its own language model.",
        epilog="example: kielo run demo_estonian",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")

    def verb(name: str, handler: str, summary: str, example: str, group=verbs) -> argparse.ArgumentParser:
        """`handler` is "module:function" below kielo.cli."""
        added = group.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog="example: " + example,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(handler=handler)
        return added

    def takes_recipe(added: argparse.ArgumentParser, nargs: str | None = None) -> None:
        added.add_argument("recipe", metavar="RECIPE", help=_RECIPE_HELP, nargs=nargs)
        added.add_argument(
            "--set", dest="sets", action="append", default=[], metavar="KEY=VALUE",
            help="change one value, e.g. --set train.tokens=1000000 (may be given often)",
        )

    added = verb("run", "run:run", "every stage that is not done yet, in order",
                 "kielo run demo_estonian --set corpus.sources=my_text.txt")
    takes_recipe(added)
    added.add_argument("--from", dest="first", choices=STAGES, metavar="STAGE", help="begin with this stage")
    added.add_argument("--to", dest="last", choices=STAGES, metavar="STAGE", help="end with this stage")
    added.add_argument("--only", choices=STAGES, metavar="STAGE", help="this stage alone; one of " + ", ".join(STAGES))
    added.add_argument("--ranks", type=int, default=1, help="processes for training on this machine")
    added.add_argument("--json", action="store_true", help="print summary.json at the end instead of tables")

    added = verb("train", "train:train", "the training stage alone",
                 "kielo train RECIPE --ranks 2\n         torchrun --nproc-per-node 8 --no-python kielo train RECIPE"
                 "\n         srun kielo train RECIPE")
    takes_recipe(added)
    added.add_argument("--ranks", type=int, default=None, help="start so many processes on this machine")
    added.add_argument("--shutdown-seconds", type=int, default=600, help="time to save after a stop signal (with --ranks)")
    added.add_argument("--profile", type=int, nargs="?", const=10, metavar="STEPS",
                       help="from the third step on, record so many (default: 10): where their time goes, and a trace")
    added.add_argument("--json", action="store_true", help="print the outcome as JSON")

    added = verb("plan", "plan:plan", "which layouts fit a machine, how fast, at what cost, and why",
                 "kielo plan estonian_llama31_70b --nodes 4..256"
                 "\n         kielo plan estonian_llama31_70b --nodes 16 --compare tp8pp4,tp8pp8"
                 "\n         kielo plan estonian_llama31_70b --nodes 16 --why tp8pp4 --plot pictures"
                 "\n         kielo plan demo_estonian --ranks 2 --resolve"
                 "\n         kielo plan --from-measurement runs/demo_estonian/train/metrics.jsonl --to my_machine.toml")
    takes_recipe(added, nargs="?")
    added.add_argument("--cluster", help="cluster card (see `kielo clusters`); default: the recipe's")
    added.add_argument("--nodes", metavar="N", help="16, or 4,8,12, or 4..256 (doubled from the first to the last)")
    added.add_argument("--top", type=int, metavar="K", help="list so many layouts for each number of nodes")
    added.add_argument("--all", action="store_true", help="name every layout that is not listed, with why")
    added.add_argument("--compare", metavar="A,B", help="layouts side by side, by (parts of) their names: tp8pp4,tp8pp8")
    added.add_argument("--why", metavar="LAYOUT", help="what bounds this layout, in words; with --plot its timeline")
    added.add_argument("--plot", metavar="DIR", help="draw what was asked for into this folder, as SVG")
    added.add_argument("--wall-hours", type=float, metavar="H", help="longest job; default: the site's")
    added.add_argument("--machine", metavar="FILE", help="a machine's card made by --from-measurement")
    added.add_argument("--from-measurement", nargs="+", metavar="METRICS", help="metrics.jsonl of your own runs: makes a card")
    added.add_argument("--to", metavar="FILE", help="where --from-measurement writes the card")
    added.add_argument("--resolve", action="store_true", help="write resolved.toml into the run folder")
    added.add_argument("--layout", metavar="LAYOUT", help="with --resolve: this layout in place of the recipe's")
    added.add_argument("--ranks", type=int, help="with --resolve: ranks in place of --nodes; default: 1")
    added.add_argument("--json", action="store_true", help="print all figures as JSON, in seconds and bytes")

    added = verb("rehearse", "rehearse:rehearse", "one rank of the real job on this machine: memory, FLOPs and collectives",
                 "kielo rehearse estonian_llama31_70b --cluster lumi_g --nodes 4 --all-stages")
    takes_recipe(added)
    added.add_argument("--cluster", help="cluster card (see `kielo clusters`); default: the recipe's")
    added.add_argument("--nodes", type=int, help="nodes of the cluster; default: 1")
    added.add_argument("--ranks", type=int, help="ranks of the job, in place of --nodes")
    which = added.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, help="the rank to be; default: 0")
    which.add_argument("--stage", type=int, help="the first rank with this pipeline stage")
    which.add_argument("--all-stages", action="store_true", help="the first rank of each pipeline rank, one after another")
    added.add_argument("--json", action="store_true", help="print all figures, in bytes, as JSON")

    group = verb("verify", "verify:parity", "is it the same model?", "kielo verify parity demo_estonian")
    proofs = group.add_subparsers(dest="proof", metavar="PROOF", required=True)
    added = verb("parity", "verify:parity", "Kielo against Hugging Face: logits, loss, gradients, optimiser steps",
                 "kielo verify parity demo_estonian --steps 20", proofs)
    takes_recipe(added)
    added.add_argument("--steps", type=int, help="optimiser steps; default: verify.parity_steps")
    added.add_argument("--json", action="store_true", help="print the certificate as JSON")

    added = verb("layouts", "verify:layouts", "every layout against one process: loss, gradient norm, gradients, weights",
                 "kielo verify layouts demo_estonian\n         kielo verify layouts demo_estonian --case 'tensor2*'", proofs)
    takes_recipe(added)
    added.add_argument("--case", dest="cases", action="append", metavar="NAME",
                       help="this case, or those that a shell pattern fits (may be given often); default: all")
    added.add_argument("--steps", type=int, default=10, help="optimiser steps of each case; default: 10")
    added.add_argument("--json", action="store_true", help="print the certificate as JSON")

    added = verb("round-trip", "verify:round_trip", "Hugging Face weights imported and exported again: every tensor the same",
                 "kielo verify round-trip runs/demo_estonian/hf\n         kielo verify round-trip hf:OWNER/NAME", proofs)
    added.add_argument("weights", metavar="WEIGHTS", help="a Hugging Face folder, or hf:OWNER/NAME on the hub")
    added.add_argument("--keep", metavar="DIR", help="leave the export in this new folder; default: all is removed")
    added.add_argument("--json", action="store_true", help="print every tensor's dtype, shape and sha256 as JSON")

    added = verb("evaluate", "evaluate:evaluate", "bits per byte, baselines and samples; or samples of any Hugging Face folder",
                 "kielo evaluate demo_estonian\n         kielo evaluate runs/demo_estonian/hf demo_estonian")
    added.add_argument("model", metavar="MODEL", help="a recipe (its newest checkpoint) or a Hugging Face folder")
    added.add_argument("recipe", metavar="RECIPE", nargs="?", help=_RECIPE_HELP)
    added.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    added.add_argument("--json", action="store_true")

    added = verb("export", "export:export", "a checkpoint as a Hugging Face folder",
                 "kielo export runs/demo_estonian --to my_model\n         "
                 "kielo export runs/demo_estonian/train/checkpoints/step_00000732 --to my_model --dtype bf16")
    added.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a checkpoint, or of a run (its newest whole one)")
    added.add_argument("--to", required=True, metavar="DIR", help="folder to make; cut short, the same command goes on")
    added.add_argument("--dtype", choices=("source", "fp32", "bf16", "fp16"),
                       help="source: names and dtypes of the weights that training began from; default: source where "
                            "there were any, else fp32")
    added.add_argument("--max-shard-gb", type=float, default=5.0, metavar="GB", help="size of a file of weights; default: 5")
    added.add_argument("--tokenizer", metavar="DIR", help="folder with a tokenizer.json; default: the run's")
    added.add_argument("--json", action="store_true", help="print what was written as JSON")

    group = verb("tokenizer", "look:measure", "measure tokenizers", "kielo tokenizer measure A B --text file.txt")
    words = group.add_subparsers(dest="word", metavar="WORD", required=True)
    added = verb("measure", "look:measure", "tokens per word, bytes per token, exact round trip, Rényi efficiency",
                 "kielo tokenizer measure runs/demo_estonian/tokenizer --text file.txt", words)
    added.add_argument("tokenizers", nargs="+", metavar="DIR", help="folders with a tokenizer.json")
    added.add_argument("--text", required=True, metavar="FILE", help="plain text, one document a line")
    added.add_argument("--json", action="store_true")

    group = verb("checkpoint", "checkpoint:list_", "list, show, verify and average checkpoints",
                 "kielo checkpoint list runs/demo_estonian")
    words = group.add_subparsers(dest="word", metavar="WORD", required=True)
    added = verb("list", "checkpoint:list_", "a run's checkpoints: step, tokens, loss, size, complete or damaged",
                 "kielo checkpoint list runs/demo_estonian\n         kielo checkpoint list runs/demo_estonian --verify", words)
    added.add_argument("run", metavar="RUN", help="run folder")
    added.add_argument("--verify", action="store_true", help="read every byte, not only sizes")
    added.add_argument("--json", action="store_true")
    one_or_all = "a checkpoint, or the folder of a run"
    added = verb("show", "checkpoint:show", "what a checkpoint holds; of a run, the newest",
                 "kielo checkpoint show runs/demo_estonian"
                 "\n         kielo checkpoint show runs/demo_estonian/train/checkpoints/newest --tensors", words)
    added.add_argument("checkpoint", metavar="RUN_OR_CHECKPOINT", help=one_or_all)
    added.add_argument("--tensors", action="store_true", help="every tensor with its dtype, shape and number of pieces")
    added.add_argument("--json", action="store_true")
    added = verb("verify", "checkpoint:verify", "read every byte and compare it with its checksum; changes nothing",
                 "kielo checkpoint verify runs/demo_estonian"
                 "\n         kielo checkpoint verify runs/demo_estonian/train/checkpoints/step_00000500", words)
    added.add_argument("checkpoint", metavar="RUN_OR_CHECKPOINT", help=one_or_all)
    added.add_argument("--json", action="store_true")
    added = verb("average", "checkpoint:average", "the mean of the weights of several checkpoints of one run",
                 "cd runs/demo_estonian/train && kielo checkpoint average checkpoints/step_* --to averages/last", words)
    added.add_argument("checkpoints", metavar="CHECKPOINT", nargs="+", help="folder of a checkpoint; at least two")
    added.add_argument("--to", required=True, metavar="DIR", help="folder to make; inside the run's, `kielo export` finds the tokenizer")

    added = verb("data", "look:data", "the documents that made a step", "kielo data demo_estonian --step 17")
    takes_recipe(added)
    added.add_argument("--step", type=int, required=True, help="optimiser step, from 1")
    added.add_argument("--json", action="store_true")

    added = verb("show", "look:show", "every value of a recipe and where it came from",
                 "kielo show demo_estonian --set train.tokens=1000000")
    takes_recipe(added)
    added.add_argument("--json", action="store_true")

    added = verb("recipes", "look:recipes", "the shipped recipes; --copy writes one here to change",
                 "kielo recipes --copy demo_estonian")
    added.add_argument("--copy", metavar="NAME", help="copy this recipe into the current folder")
    added.add_argument("--json", action="store_true")
    verb("schema", "look:schema", "the JSON Schema of recipes, for editors", "kielo schema > kielo.schema.json")
    for name, what in (("clusters", "the cluster cards"), ("languages", "the language cards")):
        verb(name, "look:" + name, what, "kielo " + name).add_argument("--json", action="store_true")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    open_standard_streams()
    with lasting_output() as output:
        try:
            options = _parser().parse_args(arguments)
            code = _call(options)
        except SystemExit as usage:  # argparse has said what there is to say
            options, code = None, usage.code
        output.flush()
        if output.failure is None or isinstance(output.failure, BrokenPipeError):  # `kielo show … | head`
            return code
        _say(f"the output could not be written ({output.failure})")
        is_work = options is not None and options.verb in _WORKS_ON
        return code if is_work else code or 1


def _call(options: argparse.Namespace) -> int:
    """Exit code of the verb, whose every exception ends here in a message."""
    if options.version:
        print(__version__)
        return 0
    if options.verb is None:
        _parser().print_help()
        return 2
    module, function = options.handler.split(":")
    try:
        return getattr(importlib.import_module("kielo.cli." + module), function)(options) or 0
    except KeyboardInterrupt:
        _say("interrupted; what was finished stays, the same command goes on from there")
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("KIELO_TRACEBACK"):
            traceback.print_exc()
        _say(sentence(error) or report_unexpected(error))
        return 1


def _say(message: str) -> None:
    print(f"kielo: {message}", file=sys.stderr, flush=True)
