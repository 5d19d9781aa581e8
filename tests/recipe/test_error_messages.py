"""What people read of errors that are not Kielo's own, and of keys and names that do not fit."""

import errno
import json
import resource

import pytest

from kielo.recipe.cards import Cluster
from kielo.recipe.complaints import Complaint, did_you_mean, dotted, from_validation, keys_of, nearest_key
from kielo.recipe.errors import KieloError, first_line, rank_prefix, sentence
from kielo.recipe.sections import Recipe, Source


class OutOfMemoryError(RuntimeError):
    """As torch calls its own."""


class DistBackendError(RuntimeError):
    """As torch.distributed calls its own."""


def json_error() -> json.JSONDecodeError:
    return json.JSONDecodeError("Expecting value", "x", 0)


MOST = resource.getrlimit(resource.RLIMIT_NPROC)[0]
NO_MORE = (
    "the system gives you no more processes and threads. Fix: a higher `ulimit -u`"
    + (f", which is {MOST}," if MOST != resource.RLIM_INFINITY else ",")
    + " a job in place of the login node, or fewer ranks and workers"
)
LOST = (
    "the ranks lost each other (%s). Another rank's message, if any, names the cause. Fix for a slow rank: a "
    "longer train.step_timeout_seconds"
)
SENTENCES: list[tuple[BaseException, str | None]] = [
    (KieloError("give 1 or more"), "give 1 or more"),
    (ModuleNotFoundError(name="torch.nn"), "this verb needs torch. Fix: pip install 'kielo[train]'"),
    (ModuleNotFoundError(name="numpy"), None),
    (ModuleNotFoundError(), None),
    (MemoryError(), "out of memory (of the CPU). Fix: smaller batches or a larger machine"),
    (OutOfMemoryError("tried 2 GB\nmore"), "out of memory (tried 2 GB). Fix: smaller batches or a larger "
      "machine"),
    (RuntimeError("[x] can't allocate memory: 5"),
     "out of memory ([x] can't allocate memory: 5). Fix: smaller batches or a larger machine"),
    (RuntimeError("another"), None),
    (ValueError("can't allocate memory"), None),
    (RecursionError(), "a file is nested too deeply. Files that Kielo writes and reads have a few levels"),
    (OSError(errno.ENOSPC, "No space left", "a.txt"),
     "a.txt: No space left; free some space, then run the same command to resume"),
    (OSError(errno.EXDEV, "Cross-device link", "a", None, "b"), "a → b: Cross-device link"),
    (OSError(errno.EIO, ""),
     "a file or device: Input/output error; the disk or its network failed: the system's log (dmesg) says "
     "more"),
    (OSError("no number"), None),
    (json_error(), "a file has wrong content (Expecting value: line 1 column 1 (char 0)). KIELO_TRACEBACK=1 "
     "shows the function that read it"),
    (DistBackendError("broken"), LOST % "broken"),
    (RuntimeError("[gloo/transport/tcp/pair.cc:1] closed"), LOST % "[gloo/transport/tcp/pair.cc:1] closed"),
    (ValueError("gloo/transport"), None),
    (RuntimeError("can't start new thread"), NO_MORE),
    (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), NO_MORE),
    (RuntimeError("[gloo] Resource temporarily unavailable"), NO_MORE),
    (ValueError("can't start new thread"), None),
]  # fmt: skip


def test_errors_of_an_expected_kind_are_one_sentence(monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert [sentence(error) for error, _ in SENTENCES] == [said for _, said in SENTENCES]
    assert rank_prefix() == ""
    monkeypatch.setenv("RANK", "3")
    assert rank_prefix() == "rank 3: "
    assert sentence(MemoryError()).startswith("rank 3: out of memory (of the CPU)")


def test_the_ranks_lost_each_other_at_a_line_of_ours() -> None:
    """The innermost frame outside of torch, by its last folders."""
    try:
        raise DistBackendError("broken")
    except DistBackendError as error:
        said, line = sentence(error), error.__traceback__.tb_lineno
    name = "test_the_ranks_lost_each_other_at_a_line_of_ours"
    assert said.startswith(
        f"the ranks lost each other at tests/recipe/test_error_messages.py:{line} in {name} (broken). "
    )


def test_a_first_line_is_cut_at_300_characters() -> None:
    assert first_line(ValueError("x" * 301 + "\ny")) == "x" * 300
    assert first_line(ValueError("")) == ""


def test_keys_of_a_card_or_recipe() -> None:
    keys = list(keys_of(Recipe))
    assert {"name", "train", "train.fp8", "train.fp8.head", "evaluate.part_of_speech.pieces"} <= set(keys)
    assert next(iter(keys_of(Source, "a."))) == "a.name"
    assert dotted(("phases", 2, "tokens")) == "phases.3.tokens"
    assert dotted(("a", "phases", 2)) == "a.phases[2]" and dotted((3, "a")) == "[3].a"


NEAREST = {
    "seq_len": "dataset.sequence_length",  # as others call it
    "model.lr": "train.learning_rate",
    "LR": "train.learning_rate",
    "layout.tensr": "layout.tensor",
    "checkpoint.steps": "train.tokens",
    "dataset.length": "dataset.sequence_length",
    "z_los": "train.z_loss",
}


def test_the_nearest_key_is_found_by_spelling_then_by_words() -> None:
    assert {key: nearest_key(key, Recipe) for key in NEAREST} == NEAREST
    assert nearest_key("lr", Cluster) is None and nearest_key("node", Cluster) == "nodes"


def test_a_name_that_may_be_meant() -> None:
    known = {"lumi_g": ["the LUMI"], "leonardo": [], "juwels": []}
    meant = {
        "lumi_g": "lumi_g",
        "LUMI": "lumi_g",
        "the": "lumi_g",
        "leo": "leonardo",
        "juwel": "juwels",
        "xq": None,
    }
    for given, name in meant.items():
        assert did_you_mean(given, known) == (f"; did you mean {name}?" if name else ""), given


def told(**values) -> list[str]:
    data = {"name": "x", "language": "et", "corpus": {"sources": ["a.txt"]}} | values
    data = {key: value for key, value in data.items() if value is not ...}
    try:
        Recipe.model_validate(data)
    except ValueError as error:
        found = from_validation(error, Recipe, lambda key: "f")
        assert all(isinstance(one, Complaint) and len(one.keys) == 1 for one in found)
        return [f"{one.keys[0]} | {one.message}" for one in found]
    return []


TOLD = [
    ({"name": ...}, ["name | f: name is missing. Fix: name = \"my_model\""]),
    ({"phases": [{}]}, ["phases.1.tokens | f: phases.1.tokens is missing and has no default"]),
    ({"train": 5}, ["train | f: train = 5 does not fit, because train is a section. Fix: a key of it, such "
      "as train.tokens"]),
    ({"train": {"learning_rate": "0,001"}},
     ["train.learning_rate | f: train.learning_rate = '0,001' does not fit. Fix: 0.001 "
      "(default: 0.001)"]),
    ({"train": {"learning_rate": "x"}},
     ["train.learning_rate | f: train.learning_rate = 'x' does not fit. Fix: a number "
      "(default: 0.001)"]),
    ({"train": {"z_loss": -1}},
     ["train.z_loss | f: train.z_loss = -1 does not fit. Fix: a number greater than or equal "
      "to 0 "
      "(default: 0.0)"]),
    ({"train": {"schedule": "wsdd"}},
     ["train.schedule | f: train.schedule = 'wsdd' does not fit. Fix: 'cosine', 'linear' or "
      "'wsd'; did "
      "you mean wsd? (default: 'cosine')"]),
    ({"train": {"fp8": {"hed": True}}},
     ["train.fp8.hed | f: unknown key train.fp8.hed; the nearest known key is train.fp8.head"]),
    ({"corpus": {"sources": [{"path": "a", "pth": "b"}]}},
     ["corpus.sources[0].pth | f: unknown key corpus.sources[0].pth; the nearest known key is "
      "corpus.sources[0].path"]),
    ({"phases": [{"tokens": 5, "tokns": 5}]},
     ["phases.1.tokns | f: unknown key phases.1.tokns; the nearest known key is phases.1.tokens"]),
    ({"zzzzqq": 1}, ["zzzzqq | f: unknown key zzzzqq; `kielo schema --of recipe` lists the known keys"]),
    ({"corpus": {"sources": [{"path": 5}]}},
     ["corpus.sources[0].path | f: corpus.sources[0].path = 5 does not fit. Fix: a text in "
      "quotes"]),
    ({"corpus": {"sources": []}},
     ["corpus.sources | f: corpus.sources = [] does not fit. Fix: a list with one entry or "
      "more"]),
    ({"name": "Põhi mudel!"}, ["name | f: name = 'Põhi mudel!' does not fit. Fix: Pohi_mudel"]),
    ({"seed": 1.5}, ["seed | f: seed = 1.5 does not fit. Fix: a whole number (default: 1)"]),
    ({"folder": "x" * 78, "description": 5},
     ["description | f: description = 5 does not fit. Fix: a text in quotes (default: '')"]),
    ({"description": ["y" * 90]},
     ["description | f: description = ['" + "y" * 75 + "... does not fit. Fix: a text in quotes "
      "(default: '')"]),
    ({"description": ["y" * 76]},
     ["description | f: description = ['" + "y" * 76 + "'] does not fit. Fix: a text in quotes "
      "(default: '')"]),
]  # fmt: skip


@pytest.mark.parametrize("given", TOLD, ids=lambda given: str(given[0])[:40])
def test_what_does_not_fit_is_told_with_what_would_work(given) -> None:
    values, lines = given
    assert told(**values) == lines
