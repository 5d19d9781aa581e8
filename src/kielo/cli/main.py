"""The command line: parse, then call one verb. A room is imported only when its verb is used.

Exit codes: 0 done, 1 failed with a message that names the fix, 2 usage, 75 stopped on purpose
(requeue), 130 interrupted. With KIELO_TRACEBACK=1 in the environment a failure shows its traceback as well.
"""

import argparse
import importlib
import logging
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import gettempdir

from kielo import __version__
from kielo.api import STAGES as STAGES
from kielo.artifact.special_files import files_only
from kielo.cli.flags import MainParser, add_verb, examples
from kielo.cli.terminal import lasting_output, open_standard_streams
from kielo.recipe.errors import first_line, rank_prefix, sentence
from kielo.train.signals import INTERRUPTED
from kielo.train.signals import REQUEUE as REQUEUE

# The report of an unexpected exception: its traceback in a file, and a message that names the file.


def report_unexpected(error: BaseException) -> str:
    """Write the traceback to a file, here or in the temporary folder; return the message that names it."""
    text = "".join(traceback.format_exception(error))
    fault = f"{rank_prefix()}a fault of Kielo's own ({type(error).__name__}: {first_line(error)})"
    report = (
        f"kielo {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
        f"{datetime.now(UTC).isoformat(timespec='seconds')}\n{' '.join(sys.argv)}\n\n{text}"
    )
    for folder in (Path.cwd, lambda: Path(gettempdir())):
        try:
            path = folder() / f"kielo-error-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}.log"
            with open(path, "x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(report)
        except OSError:
            continue
        return f"{fault}; its traceback is in {path}: please report it with that file"
    return f"{fault}, and no traceback could be written; KIELO_TRACEBACK=1 shows it"


# They warn at import: of kernels that this machine's wheels lack, and of each other's names.
_NOISY_LOGGERS = ("torchao", "torch.utils._pytree")
_KEEPS_EXIT_CODE = ("run", "train")  # the exit code is that of the work, whatever becomes of the output

# Verb → its handler, "module:function" below kielo.cli, and what it does. Its flags are declared beside the
# handler.
_VERBS = {
    "init": ("init:init", "five questions, and a recipe of your own"),
    "run": ("run:run", "every stage that is not done yet, in order"),
    "train": ("train:train", "the training stage alone"),
    "plan": ("plan:plan", "which layouts fit a machine, how fast, at what cost, and why"),
    "rehearse": (
        "rehearse:rehearse",
        "one rank of the real job on this machine: memory, FLOPs and collectives",
    ),
    "preflight": ("preflight:preflight", "the nodes of a job, checked before it trains"),
    "site": ("site:site", "what is done once on a cluster: a script, a page, or a card to fill in"),
    "prefetch": ("prefetch:prefetch", "what a recipe downloads, for machines without a network"),
    "launch": ("launch:launch", "a chain of jobs on a cluster: their scripts, written and submitted"),
    "status": ("launched:status", "a launched run: jobs, step, speed beside plan, cost so far"),
    "cancel": ("launched:cancel", "the jobs of a launched run, saved and ended"),
    "verify": ("verify:verify", "is it the same model?"),
    "evaluate": (
        "evaluate:evaluate",
        "bits per byte, baselines and samples; or samples of any Hugging Face folder",
    ),
    "report": ("report:report", "the page of a run, or a page that compares runs"),
    "generate": ("generate:generate", "what a model writes after a prompt"),
    "export": ("export:export", "a checkpoint as a Hugging Face folder"),
    "tokenizer": ("tokenizer:tokenizer", "measure tokenizers, and map one vocabulary to another"),
    "checkpoint": ("checkpoint:checkpoint", "list, show, verify and average checkpoints"),
    "data": ("show:data", "the documents that made a step"),
    "show": ("show:show", "every value of a recipe and where it came from"),
    "recipes": ("look:recipes", "the shipped recipes; --copy writes one here to change"),
    "schema": ("look:schema", "the file formats: a recipe's and those that stages exchange, as JSON Schema"),
    "clusters": ("look:clusters", "the cluster cards"),
    "languages": ("look:languages", "the language cards"),
}


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; a verb declares its flags when it is parsed."""
    parser = MainParser(
        prog="kielo",
        description="From a language's raw text to its own language model.",
    )
    examples(parser, "kielo run demo_estonian")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, (handler, summary) in _VERBS.items():
        add_verb(verbs, name, handler, summary)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    # No Python that is started from here takes modules of the current folder, which a json.py there would be.
    os.environ["PYTHONSAFEPATH"] = "1"
    open_standard_streams()
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.stderr.isatty():  # a log has no use for the bars of transformers and the hub's client
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    options = argparse.Namespace(verb=None)
    with lasting_output() as output:
        code = _call(arguments, options)
        output.flush()
        if output.failure is None or isinstance(output.failure, BrokenPipeError):  # `kielo show … | head`
            return code
        _say(f"the output could not be written ({output.failure})")
        return code if options.verb in _KEEPS_EXIT_CODE else code or 1


def _call(arguments: Sequence[str] | None, options: argparse.Namespace) -> int:
    """Parse into `options`, call the verb, and return its exit code. Every exception becomes a message."""
    try:
        parser = command_line()
        parser.parse_args(arguments, options)
        if options.version:
            print(__version__)
            return 0
        if options.verb is None:
            parser.print_help()
            return 2
        module, function = options.handler.split(":")
        with files_only():
            return getattr(importlib.import_module("kielo.cli." + module), function)(options) or 0
    except SystemExit as usage:  # argparse has printed the reason, and no verb was called
        options.verb = None
        return usage.code if isinstance(usage.code, int) else 1
    except KeyboardInterrupt:
        _say("interrupted; what was finished stays, the same command goes on from there")
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("KIELO_TRACEBACK"):
            traceback.print_exc()
        _say(sentence(error) or report_unexpected(error))
        return 1


def _say(message: str) -> None:
    print(f"kielo: {message}", file=sys.stderr)
