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
        outcome = here(workplace, "show", over(workplace, f"{key} = {value}"))
        is_ramp = key == "train.batch_ramp" and value.startswith("{")  # a table, of other keys
        told = "unknown key train.batch_ramp.colour" if is_ramp else "does not fit. Fix"
        refused(outcome, told, key.rpartition(".")[2], "odd.toml")


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_that_is_none(here, workplace, key):
    """Not-a-number, both infinities, words, a switch, and more than 64 bits hold are refused."""
    too_large = "1" + 30 * "0" if NUMBERS[key] is int else "1e400"
    for value in ("nan", "inf", "-inf", '"many"', "true", "-1", too_large):
        outcome = here(workplace, "show", over(workplace, f"{key} = {value}"))
        refused(outcome, "does not fit. Fix", key, "odd.toml")


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
        "unknown key",
        f"{section}.colour".lstrip("."),
        "odd.toml",
    )


@pytest.mark.parametrize(
    "section", [key for key in _KNOWN if key not in LEAVES] + ["phases", "corpus.sources"]
)
def test_a_value_where_a_section_is(here, workplace, section):
    """`train = 5`: no section, no traceback."""
    refused(here(workplace, "show", over(workplace, f"{section} = 5")), "= 5 does not fit", section)


ODD_FILES = {
    "empty": (b"", "name", "name is missing"),
    "no TOML": (b"name: tiny\n", "odd.toml", "not valid TOML"),
    "Latin-1": ('description = "öö"\n'.encode("latin-1"), "not UTF-8", "byte 15 is"),
    "UTF-16": ('name = "tiny"\n'.encode("utf-16"), "not UTF-8", "byte 0 is"),
    "a key twice": (b'name = "a"\nname = "b"\n', "line 2", "Cannot overwrite a value"),
    "a section twice": (b"[train]\n[train]\n", "line 2", "Cannot declare"),
    "zeros": (bytes(1000), "odd.toml", "not valid TOML"),
    "half a line": (b'name = "tiny', "odd.toml", "Unterminated string"),
    "nested beyond the stack": (b"a = " + b"[" * 20_000 + b"]" * 20_000, "odd.toml", "not valid TOML"),
    "keys beyond the stack": (b"a" + b".a" * 2_000 + b" = 1", "odd.toml", "tables are nested too deep"),
    "a number of 20,000 digits": (b"seed = " + b"9" * 20_000, "odd.toml", "not valid TOML"),
    "a gzip": (bytes.fromhex("1f8b0800000000000003"), "odd.toml", "byte 1 is not UTF-8"),
    "carriage returns alone":
        (b'name = "tiny"\rlanguage = "et"\r', "line 1", "Expected newline or end of document"),
    "extends itself": (b'extends = "odd.toml"\n', "a single level", "which itself extends 'odd.toml'"),
    "extends a stranger": (b'extends = "nobody.toml"\n', "nobody.toml", "no such recipe file"),
    "extends a folder": (b'extends = "/tmp"\n', "/tmp", "a folder without recipe.toml"),
    "extends a number": (b"extends = 5\n", "extends", "does not fit. Fix: a path"),
    "extends two": (b'extends = ["tiny.toml", "tiny.toml"]\n', "extends", "does not fit. Fix: a path"),
    "extends nothing": (b'extends = ""\n', "extends", "does not fit. Fix: a path"),
    "extends a text": (b'extends = "text.txt"\n', "text.txt", "Fix: kielo run own_text"),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD_FILES)
def test_an_odd_file(here, workplace, what):
    """A file that is no recipe is named, with the line or byte where there is one."""
    content, named, reason = ODD_FILES[what]
    (workplace / "odd.toml").write_bytes(content)
    refused(here(workplace, "show", "odd.toml"), reason, named)


def test_a_byte_order_mark(here, workplace):
    """Notepad's UTF-8 begins with a mark, which is no part of the recipe."""
    path = workplace / "tiny.toml"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    went_well(here(workplace, "show", "tiny.toml"))


def test_a_loop_of_two_recipes(here, workplace):
    """Each extends the other: one level is allowed, so neither is followed round."""
    (workplace / "one.toml").write_text('extends = "two.toml"\n', encoding="utf-8")
    (workplace / "two.toml").write_text('extends = "one.toml"\n', encoding="utf-8")
    refused(here(workplace, "show", "one.toml"), "a single level", "one.toml", "two.toml")


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
    told = "a folder without recipe.toml" if what == "a folder" else "no such recipe file"
    refused(here(workplace, "show", "odd.toml"), told, "odd.toml")


SETS = {
    "nothing": ("", "section.key=value", "Fix: section.key=value"),
    "no value": ("train.tokens", "section.key=value", "Fix: section.key=value"),
    "no key": ("=5", "section.key=value", "Fix: section.key=value"),
    "no section": (".tokens=5", "section.key=value", "Fix: section.key=value"),
    "no leaf": ("train.=5", "section.key=value", "Fix: section.key=value"),
    "dots": ("..=5", "section.key=value", "Fix: section.key=value"),
    "a section": ("train=5", "train", "is a section. Fix: a key of it"),
    "below a value": ("name.first=5", "name", "holds a value, so name.first does not exist"),
    "empty number": ("train.tokens=", "train.tokens", "does not fit. Fix: 3B"),
    "two lines": ("train.tokens=5\nname = 'x'", "train.tokens", "does not fit. Fix: 3B"),
    "an index": ("corpus.sources[0]=x", "corpus.sources[0]", "unknown key"),
    "a space inside": ("train.to kens=5", "train.to kens", "unknown key"),
    "another case": ("TRAIN.TOKENS=5", "TRAIN", "unknown key"),
    "a dash for the underscore":
        ("train.learning-rate=5", "train.learning-rate", "the nearest known key is train.learning_rate"),
    "a unit": ("train.tokens=5X", "train.tokens", "does not fit. Fix: 3B"),
    "a comma": ("train.learning_rate=0,001", "train.learning_rate", "Fix: 0.001"),
    "too large for a float": ("train.learning_rate=1e400", "train.learning_rate", "a finite number"),
    "a list": ("train.tokens=[5]", "train.tokens", "a whole number"),
    "a boolean in words": ("train.tensorboard=perhaps", "train.tensorboard", "true or false"),
    "dunder": ("__class__.x=5", "__class__", "unknown key"),
    "2,000 levels": (".".join(["a"] * 2_000) + "=5", "nested too deep", "tables are nested too deep"),
    "20,000 brackets": ("train.tokens=" + "[" * 20_000, "train.tokens", "does not fit. Fix: 3B"),
    "20,000 digits": ("train.tokens=" + "9" * 20_000, "train.tokens", "a number below 2**63"),
    "a surrogate": ("description=\udcff", "UTF-8", "is not UTF-8"),
    "extends": ("extends=demo_estonian", "extends", "unknown key"),
}  # fmt: skip


@pytest.mark.parametrize("what", SETS)
def test_an_odd_set(here, workplace, what):
    """`--set` that says nothing that could be set is refused with its key, and the run folder is not made."""
    text, named, reason = SETS[what]
    refused(here(workplace, "run", "tiny.toml", "--set", text), reason, named)
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
    refused(outcome, "does not fit. ", "name", "odd.toml")


NO_PLACE = "no place of the text"
SOURCES = {
    "none": ("[]", "a list with one entry or more"), "nothing": ('""', "a list with one entry or more"),
    "an empty path": ('[{path = ""}]', NO_PLACE), "nowhere": ("[{}]", NO_PLACE),
    "two places": ('[{path = "text.txt", debian_package = "wamerican"}]', "two places of the text"),
    "held-out": ('[{path = "text.txt", name = "heldout"}]', "are names of the held-out text"),
    "one name twice":
        ('[{path = "text.txt", name = "a"}, {path = "text.txt", name = "a"}]', "'a' names 2 sources"),
    "a number": ("5", "a list in [ ]"),
    "no documents": ('[{path = "text.txt", max_documents = 0}]', "a number greater than 0"),
    "a list in a list": ('[["text.txt"]]', "a table in { }"),
}  # fmt: skip


@pytest.mark.parametrize("what", SOURCES)
def test_sources_that_are_none(here, workplace, what):
    """A source without a place, with two, or with a name that another has."""
    sources, reason = SOURCES[what]
    refused(here(workplace, "show", over(workplace, f"corpus.sources = {sources}")), reason, "corpus.sources")


FITTING = {
    "a batch ramp that shrinks": (
        "train.batch_ramp = {first_tokens_per_step = 256, step_tokens = 16, tokens = 512}",
        "train.batch_ramp", "does not arrive at train.tokens_per_step = 128",
    ),
    "a ramp longer than the run": (
        "train.batch_ramp = {first_tokens_per_step = 64, step_tokens = 64, tokens = 99999}",
        "train.batch_ramp.tokens", "does not end before train.tokens = 2560 does",
    ),
    "a step of half a sequence":
        ("train.tokens_per_step = 8", "train.tokens_per_step", "is no multiple of dataset.sequence_length"),
    "a run shorter than a step": ("train.tokens = 100", "train.tokens", "is less than one step of"),
    "skipping backwards": ("train.skip_steps = [[5, 3]]", "train.skip_steps", "ends before it begins"),
    "skipping one number": ("train.skip_steps = [[5]]", "train.skip_steps", "[1] is missing"),
    "skipping step 0": ("train.skip_steps = [[0, 3]]", "train.skip_steps", "a number greater than 0"),
    "a warm-up and a decay of more than all": (
        'train = {schedule = "wsd", warmup_share = 0.6, decay_share = 0.6}',
        "train.decay_share", "are more than the whole segment",
    ),
    "heads that do not divide": (
        "model.num_attention_heads = 3",
        "model.num_attention_heads", "is not an even number of values for each of",
    ),
    "key-value heads that do not divide": (
        "model.num_key_value_heads = 3",
        "model.num_key_value_heads", "does not divide model.num_attention_heads",
    ),
    "an odd head": ("model.head_dim = 3", "model.head_dim", "is odd, but rotary positions rotate pairs"),
    "a mixture of strangers":
        ("dataset.mixture = {nobody = 1}", "dataset.mixture.nobody", "no source has this name"),
    "a mixture of nothing": ("dataset.mixture = {text = 0}", "dataset.mixture", "a number greater than 0"),
    "a negative mixture": ("dataset.mixture = {text = -1}", "dataset.mixture", "a number greater than 0"),
    "weights without a tokenizer":
        ('model.weights = "hf:somewhere"', "tokenizer.path", "come with their own vocabulary"),
    "weights of another kind":
        ('model.weights = "s3:somewhere"', "model.weights", "Fix: hf:s3:somewhere"),
    "a tokenizer that is not there":
        ('tokenizer.path = "gone"', "tokenizer.path", "no tokenizer.json in this folder"),
    "a vocabulary of nothing":
        ("tokenizer.vocab_size = 5", "tokenizer.vocab_size", "cannot hold 256 bytes"),
    "an unknown language": ('language = "qqq"', "language", "has no card; `kielo languages`"),
    "a language that is a path":
        ('language = "../../etc/passwd"', "language", "has no card; `kielo languages`"),
    "an unknown cluster": ('cluster = "nowhere"', "cluster", "has no card; `kielo clusters` lists all"),
    "phases that do not add up": (
        "train.tokens = 2560\n[[phases]]\ntokens = 1280",
        "train.tokens", "is not the sum of the phases' tokens",
    ),
    "a phase of no tokens": ("[[phases]]\ntokens = 0", "phases.1.tokens", "a number greater than 0"),
    "a phase that does not divide": (
        "[[phases]]\ntokens = 2560\nsequence_length = 12",
        "phases.1.sequence_length", "is no multiple of phases.1.sequence_length",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FITTING)
def test_values_that_do_not_fit_each_other(here, workplace, what):
    """Each number may be had, together they may not: the keys are named and the fix."""
    line, named, reason = FITTING[what]
    refused(here(workplace, "show", over(workplace, line)), reason, named)


# A key with a value that fits, and that nothing would read.
WITHOUT_EFFECT = {
    "another family's key":
        ("model.layer_norm_epsilon = 1e-6", "model.layer_norm_epsilon", "llama models do not have it"),
    "another family's key at its default":
        ("model.rotary_pct = 1.0", "model.rotary_pct", "it is of gpt_neox. Fix: leave the key out"),
    "a window of no layer": (
        'model = {model_type = "qwen3", sliding_window = 8, layer_types = ["full_attention", '
        '"full_attention"]}',
        "model.sliding_window", "no layer has a window. Fix: model.sliding_window with model.layer_types",
    ),
    "a scaling of no type":
        ("model.rope_scaling = {factor = 8.0}", "model.rope_scaling.factor", "no effect without rope_type"),
    "a number of another scaling": (
        'model.rope_scaling = {rope_type = "linear", factor = 8.0, beta_fast = 32}',
        "model.rope_scaling.beta_fast", "has no effect with rope_type = 'linear'",
    ),
    "two bases": (
        'model = {rope_theta = 5e5, rope_scaling = {rope_type = "linear", factor = 2.0, rope_theta = 1e6}}',
        "model.rope_theta", "has no effect because model.rope_scaling.rope_theta replaces it",
    ),
    "masking without masks":
        ('train.masking = "subword"', "train.masking", 'Fix: train.objective = "masked_tokens", or leave'),
    "a rate of masking without masks":
        ("train.final_masking_rate = 0.2", "train.final_masking_rate", "hides no tokens. Fix: train"),
    "a decay of a cosine":
        ("train.decay_share = 0.3", "train.decay_share", 'Fix: train.schedule = "wsd", or leave the key out'),
    "a decay of a phase's line": (
        "train.tokens = 2560\n[[phases]]\ntokens = 2560\n"
        'learning_rate = 1e-3\nschedule = "linear"\ndecay_share = 0.3',
        "phases.1.decay_share", 'no effect with phases.1.schedule = "linear". Fix: phases.1.schedule = "wsd"',
    ),
    "what each phase has itself": (
        "train.learning_rate = 1e-4\n[[phases]]\ntokens = 2560\nlearning_rate = 1e-3",
        "train.learning_rate", "because each of [[phases]] has its own. Fix: phases.N.learning_rate",
    ),
    "a schedule without a pipeline": (
        'layout.pipeline_schedule = "gpipe"',
        "layout.pipeline_schedule", "which is no pipeline. Fix: layout.pipeline of 2 or more",
    ),
    "an overlap without tensor ranks": (
        'layout.tensor_overlap = "chunked"', "layout.tensor_overlap", "Fix: layout.tensor of 2 or more",
    ),
    "attention of one context rank": (
        'layout.context_attention = "ulysses"',
        "layout.context_attention", "Fix: layout.context of 2 or more",
    ),
    "a kernel of ALiBi in a model without it": (
        'layout.alibi_kernel = "bias"', "layout.alibi_kernel", 'Fix: model.model_type = "bloom"',
    ),
    "ZeRO of one rank": ("layout = {shard = 1, zero = 3}", "layout.zero", "no other rank holds a part"),
    "layers of no recomputation": (
        "layout.recompute_every_layers = 2", "layout.recompute_every_layers", "Fix: another layout.recompute",
    ),
    "FP8 in bf16": ("train.fp8.head = true", "train.fp8.head", "no step is in fp8. Fix: train.precision"),
    "a watch of no change": (
        'train = {precision = "fp8", fp8 = {emulate = true, watch_steps = 9}}',
        "train.fp8.watch_steps", "no change to fp8 is watched. Fix: train.precision_changes",
    ),
    "tries of no going back": (
        'train.spikes = {response = "tell", max_tries = 5}',
        "train.spikes.max_tries", "never goes back. Fix:",
    ),
    "copies where checkpoints are": (
        "checkpoint = {every_steps = 5, memory_every_steps = 10}",
        "checkpoint.memory_every_steps", "Fix: fewer steps than checkpoint.every_steps",
    ),
    "limits of code without code": (
        "corpus.code.max_line_characters = 99",
        "corpus.code.max_line_characters", 'is cleaned. Fix: kind = "code"',
    ),
    "filters of text that is clean": (
        'corpus = {min_line_characters = 5, sources = [{path = "text.txt", clean = false}]}',
        "corpus.min_line_characters", "because no source of running text is cleaned",
    ),
    "a temperature of one language": (
        "tokenizer.temperature = 3.0", "tokenizer.temperature", "Fix: sources of several languages",
    ),
    "a temperature of one source": (
        "dataset.temperature = 3.0", "dataset.temperature", "no phase has several sources without a mixture",
    ),
    "a unit of no weights": (
        'dataset.mixture_unit = "documents"', "dataset.mixture_unit", "without weights of a mixture. Fix:",
    ),
    "an encoder's measure": ("evaluate.pseudo_tokens = 9", "evaluate.pseudo_tokens", "which hides no tokens"),
    "choices of the likeliest": (
        "evaluate = {temperature = 0.0, top_k = 9}", "evaluate.top_k", "which takes the likeliest token",
    ),
    "examples of no task": ("evaluate.shots = 3", "evaluate.shots", "without evaluate.tasks. Fix:"),
    "a layer of no tags": (
        "evaluate.part_of_speech.from_layer = 1",
        "evaluate.part_of_speech.from_layer", "that tags are learned",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WITHOUT_EFFECT)
def test_a_key_without_effect(here, workplace, what):
    """It is refused by name before the first stage, with what would put it in force."""
    line, named, reason = WITHOUT_EFFECT[what]
    refused(here(workplace, "run", over(workplace, line)), reason, named)
    assert not (workplace / "run" / "corpus").exists()


def test_a_key_that_the_command_line_puts_out_of_force(here, workplace):
    """It is inherited, and no mistake; the same key on the command line is one."""
    (workplace / "odd.toml").write_text(
        'extends = "tiny.toml"\ntrain = {schedule = "wsd", decay_share = 0.3}\n', encoding="utf-8"
    )
    cosine = ("--set", "train.schedule=cosine")
    went_well(here(workplace, "show", "odd.toml", *cosine))
    refused(
        here(workplace, "show", "odd.toml", *cosine, "--set", "train.decay_share=0.3"),
        "has no effect because no segment", "train.decay_share", "--set: ",
    )  # fmt: skip


NO_RANKS = "does not make up 1 ranks"
# key → why a number without end is refused, if it is
LARGE = {
    "layout.context": NO_RANKS, "layout.tensor": NO_RANKS, "layout.pipeline": NO_RANKS,
    "layout.replicate": NO_RANKS, "layout.shard": NO_RANKS,
    "model.num_hidden_layers": "a number less than or equal to 10000",
    "train.micro_batch_sequences": None, "train.log_every_steps": None, "checkpoint.every_steps": None,
    "train.max_skipped_steps_in_a_row": None, "seed": None,
    "dataset.sequence_length": "is no multiple of dataset.sequence_length",
    "train.tokens": "times, more than dataset.max_epochs",
    "train.tokens_per_step": "is less than one step of train.tokens_per_step",
    "train.fp8.watch_steps": "a number less than or equal to 100000",
    "train.start_timeout_seconds": "a number less than or equal to 604800",
    "model.num_key_value_heads": "does not divide model.num_attention_heads",
}  # fmt: skip


@pytest.mark.parametrize("key", LARGE)
def test_a_number_beyond_any_machine(here, packed, key):
    """10^15 and 2^63 - 16: planned at once or refused at once, never counted through."""
    for number in (10**15, 2**63 - 16):
        outcome = here(packed, "plan", "resolve", "tiny.toml", "--set", f"{key}={number}")
        if LARGE[key] is None:
            went_well(outcome)
        else:
            refused(outcome, LARGE[key], key, str(number))
            assert not (packed / "run" / "resolved.toml").exists()


def test_every_complaint_at_once(here, workplace):
    """Three mistakes in three sections are told together, so that a job waits in the queue once."""
    sets = ("train.tokens=0", "model.hidden_size=-4", "language=qqq")
    refused(here(workplace, "show", "tiny.toml", *(part for text in sets for part in ("--set", text))),
            "3 things to put right", "train.tokens", "model.hidden_size", "language")  # fmt: skip


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
