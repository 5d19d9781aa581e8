"""`kielo chat`: a conversation with a model in the terminal, and what can be asked about its answers."""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kielo.artifact.checkpoint_folder import step_folders, step_of
from kielo.cli.flags import VerbParser, examples
from kielo.cli.generate import encoder_recipe, exported, hugging_face_folder, refuse_sampling, takes_sampling
from kielo.cli.terminal import print_table, print_text
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder
from kielo.stages import late

if TYPE_CHECKING:  # it loads torch
    from kielo.evaluate.generate import Chat

HELP = """\
/probabilities   each token of the last answer: its probability and the two runners-up
/compare STEP    answer the last prompt by the checkpoint of another step, too
/temperature X   0: the likeliest token each time; 0.8 is usual
/reset           forget the conversation
/help            this list
/quit            end; so does the end of the input (Ctrl-D)
Ctrl-C stops an answer. A prompt that begins with / needs a space before it."""


def chat_flags(parser: VerbParser) -> None:
    examples(
        parser,
        "kielo chat demo_estonian",
        "kielo chat runs/demo_estonian/hf --temperature 0",
        "kielo chat runs/my_chat_model --plain",
    )
    parser.add_argument("model", metavar="MODEL", help="a recipe, a run folder or a Hugging Face folder")
    takes_sampling(parser)
    parser.add_argument(
        "--plain", action="store_true", help="continue text even if the tokenizer has a chat template"
    )


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
