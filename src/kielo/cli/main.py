"""The command line: parse, then call one verb. A verb imports its rooms when it is used.

Exit codes: 0 done, 1 failed with a message that names the fix, 2 usage, 75 stopped on purpose
(requeue), 130 interrupted. With KIELO_TRACEBACK=1 in the environment a failure also shows its traceback.
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
from kielo.cli.flags import MainParser
from kielo.cli.terminal import lasting_output, open_standard_streams
from kielo.recipe.errors import first_line, rank_prefix, sentence
from kielo.train.signals import INTERRUPTED
from kielo.train.signals import REQUEUE as REQUEUE


def report_unexpected(error: BaseException) -> str:
    """Write the traceback to a file, here or in the temporary folder. Return a message with its path."""
    text = "".join(traceback.format_exception(error))
    fault = f"{rank_prefix()}a bug of Kielo ({type(error).__name__}: {first_line(error)})"
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
        return f"{fault}. Fix: report it with the traceback in {path}"
    return f"{fault}, and no file for the traceback. Fix: KIELO_TRACEBACK=1 shows it"


# At import they warn about kernels that this machine's wheels lack, and about each other's names.
_NOISY_LOGGERS = ("torchao", "torch.utils._pytree")
_KEEPS_EXIT_CODE = ("run", "train")  # the exit code is about the work, even if the output is lost

# The story of `kielo --help`: part → verb → its handler, "module:function" below kielo.cli, and its summary.
# A verb's flags are declared beside its handler.
_STORY = {
    "begin": {
        "init": ("init:init", "five questions, and a recipe of your own"),
        "recipes": ("look:recipes", "the shipped recipes; --copy writes one here to change"),
        "languages": (
            "languages:languages",
            "the language cards, and how sure identifiers are of a language",
        ),
        "docs": ("look:docs", "the documentation: its path, or a browser with --open"),
        "completion": ("look:completion", "completion of commands for bash, zsh or fish"),
    },
    "text": {
        "tokenizer": ("tokenizer:tokenizer", "measure tokenizers, and map one vocabulary to another"),
        "data": ("show:data", "the documents that made a step"),
        "prefetch": ("prefetch:prefetch", "what a recipe downloads, for machines without a network"),
    },
    "train": {
        "run": ("run:run", "every stage that is not done yet, in order"),
        "train": ("train:train", "the training stage alone"),
        "verify": ("verify:verify", "is it the same model?"),
    },
    "look": {
        "show": ("show:show", "every value of a recipe and its origin"),
        "report": ("look:report", "the page of a run, or a page that compares runs"),
        "checkpoint": ("checkpoint:checkpoint", "list, show, verify and average checkpoints"),
        "schema": ("look:schema", "file formats as JSON Schema: the recipe's, and the stages' JSON"),
    },
    "cluster": {
        "clusters": ("look:clusters", "the cluster cards"),
        "plan": ("plan:plan", "which layouts fit a machine, how fast, at what cost, and why"),
        "rehearse": ("rehearse:rehearse", "one rank of the real job here: memory, FLOPs, collectives"),
        "site": ("site:site", "setup of a cluster: a script, a page, or a card to fill in"),
        "preflight": ("preflight:preflight", "the nodes of a job, checked before it trains"),
        "launch": ("launch:launch", "a chain of jobs: scripts, written and submitted"),
        "status": ("launched:status", "a launched run: jobs, step, speed beside plan, cost so far"),
        "cancel": ("launched:cancel", "save and end the jobs of a launched run"),
    },
    "models": {
        "evaluate": ("evaluate:evaluate", "held-out bits per byte, baselines and samples of a model"),
        "generate": ("generate:generate", "what a model writes after a prompt"),
        "chat": ("generate:chat", "a conversation with a model, in the terminal"),
        "export": ("export:export", "a checkpoint as a folder for transformers, or for llama.cpp"),
        "publish": ("publish:publish", "an export to the Hugging Face hub, or to a folder"),
    },
}
_FIRST_COMMANDS = """\
new here? eight commands, in this order:
  kielo run demo_estonian             # Estonian text to a model, 4 minutes
  kielo chat demo_estonian            # write with that model
  kielo init my.toml --language fi --text fi.txt     # a recipe of your own
  kielo show my.toml                  # its values and their origins
  kielo run my.toml --to pack         # clean text, tokenizer, token shards
  kielo run my.toml                   # train, prove, score, export, report
  kielo plan my.toml --cluster lumi_g # layouts, days and hours on a cluster
  kielo docs --open                   # everything else"""


def command_line() -> MainParser:
    """Return the parser of the whole command line. A verb declares its flags when it is parsed."""
    return MainParser(_FIRST_COMMANDS, _STORY)


def main(arguments: Sequence[str] | None = None) -> int:
    # Started Pythons take no modules of the current folder, such as a json.py there.
    os.environ["PYTHONSAFEPATH"] = "1"
    open_standard_streams()
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.stderr.isatty():  # no bars of the hub's client in a log
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
    """Parse into `options`, call the verb and return its exit code. Exceptions become messages."""
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
    except SystemExit as usage:  # argparse has printed the reason
        options.verb = None
        return usage.code if isinstance(usage.code, int) else 1
    except KeyboardInterrupt:
        _say("interrupted. Finished work stays, and the same command continues it")
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("KIELO_TRACEBACK"):
            traceback.print_exc()
        _say(sentence(error) or report_unexpected(error))
        return 1


def _say(message: str) -> None:
    print(f"kielo: {message}", file=sys.stderr)
