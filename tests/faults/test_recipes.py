"""Recipes that cannot work: every key with an invalid value, odd TOML, odd `--set`, odd names. Each is told
in one message that names the key or the file, at once, and nothing is made.
"""

import os
from typing import Annotated, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kielo.recipe.complaints import keys_of
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Recipe
from tests.faults.trial import belongings, refused, went_well

_KNOWN = list(keys_of(Recipe))
LEAVES = [key for key in _KNOWN if not any(other.startswith(f"{key}.") for other in _KNOWN)]
TAKES_ANY_TABLE = ("model.rope_scaling",)


def _numbers(model: type[BaseModel] = Recipe, prefix: str = "") -> dict[str, type]:
    """Keys whose value is one number: dotted key → int or float."""
    found = {}
    for name, info in model.model_fields.items():
        kind = next(
            (kind for kind in (int, float) if info.annotation in (kind, kind | None) or kind in _parts(info)),
            None,
        )
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found |= _numbers(info.annotation, f"{prefix}{name}.")
        elif kind is not None:
            found[prefix + name] = kind
    return found


def _parts(info: FieldInfo) -> list[type]:
    """Takes types apart: Optional[Annotated[int, …]] has int."""
    return [get_args(part)[0] for part in get_args(info.annotation) if get_origin(part) is Annotated]


NUMBERS = _numbers()


def over(workplace, line: str) -> str:
    """A recipe that says one thing more than tiny.toml; its name."""
    (workplace / "odd.toml").write_text(f'extends = "tiny.toml"\n{line}\n', encoding="utf-8")
    return "odd.toml"


@pytest.mark.parametrize("key", LEAVES)
def test_a_value_of_another_type(here, workplace, key):
    """A date, a list of lists and a table in place of what the key wants."""
    values = ["2026-11-22", "[[1], [[2]]]", '{colour = "blue"}'][: 2 if key in TAKES_ANY_TABLE else 3]
    for value in values:
        refused(
            here(workplace, "show", over(workplace, f"{key} = {value}")), key.rpartition(".")[2], "odd.toml"
        )


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_that_is_none(here, workplace, key):
    """Not-a-number, both infinities, words, and more than 64 bits hold are refused."""
    too_large = "1" + 30 * "0" if NUMBERS[key] is int else "1e400"
    for value in ("nan", "inf", "-inf", '"many"', "-1", too_large):
        refused(here(workplace, "show", over(workplace, f"{key} = {value}")), key, "odd.toml")


@pytest.mark.parametrize(
    "section", [key for key in _KNOWN if key not in LEAVES] + ["", "phases.1", "corpus.sources[0]"]
)
def test_an_unknown_key(here, workplace, section):
    """A key that is not there is named in every section, with its place."""
    line = {
        "": "colour = 1", "phases.1": "[[phases]]\ntokens = 2560\ncolour = 1",
        "corpus.sources[0]": 'corpus.sources = [{path = "text.txt", colour = 1}]',
    }.get(section, f"{section}.colour = 1")  # fmt: skip
    refused(
        here(workplace, "show", over(workplace, line)),
        f"{section}.colour".lstrip("."),
        "odd.toml",
        "unknown key",
    )


@pytest.mark.parametrize(
    "section", [key for key in _KNOWN if key not in LEAVES] + ["phases", "corpus.sources"]
)
def test_a_value_where_a_section_is(here, workplace, section):
    """`train = 5`: no section, no traceback."""
    refused(here(workplace, "show", over(workplace, f"{section} = 5")), section)


ODD_FILES = {
    "empty": (b"", "name"),
    "no TOML": (b"name: tiny\n", "odd.toml"),
    "Latin-1": ('description = "öö"\n'.encode("latin-1"), "not UTF-8"),
    "UTF-16": ('name = "tiny"\n'.encode("utf-16"), "not UTF-8"),
    "a key twice": (b'name = "a"\nname = "b"\n', "line 2"),
    "a section twice": (b"[train]\n[train]\n", "line 2"),
    "zeros": (bytes(1000), "odd.toml"),
    "half a line": (b'name = "tiny', "odd.toml"),
    "nested beyond the stack": (b"a = " + b"[" * 20_000 + b"]" * 20_000, "odd.toml"),
    "keys beyond the stack": (b"a" + b".a" * 2_000 + b" = 1", "odd.toml"),
    "a number of 20,000 digits": (b"seed = " + b"9" * 20_000, "odd.toml"),
    "a gzip": (bytes.fromhex("1f8b0800000000000003"), "odd.toml"),
    "carriage returns alone": (b'name = "tiny"\rlanguage = "et"\r', "line 1"),
    "extends itself": (b'extends = "odd.toml"\n', "only one level"),
    "extends a stranger": (b'extends = "nobody.toml"\n', "nobody.toml"),
    "extends a folder": (b'extends = "/tmp"\n', "/tmp"),
    "extends a number": (b"extends = 5\n", "extends"),
    "extends two": (b'extends = ["tiny.toml", "tiny.toml"]\n', "extends"),
    "extends nothing": (b'extends = ""\n', "extends"),
    "extends a text": (b'extends = "text.txt"\n', "text.txt"),
}


@pytest.mark.parametrize("what", ODD_FILES)
def test_an_odd_file(here, workplace, what):
    """A file that is no recipe is named, with the line or byte where there is one."""
    content, named = ODD_FILES[what]
    (workplace / "odd.toml").write_bytes(content)
    refused(here(workplace, "show", "odd.toml"), named)


def test_a_byte_order_mark(here, workplace):
    """Notepad's UTF-8 begins with a mark, which is no part of the recipe."""
    path = workplace / "tiny.toml"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    went_well(here(workplace, "show", "tiny.toml"))


def test_a_loop_of_two_recipes(here, workplace):
    """Each extends the other: one level is allowed, so neither is followed round."""
    (workplace / "one.toml").write_text('extends = "two.toml"\n', encoding="utf-8")
    (workplace / "two.toml").write_text('extends = "one.toml"\n', encoding="utf-8")
    refused(here(workplace, "show", "one.toml"), "one.toml", "two.toml", "only one level")


PLACES = {
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path),
    "a dangling link": lambda path: path.symlink_to("gone"),
    "a pipe": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("what", PLACES)
def test_no_file(here, workplace, what):
    """A recipe's path that no one can read as a file is refused; nothing waits for it."""
    PLACES[what](workplace / "odd.toml")
    refused(here(workplace, "show", "odd.toml"), "odd.toml")


SETS = {
    "nothing": ("", "section.key=value"),
    "no value": ("train.tokens", "section.key=value"),
    "no key": ("=5", "section.key=value"),
    "no section": (".tokens=5", "section.key=value"),
    "no leaf": ("train.=5", "section.key=value"),
    "dots": ("..=5", "section.key=value"),
    "a section": ("train=5", "train"),
    "below a value": ("name.first=5", "name"),
    "empty number": ("train.tokens=", "train.tokens"),
    "two lines": ("train.tokens=5\nname = 'x'", "train.tokens"),
    "an index": ("corpus.sources[0]=x", "corpus.sources[0]"),
    "a space inside": ("train.to kens=5", "train.to kens"),
    "another case": ("TRAIN.TOKENS=5", "TRAIN"),
    "a dash for the underscore": ("train.learning-rate=5", "train.learning-rate"),
    "a unit": ("train.tokens=5X", "train.tokens"),
    "a comma": ("train.learning_rate=0,001", "train.learning_rate"),
    "too large for a float": ("train.learning_rate=1e400", "train.learning_rate"),
    "a list": ("train.tokens=[5]", "train.tokens"),
    "a boolean in words": ("train.tensorboard=perhaps", "train.tensorboard"),
    "dunder": ("__class__.x=5", "__class__"),
    "2,000 levels": (".".join(["a"] * 2_000) + "=5", "nested too deep"),
    "20,000 brackets": ("train.tokens=" + "[" * 20_000, "train.tokens"),
    "20,000 digits": ("train.tokens=" + "9" * 20_000, "train.tokens"),
    "a surrogate": ("description=\udcff", "UTF-8"),
    "extends": ("extends=demo_estonian", "extends"),
}


@pytest.mark.parametrize("what", SETS)
def test_an_odd_set(here, workplace, what):
    """`--set` that says nothing that could be set is refused with its key, and the run folder is not made."""
    text, named = SETS[what]
    refused(here(workplace, "run", "tiny.toml", "--set", text), named)
    assert not (workplace / "run").exists()


NAMES = [
    "",
    ".",
    "..",
    "../up",
    "a/b",
    "/abs",
    "-rf",
    " x",
    "x ",
    "x\\ny",
    "kõne",
    "x\\u0000y",
    "x" * 300,
    "~",
    "$HOME",
    "a:b",
    "*",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["name", "corpus.sources"])
def test_a_name_that_no_folder_has(here, workplace, key, name):
    """Names become folders and files: those that would lie elsewhere, or nowhere, are refused."""
    line = (
        f'name = "{name}"' if key == "name" else f'corpus.sources = [{{path = "text.txt", name = "{name}"}}]'
    )
    outcome = here(workplace, "show", over(workplace, line))
    if key != "name" and not name:  # an empty name of a source is none: it gets one of its own
        went_well(outcome)
        return
    refused(outcome, "name", "odd.toml")


SOURCES = {
    "none": "[]", "nothing": '""', "an empty path": '[{path = ""}]', "nowhere": "[{}]",
    "two places": '[{path = "text.txt", debian_package = "x"}]',
    "held-out": '[{path = "text.txt", name = "heldout"}]',
    "one name twice": '[{path = "text.txt", name = "a"}, {path = "text.txt", name = "a"}]', "a number": "5",
    "no documents": '[{path = "text.txt", max_documents = 0}]', "a list in a list": '[["text.txt"]]',
}  # fmt: skip


@pytest.mark.parametrize("what", SOURCES)
def test_sources_that_are_none(here, workplace, what):
    """A source without a place, with two, or with a name that another has."""
    refused(here(workplace, "show", over(workplace, f"corpus.sources = {SOURCES[what]}")), "corpus.sources")


FITTING = {
    "a batch ramp that shrinks": (
        "train.batch_ramp = {first_tokens_per_step = 256, step_tokens = 16, tokens = 512}",
        "train.batch_ramp"),
    "a ramp longer than the run": (
        "train.batch_ramp = {first_tokens_per_step = 64, step_tokens = 64, tokens = 99999}",
        "train.batch_ramp.tokens"),
    "a step of half a sequence": ("train.tokens_per_step = 8", "train.tokens_per_step"),
    "a run shorter than a step": ("train.tokens = 100", "train.tokens"),
    "skipping backwards": ("train.skip_steps = [[5, 3]]", "train.skip_steps"),
    "skipping one number": ("train.skip_steps = [[5]]", "train.skip_steps"),
    "skipping step 0": ("train.skip_steps = [[0, 3]]", "train.skip_steps"),
    "a warm-up and a decay of more than all": (
        'train = {schedule = "wsd", warmup_share = 0.6, decay_share = 0.6}', "train.decay_share"),
    "heads that do not divide": ("model.num_attention_heads = 3", "model.num_attention_heads"),
    "key-value heads that do not divide": ("model.num_key_value_heads = 3", "model.num_key_value_heads"),
    "an odd head": ("model.head_dim = 3", "model.head_dim"),
    "a mixture of strangers": ("dataset.mixture = {nobody = 1}", "dataset.mixture.nobody"),
    "a mixture of nothing": ("dataset.mixture = {text = 0}", "dataset.mixture"),
    "a negative mixture": ("dataset.mixture = {text = -1}", "dataset.mixture"),
    "weights without a tokenizer": ('model.weights = "hf:somewhere"', "tokenizer.path"),
    "weights of another kind": ('model.weights = "s3:somewhere"', "model.weights"),
    "a tokenizer that is not there": ('tokenizer.path = "gone"', "tokenizer.path"),
    "a vocabulary of nothing": ("tokenizer.vocab_size = 5", "tokenizer.vocab_size"),
    "an unknown language": ('language = "tlh"', "language"),
    "a language that is a path": ('language = "../../etc/passwd"', "language"),
    "an unknown cluster": ('cluster = "nowhere"', "cluster"),
    "phases that do not add up": ("train.tokens = 2560\n[[phases]]\ntokens = 1280", "train.tokens"),
    "a phase of no tokens": ("[[phases]]\ntokens = 0", "phases.1.tokens"),
    "a phase that does not divide":
        ("[[phases]]\ntokens = 2560\nsequence_length = 12", "phases.1.sequence_length"),
}  # fmt: skip


@pytest.mark.parametrize("what", FITTING)
def test_values_that_do_not_fit_each_other(here, workplace, what):
    """Each number may be had, together they may not: the keys are named and what would work."""
    line, named = FITTING[what]
    refused(here(workplace, "show", over(workplace, line)), named)


LARGE = {
    "layout.context": "layout.context", "layout.tensor": "layout.tensor",
    "layout.pipeline": "layout.pipeline",
    "layout.replicate": "layout.replicate", "layout.shard": "layout.shard",
    "model.num_hidden_layers": "num_hidden_layers",
    "train.micro_batch_sequences": None, "train.log_every_steps": None, "checkpoint.every_steps": None,
    "train.max_skipped_steps_in_a_row": None, "seed": None, "dataset.sequence_length": "sequence_length",
    "train.tokens": "max_epochs", "train.tokens_per_step": "tokens_per_step",
    "train.fp8.watch_steps": "watch_steps",
    "train.start_timeout_seconds": "start_timeout_seconds",
    "model.num_key_value_heads": "num_key_value_heads",
}  # fmt: skip


@pytest.mark.parametrize("key", LARGE)
def test_a_number_beyond_any_machine(here, packed, key):
    """10^15 and 2^63 - 16: planned at once or refused at once, never counted through."""
    for number in (10**15, 2**63 - 16):
        outcome = here(packed, "plan", "resolve", "tiny.toml", "--set", f"{key}={number}")
        if LARGE[key] is None:
            went_well(outcome)
        else:
            refused(outcome, LARGE[key])
            assert not (packed / "run" / "resolved.toml").exists()


def test_every_complaint_at_once(here, workplace):
    """Three mistakes in three sections are told together, so that a job waits in the queue once."""
    sets = ("train.tokens=0", "model.hidden_size=-4", "language=tlh")
    refused(here(workplace, "show", "tiny.toml", *(part for text in sets for part in ("--set", text))),
            "train.tokens", "model.hidden_size", "language", "3 things")  # fmt: skip


def test_a_description_is_only_text(here, workplace):
    """TOML's and Python's own syntax, control characters and a page of text come back as
    they were written.
    """
    text = '"""; import os; {os.system} %s \\u0000 {{7*7}} $(id) `id` \n' + "õ" * 5000
    (workplace / "odd.toml").write_text(
        f'extends = "tiny.toml"\ndescription = {_toml_string(text)}\n', encoding="utf-8"
    )
    assert read_recipe(workplace / "odd.toml").recipe.description == text
    went_well(here(workplace, "show", "odd.toml"))
    assert set(belongings(workplace)) == {"odd.toml", "text.txt", "tiny.toml"}


def _toml_string(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
