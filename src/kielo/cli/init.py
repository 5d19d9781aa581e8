"""`kielo init`: five questions, on a terminal or as flags → a commented recipe, and the next commands."""

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kielo.artifact.manifest import write_text_atomically
from kielo.cli.flags import takes
from kielo.cli.init_from import free_name, read_engine_script, recipe_from, recipe_of_script
from kielo.cli.terminal import print_table, print_text
from kielo.models.families import complete
from kielo.models.proportions import count, with_shape
from kielo.plan.idea import tokens_of_device_hours, usual_training
from kielo.recipe import cards
from kielo.recipe.addresses import is_address
from kielo.recipe.amounts import parse_amount, parse_device_hours, short_amount
from kielo.recipe.complaints import did_you_mean
from kielo.recipe.errors import KieloError
from kielo.recipe.from_script.recipe_writer import counted, row_argument
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.places import place
from kielo.recipe.read import read_first_language
from kielo.recipe.schema import json_schema
from kielo.recipe.sections import CompleteModel, Model

SCHEMA_FILE = "recipe.schema.json"
_LAPTOP_SIZE, _CLUSTER_SIZE = "10M", "3B"
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Answers:
    """The answers. sources: paths of text, perhaps none yet. tokens: None if they follow from the text."""

    name: str
    language: str
    sources: tuple[str, ...]
    parameters: int
    site: cards.Cluster
    tokens: int | None
    model_type: str
    machine: str


@takes("""
    $ kielo init
    $ kielo init --language Finnish --params 3B --cluster lumi --budget 60B
    $ kielo init --language fi --text my_text.txt,more.jsonl.zst
    $ kielo init --from demo_estonian --params 20M
    $ kielo init --from runs/demo_estonian --text more.txt
    $ kielo init --from-megatron pretrain.sh --language fi --cluster lumi_g
    $ kielo init --from-trainer train.sh --language et --variable NODES=2
    [FILE]                   recipe to write; default: LANGUAGE_SIZE.toml
    --language LANGUAGE      a language or its code (see `kielo languages`)
    --text PATHS             files or folders of text, separated by commas; may come later
    --params SIZE            number of parameters, such as 350M or 3B
    --cluster CLUSTER        cluster card (see `kielo clusters`); default: laptop
    --budget BUDGET          tokens, such as 60B, or device-hours, such as "20000h"; default: usual for the
                             size
    --model-type MODEL_TYPE  family of the model; default: llama
    --from BASE as base      a recipe to vary, or the folder of a finished run whose weights to continue; the
                             other flags change its values
    --from-megatron SCRIPT   a bash script whose arguments of Megatron-LM or Megatron-DeepSpeed become the
                             recipe; it is read, not executed
    --from-trainer SCRIPT    the same of Hugging Face's TrainingArguments under accelerate or torchrun
    --variable ASSIGNMENT... as variables  NAME=VALUE of a variable that the script takes from outside, or
                             1=VALUE of $1; may be repeated
""")
def init(options: argparse.Namespace) -> int:
    sources = {
        "--from": options.base,
        "--from-megatron": options.from_megatron,
        "--from-trainer": options.from_trainer,
    }
    given = [flag for flag, value in sources.items() if value is not None]
    if len(given) > 1:
        raise KieloError(f"{' and '.join(given)}: a recipe has one origin. Fix: leave one of them out")
    if options.variables and given not in (["--from-megatron"], ["--from-trainer"]):
        raise KieloError("--variable belongs to --from-megatron or --from-trainer. Fix: leave it out")
    if given == ["--from"]:
        return _init_from(options)
    if given:
        return _init_from_script(options, given[0].removeprefix("--from-"), sources[given[0]])
    answers = _asked(options)
    path = _free(options.file or f"{answers.name}.toml")
    write_text_atomically(path, recipe_text(answers))
    _report(path, f"wrote {path}", _next_commands(answers, path))
    return 0


def _init_from(options: argparse.Namespace) -> int:
    name = _name_of(options.file) if options.file else ""
    name = name or free_name(options.base)
    path = _free(options.file or f"{name}.toml")
    text, purpose = recipe_from(options.base, path, name, _changes(options))
    write_text_atomically(path, f"#:schema {SCHEMA_FILE}\n{text}")
    try:
        read_first_language(path)
    except KieloError:
        path.unlink()
        raise
    quoted = shlex.quote(str(path))
    _report(path, f"wrote {path}, {purpose}", ["next:", f"  kielo show {quoted}", f"  kielo run {quoted}"])
    return 0


def _init_from_script(options: argparse.Namespace, engine: str, script: str) -> int:
    for flag in ("text", "params", "budget"):
        if getattr(options, flag) is not None:
            raise KieloError(f"--{flag}: the script says it. Fix: leave the flag out, and change the recipe")
    if options.model_type is not None:
        _shape(10**9, options.model_type)
    found = read_engine_script(engine, script, options.variables or [], options.model_type)
    language = _answer(options.language, "Which language?", None, "--language", _language)
    cluster = _cluster(options.cluster)[0] if options.cluster is not None else None
    name = _name_of(options.file or script) or "my_model"
    path = _free(options.file or f"{name}.toml")
    text, cluster = recipe_of_script(engine, script, found, {"name": name, "language": language}, cluster)
    write_text_atomically(path, f"#:schema {SCHEMA_FILE}\n{text}")
    try:
        read_first_language(path)
    except KieloError:
        path.unlink()
        raise
    print_table(
        ("line", "argument", "", "becomes"),
        [(r.place, row_argument(r), r.verdict, r.meaning) for r in found.rows],
    )
    changes = [row_argument(row).partition(" ")[0] for row in found.rows if row.changes_the_run]
    wrote = f"wrote {path}: {counted(found.rows)}"
    if changes:
        wrote += f"\nnot as in the script: {', '.join(changes)} (see above)"
    where, quoted = "" if cluster else " --cluster CLUSTER --nodes N", shlex.quote(str(path))
    _report(path, wrote, ["next:", f"  kielo show {quoted}", f"  kielo plan {quoted}{where}"])
    return 0


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if options.language is not None:
        changes["language"] = _language(options.language)
    if options.cluster is not None:
        changes["cluster"] = _cluster(options.cluster)[0]
    if options.text is not None:
        changes["corpus"] = {"sources": list(_sources(options.text))}
    if options.params is not None:
        changes["model"] = {"params": short_amount(_size(options.params))}
    if options.model_type is not None:
        changes.setdefault("model", {})["model_type"] = options.model_type
        if options.model_type in FAMILIES:  # else the new recipe is refused
            is_encoder = FAMILIES[options.model_type].is_encoder
            changes["train"] = {"objective": "masked_tokens" if is_encoder else "next_token"}
    if (budget := options.budget) is not None:
        try:
            changes.setdefault("train", {})["tokens"] = parse_amount(re.sub(r"\s*tokens?\s*$", "", budget))
        except ValueError:
            raise KieloError(f"--budget {budget}: beside --from give tokens. Fix: --budget 60B") from None
    return changes


def _free(file: str) -> Path:
    path = place(file)
    if os.path.lexists(path):
        raise KieloError(f"{path} exists already, and nothing was written. Fix: give another FILE")
    return path


def _report(path: Path, wrote: str, then: Sequence[str]) -> None:
    print_text(wrote)
    schema = path.parent / SCHEMA_FILE
    if os.path.lexists(schema):
        print_text(f"{schema} exists already and stays as it is; your editor checks the recipe against it")
    else:
        write_text_atomically(schema, json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n")
        print_text(f"wrote {schema}, against which your editor checks the recipe")
    print("\n".join(then))


def _name_of(file: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(file).stem).strip("_.-")


def _asked(options: argparse.Namespace) -> Answers:
    """Return the answers from the flags, from questions on a terminal, or the defaults.

    Raise KieloError for a wrong flag. A wrong answer on a terminal repeats the question.
    """
    code = _answer(options.language, "Which language?", None, "--language", _language)
    question = "Where is the text (files or folders, separated by commas)?"
    text = _answer(options.text, question, "", "--text", _sources)
    machine, site = _answer(options.cluster, "On which machine?", "laptop", "--cluster", _cluster)
    usual = _LAPTOP_SIZE if site.name == "laptop" else _CLUSTER_SIZE
    size = _answer(options.params, "How many parameters?", usual, "--params", _size)
    tokens = _answer(
        options.budget,
        "What budget: tokens (60B) or device-hours (20000h)? Enter for the usual budget",
        "",
        "--budget",
        lambda given: _budget(given, size, site),
    )
    if tokens is None and site.name != "laptop":
        tokens = usual_training(size).tokens
    name = f"{cards.language(code).name.split()[0].lower()}_{short_amount(size).lower().replace('.', '_')}"
    name = re.sub(r"[^a-z0-9_]+", "", name) or "my_model"
    if options.file:
        name = _name_of(options.file) or name
    return Answers(name, code, text, size, site, tokens, options.model_type or "llama", machine)


def _answer(
    given: str | None, question: str, default: str | None, flag: str, understand: Callable[[str], Answer]
) -> Answer:
    """Return the flag, a typed line or the default, as `understand` reads it."""
    if given is not None:
        return understand(given)
    if sys.stdin is None or not sys.stdin.isatty():
        if default is None:
            raise KieloError(f"{question} Fix: {flag} fi")
        return understand(default)
    shown = f" [{default}]" if default else ""
    while True:
        try:
            line = input(f"{question}{shown} ").strip()
        except EOFError:
            raise KieloError(f"no answer, and nothing was written. Fix: {flag}") from None
        try:
            if line or default is not None:
                return understand(line or default or "")
        except KieloError as error:
            print(error, file=sys.stderr)


def _language(given: str) -> str:
    """Return the code of the language card that is meant, or the file of a card."""
    if cards.is_own_card(given):
        return given if cards.language(given) else ""
    try:
        return _meant(given, {code: [cards.language(code).name] for code in cards.languages()}, "language")
    except KieloError:
        raise KieloError(f"no language {given!r}{cards.without_language_card(given)}") from None


def _cluster(given: str) -> tuple[str, cards.Cluster]:
    """Return the cluster card, and its name or path for the recipe."""
    if cards.is_own_card(given):
        return given, cards.cluster(given)
    try:
        name = _meant(given, {name: [] for name in cards.clusters()}, "machine")
    except KieloError as error:
        raise KieloError(f"{error}; {cards.a_new_card(given)}") from None
    return name, cards.cluster(name)


def _meant(given: str, known: Mapping[str, Sequence[str]], what: str) -> str:
    """Return the name that is `given`, is also called so, or alone begins so."""
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
        raise KieloError(f"{given!r} parameters: outside of 1M to 10T. Fix: 350M or 3B")
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


def _budget(given: str, size: int, site: cards.Cluster) -> int | None:
    """Return tokens, or None for an empty answer."""
    if not given.strip():
        return None
    try:
        hours = parse_device_hours(given)
        if hours is not None:
            peak = cards.accelerator(site.accelerator).peak_tflops.get("bf16")
            if peak is None:
                raise KieloError(
                    f"no card has the peak speed of a device of {site.name}. Fix: --budget 60B, in tokens"
                )
            return max(1, tokens_of_device_hours(hours, size, peak))
        return parse_amount(re.sub(r"\s*tokens?\s*$", "", given))
    except ValueError:
        raise KieloError(
            f"{given!r} is not a budget. Fix: tokens, such as 60B, or device-hours, such as 20000h"
        ) from None


def recipe_text(answers: Answers) -> str:
    """Return the commented recipe."""
    usual = usual_training(answers.parameters, answers.tokens)
    model = _shape(answers.parameters, answers.model_type)
    # Steps are small if an unknown amount of text is the budget.
    step = usual.tokens_per_step if answers.tokens is not None else 16 * usual.sequence_length
    epochs, every = (8, 200) if answers.site.name == "laptop" else (4, 500)
    machine, size = json.dumps(answers.machine, ensure_ascii=False), short_amount(answers.parameters)
    objective = 'objective = "masked_tokens"\n' if FAMILIES[answers.model_type].is_encoder else ""
    heads = f"{model.num_attention_heads} heads, {model.num_key_value_heads} of keys and values"
    return f"""#:schema {SCHEMA_FILE}
# Made by `kielo init`. Every key has a default: `kielo show` prints all values and their origins.
name = "{answers.name}"  # the run is stored in runs/{answers.name}
language = "{answers.language}"
description = "{answers.model_type}, {size}, {cards.language(answers.language).name}"
cluster = {machine}  # for plans, and for MFU

{_corpus_text(answers)}
[tokenizer]
vocab_size = {usual.vocabulary_size:_}  # more for more text; best a multiple of 64

[dataset]
sequence_length = {usual.sequence_length}
max_epochs = {epochs}  # at most, for each text (Muennighoff et al. 2023)

# {short_amount(count(model))} parameters: {model.num_hidden_layers} layers of {model.hidden_size:,}, {heads},
# MLP {model.intermediate_size:,}. For another shape give these keys in place of `params`.
[model]
model_type = "{answers.model_type}"
params = "{size}"

[train]
{objective}{_tokens_text(answers, step)}
tokens_per_step = {step:_}
learning_rate = {usual.learning_rate:g}

[checkpoint]
every_steps = {every}

# How ranks share the work: `kielo plan` ranks layouts, and `kielo plan explain` prints one to paste here.
# [layout]
# tensor = 1
# pipeline = 1
"""


def _corpus_text(answers: Answers) -> str:
    kinds = "# .txt (one document a line), .jsonl[.gz|.zst], .parquet, or a folder of HTML.\n"
    if not answers.sources:
        return (
            "# Plans need no text; `kielo run` does. Remove the # and name the text.\n"
            f'{kinds}# [corpus]\n# sources = ["my_text.txt"]\n'
        )
    listed = ", ".join(json.dumps(path, ensure_ascii=False) for path in answers.sources)
    return f"{kinds}[corpus]\nsources = [{listed}]\n"


def _tokens_text(answers: Answers, step: int) -> str:
    if answers.tokens is None:
        return "# tokens = 1_000_000  # default: the text, dataset.max_epochs times"
    tokens = max(1, answers.tokens // step) * step
    return f"tokens = {tokens:_}  # {tokens / answers.parameters:.3g} for each parameter"


def _next_commands(answers: Answers, path: Path) -> list[str]:
    lines, quoted = ["next:"], shlex.quote(str(path))
    if answers.site.name != "laptop":
        least, most = (8, 128) if answers.parameters >= 2e10 else (1, 16)
        of_site = answers.site.nodes
        nodes = f"{least}..{min(most, of_site)}" if of_site > least else f"{of_site}"
        lines += [
            f"  kielo plan {quoted} --nodes {nodes}  # layouts that fit, days, hours",
            f"  kielo rehearse {quoted} --nodes 1  # one rank's exact bytes, here",
        ]
    if answers.sources:
        paths = [path for path in answers.sources if not re.search(r"[*?\[]", path)]
        missing = [path for path in paths if not is_address(path) and not os.path.lexists(path)]
        if missing:
            lines.insert(0, f"missing yet: {', '.join(missing)}")
        stage = "" if answers.site.name == "laptop" else " --to pack"
        lines.append(f"  kielo run {quoted}{stage}")
    else:
        lines.append(f"  kielo run {quoted}  # after corpus.sources names text")
    return lines
