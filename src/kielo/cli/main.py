"""The words: parse, then call one verb. A room is imported only when its verb is used, so `--help` stays quick.

Exit codes: 0 done, 1 failed with a message that says what would work, 2 usage, 75 stopped on purpose (requeue).
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from kielo.cli.flags import VerbParser, add_verb

STAGES = ("corpus", "tokenizer", "pack", "train", "verify", "evaluate", "export", "report")
REQUEUE = 75

# Verb → its handler, "module:function" below kielo.cli, and what it does. Its flags are declared beside the handler.
_VERBS = {
    "run": ("run:run", "every stage that is not done yet, in order"),
    "train": ("train:train", "the training stage alone"),
    "plan": ("plan:plan", "which layouts fit a machine, how fast, at what cost, and why"),
    "rehearse": ("rehearse:rehearse", "one rank of the real job on this machine: memory, FLOPs and collectives"),
    "verify": ("verify:verify", "is it the same model?"),
    "evaluate": ("evaluate:evaluate", "bits per byte, baselines and samples; or samples of any Hugging Face folder"),
    "export": ("export:export", "a checkpoint as a Hugging Face folder"),
    "tokenizer": ("look:tokenizer", "measure tokenizers"),
    "checkpoint": ("checkpoint:checkpoint", "list, show, verify and average checkpoints"),
    "data": ("look:data", "the documents that made a step"),
    "show": ("look:show", "every value of a recipe and where it came from"),
    "recipes": ("look:recipes", "the shipped recipes; --copy writes one here to change"),
    "schema": ("look:schema", "the JSON Schema of recipes, for editors"),
    "clusters": ("look:clusters", "the cluster cards"),
    "languages": ("look:languages", "the language cards"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kielo",
        description="From a language's raw text to its own language model.",
        epilog="example: kielo run demo_estonian",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=VerbParser)
    for name, (handler, summary) in _VERBS.items():
        add_verb(verbs, name, handler, summary)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.version:
        from kielo import __version__

        print(__version__)
        return 0
    if options.verb is None:
        parser.print_help()
        return 2
    module, function = options.handler.split(":")
    from kielo.recipe.errors import KieloError

    try:
        return getattr(importlib.import_module("kielo.cli." + module), function)(options) or 0
    except KieloError as error:
        print(f"kielo: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("torch", "transformers", "accelerate", "safetensors", "tensorboard"):
            raise
        print(f"kielo: this verb needs {error.name}; install it with: pip install 'kielo[train]'", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `kielo show … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("kielo: interrupted; what was finished stays, the same command goes on from there", file=sys.stderr)
        return 130
