"""`kielo init`: five questions, on a terminal or as flags → a commented recipe, and what to type next."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kielo.artifact.manifest import write_text_atomically
from kielo.cli.flags import examples
from kielo.cli.terminal import print_text
from kielo.models.families import complete
from kielo.models.proportions import count, with_shape
from kielo.plan.idea import UsualTraining, tokens_of_device_hours, usual_training
from kielo.recipe.amounts import parse_amount, parse_device_hours, short_amount
from kielo.recipe.cards import (
    Cluster,
    a_new_card,
    accelerator,
    cluster,
    clusters,
    is_own_card,
    language,
    languages,
)
from kielo.recipe.complaints import did_you_mean
from kielo.recipe.errors import KieloError
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.places import place
from kielo.recipe.schema import json_schema
from kielo.recipe.sections import CompleteModel, Model

SCHEMA_FILE = "recipe.schema.json"
_LAPTOP_SIZE, _CLUSTER_SIZE = "10M", "3B"
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Answers:
    """Answers that the recipe is made of.

    sources: paths of text, none if there is no text yet. tokens: None to let them follow from the text.
    """

    name: str
    language: str
    sources: tuple[str, ...]
    parameters: int
    site: Cluster
    tokens: int | None
    model_type: str
    machine: str


def init_flags(parser: argparse.ArgumentParser) -> None:
    examples(
        parser, "kielo init",
        "kielo init --language Finnish --params 3B --cluster lumi --budget 60B",
        "kielo init --language fi --text my_text.txt,more.jsonl.zst",
    )  # fmt: skip
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="recipe to write; default: LANGUAGE_SIZE.toml"
    )
    parser.add_argument("--language", help="a language or its code (see `kielo languages`)")
    parser.add_argument(
        "--text", metavar="PATHS", help="files or folders of text, with commas; may come later"
    )
    parser.add_argument("--params", metavar="SIZE", help="parameters of the model, such as 350M or 3B")
    parser.add_argument("--cluster", help="the machine (see `kielo clusters`); default: laptop")
    parser.add_argument(
        "--budget",
        help='tokens, such as 60B, or device-hours, such as "20000h"; default: as usual for the size',
    )
    parser.add_argument("--model-type", default="llama", help="the family; default: llama")


def init(options: argparse.Namespace) -> int:
    answers = _asked(options)
    path = place(options.file or f"{answers.name}.toml")
    if os.path.lexists(path):
        raise KieloError(f"{path} exists already; move it away or name another FILE; nothing was written")
    text = recipe_text(answers)
    write_text_atomically(path, text)
    print(f"wrote {path}")
    schema = path.parent / SCHEMA_FILE
    if os.path.lexists(schema):
        print_text(f"{schema} was there already and stays as it is; your editor checks the recipe against it")
    else:
        write_text_atomically(schema, json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n")
        print_text(f"wrote {schema}, against which your editor checks the recipe")
    print("\n".join(_next_commands(answers, path)))
    return 0


def _asked(options: argparse.Namespace) -> Answers:
    """Return the answers: from flags, else asked on a terminal, else the defaults.

    Raises KieloError for a flag that does not fit; on a terminal the question comes again.
    """
    code = _answer(options.language, "Which language?", None, "--language", _language)
    text = _answer(options.text, "Where is the text (files or folders, with commas)?", "", "--text", _sources)
    machine, site = _answer(options.cluster, "On which machine?", "laptop", "--cluster", _cluster)
    usual = _LAPTOP_SIZE if site.name == "laptop" else _CLUSTER_SIZE
    size = _answer(options.params, "How many parameters?", usual, "--params", _size)
    tokens = _answer(
        options.budget,
        "What budget: tokens (60B) or device-hours (20000h)? Enter for the usual one",
        "",
        "--budget",
        lambda given: _budget(given, size, site),
    )
    if tokens is None and site.name != "laptop":
        tokens = usual_training(size).tokens
    name = f"{language(code).name.split()[0].lower()}_{short_amount(size).lower().replace('.', '_')}"
    name = re.sub(r"[^a-z0-9_]+", "", name) or "my_model"
    if options.file:
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(options.file).stem).strip("_.-") or name
    return Answers(name, code, text, size, site, tokens, options.model_type, machine)


def _answer(
    given: str | None, question: str, default: str | None, flag: str, understand: Callable[[str], Answer]
) -> Answer:
    """Return what `understand` makes of the flag, of a line that a person types, or of the default."""
    if given is not None:
        return understand(given)
    if sys.stdin is None or not sys.stdin.isatty():
        if default is None:
            raise KieloError(f"{question} Give {flag}, for example {flag} fi")
        return understand(default)
    shown = f" [{default}]" if default else ""
    while True:
        try:
            line = input(f"{question}{shown} ").strip()
        except EOFError:
            raise KieloError(f"no answer; give {flag}, nothing was written") from None
        try:
            if line or default is not None:
                return understand(line or default or "")
        except KieloError as error:
            print(error, file=sys.stderr)


def _language(given: str) -> str:
    return _meant(given, {code: [language(code).name] for code in languages()}, "language")


def _cluster(given: str) -> tuple[str, Cluster]:
    """Return what a recipe calls the machine, a card's name or the path of an own one, and the card."""
    if is_own_card(given):
        return given, cluster(given)
    try:
        name = _meant(given, {name: [] for name in clusters()}, "machine")
    except KieloError as error:
        raise KieloError(f"{error}; {a_new_card(given)}") from None
    return name, cluster(name)


def _meant(given: str, known: Mapping[str, Sequence[str]], what: str) -> str:
    """Return the name that is, or is also called, `given`, or that alone begins so."""
    asked = _plain(given.strip())
    called = {_plain(other): name for name, others in known.items() for other in (name, *others)}
    beginning = {name for other, name in called.items() if asked and other.startswith(asked)}
    if asked in called:
        return called[asked]
    if len(beginning) == 1:
        return beginning.pop()
    raise KieloError(f"no {what} {given!r}; known: {', '.join(known)}{did_you_mean(given, known)}")


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _sources(given: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in given.split(",") if part.strip())


def _size(given: str) -> int:
    try:
        size = parse_amount(given)
    except ValueError:
        raise KieloError(f"{given!r} is not a number of parameters. Fix: 350M or 3B") from None
    if not 10**6 <= size <= 10**13:
        raise KieloError(f"{given!r} parameters: give 1M to 10T, such as 350M or 3B")
    return size


def _shape(size: int, model_type: str) -> CompleteModel:
    usual = usual_training(size)
    try:
        model = Model(model_type=model_type, params=size, vocab_size=usual.vocabulary_size)
    except ValueError:
        raise KieloError(
            f"--model-type {model_type}: no such family; known: {', '.join(FAMILIES)}"
            f"{did_you_mean(model_type, {name: [] for name in FAMILIES})}"
        ) from None
    return complete(with_shape(model), usual.sequence_length)


def _budget(given: str, size: int, site: Cluster) -> int | None:
    """Return tokens; None for an empty answer."""
    if not given.strip():
        return None
    try:
        hours = parse_device_hours(given)
        if hours is not None:
            peak = accelerator(site.accelerator).peak_tflops.get("bf16")
            if peak is None:
                raise KieloError(
                    f"no card says how fast a device of {site.name} is; give tokens, such as 60B"
                )
            return max(1, tokens_of_device_hours(hours, size, peak))
        return parse_amount(re.sub(r"\s*tokens?\s*$", "", given))
    except ValueError:
        raise KieloError(
            f"{given!r} is no budget. Fix: tokens, such as 60B, or device-hours, such as 20000h"
        ) from None


def recipe_text(answers: Answers) -> str:
    """Return the commented recipe."""
    usual = usual_training(answers.parameters, answers.tokens)
    model = _shape(answers.parameters, answers.model_type)
    step = _step(answers, usual)
    epochs, every = (8, 200) if answers.site.name == "laptop" else (4, 500)
    machine = json.dumps(answers.machine, ensure_ascii=False)
    heads = f"{model.num_attention_heads} heads, {model.num_key_value_heads} of keys and values"
    return f"""#:schema {SCHEMA_FILE}
# Made by `kielo init`. Every key has a default: `kielo show` prints them all and where each came from.
name = "{answers.name}"  # the run is stored in runs/{answers.name}
language = "{answers.language}"
description = "{_described(answers)}"
cluster = {machine}  # what plans count with, and MFU is measured against

{_corpus_text(answers)}
[tokenizer]
vocab_size = {usual.vocabulary_size:_}  # more for more text; a multiple of 64 costs nothing

[dataset]
sequence_length = {usual.sequence_length}
max_epochs = {epochs}  # how often text may be read (Muennighoff et al. 2023)

# {short_amount(count(model))} parameters: {model.num_hidden_layers} layers of {model.hidden_size:,}, {heads},
# MLP {model.intermediate_size:,}. Give these keys in place of `params` for another shape.
[model]
model_type = "{answers.model_type}"
params = "{short_amount(answers.parameters)}"

[train]
{_tokens_text(answers, step)}
tokens_per_step = {step:_}
learning_rate = {usual.learning_rate:g}

[checkpoint]
every_steps = {every}

# How the ranks share the work: `kielo plan` ranks what fits; `kielo plan explain` prints it to paste here.
# [layout]
# tensor = 1
# pipeline = 1
"""


def _step(answers: Answers, usual: UsualTraining) -> int:
    """Return tokens of a step: few where the text gives the budget, for nobody knows how much it is."""
    return usual.tokens_per_step if answers.tokens is not None else 16 * usual.sequence_length


def _described(answers: Answers) -> str:
    return f"{answers.model_type}, {short_amount(answers.parameters)}, {language(answers.language).name}"


def _corpus_text(answers: Answers) -> str:
    kinds = "# .txt (one document a line), .jsonl[.gz|.zst], .parquet, or a folder of HTML.\n"
    if not answers.sources:
        return (
            "# Plans need no text; `kielo run` does. Remove the # and name it.\n"
            f'{kinds}# [corpus]\n# sources = ["my_text.txt"]\n'
        )
    listed = ", ".join(json.dumps(path, ensure_ascii=False) for path in answers.sources)
    return f"{kinds}[corpus]\nsources = [{listed}]\n"


def _tokens_text(answers: Answers, step: int) -> str:
    if answers.tokens is None:
        return "# tokens = 1_000_000  # not set: the text, dataset.max_epochs times"
    tokens = max(1, answers.tokens // step) * step
    return f"tokens = {tokens:_}  # {tokens / answers.parameters:.3g} for each parameter"


def _next_commands(answers: Answers, path: Path) -> list[str]:
    lines = ["next:"]
    if answers.site.name != "laptop":
        least, most = (8, 128) if answers.parameters >= 2e10 else (1, 16)
        of_site = answers.site.nodes
        nodes = f"{least}..{min(most, of_site)}" if of_site > least else f"{of_site}"
        lines += [
            f"  kielo plan {path} --nodes {nodes}  # layouts that fit, days, hours",
            f"  kielo rehearse {path} --nodes 1  # one rank's exact bytes, here",
        ]
    if answers.sources:
        missing = [
            one for one in answers.sources if not os.path.lexists(one) and not re.search(r"[*?\[]", one)
        ]
        if missing:
            lines.insert(0, f"not there yet: {', '.join(missing)}")
        stage = "" if answers.site.name == "laptop" else " --to pack"
        lines.append(f"  kielo run {path}{stage}")
    else:
        lines.append(f"  kielo run {path}  # once corpus.sources names text")
    return lines
