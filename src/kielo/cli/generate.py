"""`kielo generate` and `kielo chat`: a model's text after a prompt, or in a conversation."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kielo.artifact.checkpoint_folder import step_folders, step_of
from kielo.artifact.manifest import read_manifest
from kielo.cli.flags import takes
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_table, print_text
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder
from kielo.recipe.sections import Recipe
from kielo.stages import late, results

if TYPE_CHECKING:  # it loads torch
    from kielo.evaluate.generate import Chat

_SAMPLING = """
    --tokens N:count=200       write at most N tokens; default: 200
    --temperature T:float=0.8  0: the likeliest token each time; default: 0.8
    --top-k K:count=50         draw among the K likeliest tokens; default: 50
    --seed SEED:int=1          seed of the draws; default: 1
"""


def refuse_sampling(options: argparse.Namespace) -> None:
    if not 0 <= options.seed < 1 << 32:
        raise KieloError(f"--seed {options.seed}: give a number from 0 to {(1 << 32) - 1}")
    if not 0 <= options.temperature < 100:
        raise KieloError(f"--temperature {options.temperature:g}: give a number from 0 to 100; 0.8 is usual")


def encoder_recipe(model: str) -> Recipe | None:
    """Return the recipe of a run whose model is an encoder, None for a decoder or a Hugging Face folder."""
    if (Path(model) / "config.json").is_file():
        return None
    recipe = read_recipe(model).recipe
    return recipe if recipe.train.objective == "masked_tokens" else None


@takes(f"""
    $ kielo generate demo_estonian "Dokumendi salvestamiseks"
    $ kielo generate runs/demo_estonian/hf "Kord oli" --temperature 0
    MODEL   a recipe, a run folder or a Hugging Face folder
    PROMPT  the beginning of the text; for an encoder, text with one [MASK]
    {_SAMPLING}
    --json  print prompt and text as JSON at the end
""")
def generate(options: argparse.Namespace) -> None:
    refuse_sampling(options)
    if any("\ud800" <= letter <= "\udfff" for letter in options.prompt):
        raise KieloError("PROMPT is not UTF-8; convert it, or set the terminal's locale to UTF-8")
    if recipe := encoder_recipe(options.model):
        return _fill(recipe, options)
    with keep_stdout_for_json(options.json), hugging_face_folder(options.model) as folder:
        sampling = late.Sampling(options.tokens, options.temperature, options.top_k, options.seed)
        if not options.json:
            print(options.prompt, end="", flush=True)
        text = late.continue_text(folder, options.prompt, sampling, prints=not options.json)
    if options.json:
        print_json({"prompt": options.prompt, "text": text})
    return None


def _fill(recipe: Recipe, options: argparse.Namespace) -> None:
    folder = run_folder(recipe)
    checkpoint = results.newest_checkpoint(folder)
    print(f"the model is {checkpoint}", file=sys.stderr)
    (filled,) = late.fill_prompts(late.load_encoder(recipe, folder, checkpoint), [options.prompt])
    if options.json:
        return print_json({"prompt": options.prompt, "fillings": [one.content() for one in filled.fillings]})
    rows = [(one.text, f"{100 * one.probability:.1f} %") for one in filled.fillings]
    print_table(["token", "probability"], rows)


@contextmanager
def hugging_face_folder(model: str) -> Iterator[Path]:
    """Yield the folder itself, the export of a finished run, or a new export of its newest checkpoint."""
    if (Path(model) / "config.json").is_file():
        yield Path(model)
        return
    folder = run_folder(read_recipe(model).recipe)
    if read_manifest(folder / "hf") is not None:
        print(f"the model is {folder / 'hf'}", file=sys.stderr)  # an older model, if the run trained further
        yield folder / "hf"
        return
    with exported(folder, results.newest_checkpoint(folder)) as made:
        yield made


@contextmanager
def exported(run: Path, checkpoint: Path) -> Iterator[Path]:
    """Yield an export of the checkpoint of a run, in a folder that is removed after the block."""
    print(f"the model is {checkpoint}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="kielo-") as place:
        results.export_checkpoint(checkpoint, Path(place) / "hf", run / "tokenizer", None)
        yield Path(place) / "hf"


HELP = """\
/probabilities   each token of the last answer: its probability and the two runners-up
/compare STEP    answer the last prompt by the checkpoint of another step, too
/temperature X   0: the likeliest token each time; 0.8 is usual
/reset           forget the conversation
/help            this list
/quit            end; so does the end of the input (Ctrl-D)
Ctrl-C stops an answer. A prompt that begins with / needs a space before it."""


@takes(f"""
    $ kielo chat demo_estonian
    $ kielo chat runs/demo_estonian/hf --temperature 0
    $ kielo chat runs/my_chat_model --plain
    MODEL    a recipe, a run folder or a Hugging Face folder
    {_SAMPLING}
    --plain  continue text even if the tokenizer has a chat template
""")
def chat(options: argparse.Namespace) -> None:
    refuse_sampling(options)
    if encoder_recipe(options.model):
        raise KieloError(
            f"{options.model}: an encoder writes no answers. "
            f'Fix: kielo generate {options.model} "a text with one [MASK]"'
        )
    with hugging_face_folder(options.model) as folder:
        session = _Session(options, late.Chat(folder, options.plain))
        how = "its chat template" if session.chat.has_template else "plain continuation"
        print_text(f"{how}; /help lists the commands", sys.stderr)
        for line in _lines():
            if line.startswith("/quit"):
                return
            try:
                session.take(line)
            except KieloError as error:
                print(f"kielo: {error}", file=sys.stderr)


def _lines() -> Iterator[str]:
    """Yield the lines of the input that are not empty. Ctrl-C drops the line that is being typed."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - input() then has a history and the arrow keys
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            print("\n/quit ends the conversation", file=sys.stderr)
            continue
        if line.strip():
            yield line


class _Session:
    def __init__(self, options: argparse.Namespace, chat: "Chat") -> None:
        self.chat, self._flags = chat, options
        self._commands: dict[str, Callable[[str], None]] = {
            "/probabilities": self._probabilities,
            "/compare": self._compare,
            "/temperature": self._temperature,
            "/reset": lambda _: self.chat.turns.clear(),
            "/help": lambda _: print(HELP),
        }

    def take(self, line: str) -> None:
        """Answer a prompt, or do what a command says. Raises KieloError for a wrong command."""
        if not line.startswith("/"):
            of = self._flags
            seed = (of.seed + len(self.chat.turns)) % (1 << 32)  # a repeated prompt gets another answer
            self.chat.answer(line.strip(), late.Sampling(of.tokens, of.temperature, of.top_k, seed))
            return
        name, _, value = line.partition(" ")
        if name not in self._commands:
            raise KieloError(f"{name}: no such command. Fix: one of {', '.join(self._commands)}, /quit")
        self._commands[name](value.strip())

    def _probabilities(self, _: str) -> None:
        self._refuse_without_answer()
        rows = [
            (
                repr(one.text),
                f"{one.probability:.1%}",
                *(f"{text!r} {share:.1%}" for text, share in one.others),
            )
            for one in self.chat.turns[-1].shares
        ]
        print_table(("token", "probability", "runner-up", "third"), rows)

    def _compare(self, value: str) -> None:
        self._refuse_without_answer()
        if (Path(self._flags.model) / "config.json").is_file():
            raise KieloError("/compare: a Hugging Face folder has one model. Fix: kielo chat RUN")
        run = run_folder(read_recipe(self._flags.model).recipe)
        folders = {step_of(path): path for path in step_folders(run / "train" / "checkpoints")}
        if not value.isdecimal() or int(value) not in folders:
            known = ", ".join(str(step) for step in sorted(filter(None, folders)))
            raise KieloError(f"/compare {value}: no such checkpoint. Fix: /compare STEP with one of {known}")
        last = self.chat.turns[-1]
        with exported(run, folders[int(value)]) as folder:
            other = late.Chat(folder, self._flags.plain)
            other.turns = self.chat.turns[:-1]
            answer = other.answer(last.prompt, last.sampling, prints=False).answer
        print_table(("model", "answer"), [("this", last.answer), (f"step {value}", answer)])

    def _temperature(self, value: str) -> None:
        try:
            temperature = float(value)
        except ValueError:
            raise KieloError(f"/temperature {value}: give a number. Fix: /temperature 0.8") from None
        refuse_sampling(argparse.Namespace(**{**vars(self._flags), "temperature": temperature}))
        self._flags.temperature = temperature

    def _refuse_without_answer(self) -> None:
        if not self.chat.turns:
            raise KieloError("there is no answer yet. Fix: type a prompt first")
