"""Weights and tokenizers by folder or by name on the hub: what is here, what is fetched, what is refused."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from kielo.artifact.weights_folder import (
    fetch_tokenizer,
    fetch_weights,
    is_on_hub,
    passed_over_in_words,
    pinned,
    resolve_tokenizer,
    resolve_weights,
    tokenizer_here,
    unique_keys,
    weight_files,
    weights_here,
)
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Model
from kielo.resolve.complete_model import overridden_in_words

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = ["*.json", "*.jinja", "merges.txt", "tokenizer.model", "vocab.txt"]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("KIELO_PREFETCHED", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Hub:
    """A hub whose repository org/one has `served` files, and a cache with `cached` ones (None: nothing)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, snapshot: Path):
        self.snapshot, self.cached, self.served = snapshot, None, []
        self.asked: list[tuple[Any, ...]] = []
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def download(self, name: str, **options: Any) -> str:
        if options["allow_patterns"] == ["additional_chat_templates/*.jinja"]:
            assert options["revision"] == COMMIT and "local_files_only" not in options
            self.snapshot.joinpath("additional_chat_templates").mkdir(exist_ok=True)
            return str(self.snapshot)
        options.pop("ignore_patterns").index("*/*")
        *small, pattern = options.pop("allow_patterns")
        assert small == SMALL
        is_local, revision = options.pop("local_files_only", False), options.pop("revision")
        self.asked.append(("cache" if is_local else "hub", name, revision, pattern, options.get("cache_dir")))
        if name != "org/one":
            raise OSError("no such repository\nsecond line")
        files = (
            self.cached
            if is_local
            else [*self.served, *(["pytorch_model.bin"] if pattern == "*.bin" else [])]
        )
        if files is None:
            raise LocalEntryNotFoundError("not cached")
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for file in files:
            (self.snapshot / file).write_text("{}")
        return str(self.snapshot)


@pytest.fixture
def hub(place, monkeypatch) -> Hub:
    return Hub(monkeypatch, place / "hub" / "snapshots" / COMMIT)


@pytest.mark.parametrize(
    ("reference", "is_there"),
    [
        (None, False), ("", False), ("org/one", False), ("hf:org/one", True), ("hf:org/one@main", True),
        ("hf:one", False), ("hf:org/one/two", False), ("hf:/one", False), ("hf:./one", False),
        ("hf:~/one", False), ("hf:here/one", False),
    ],
)  # fmt: skip
def test_what_is_a_name_on_the_hub(reference, is_there, place) -> None:
    (place / "here" / "one").mkdir(parents=True)
    assert is_on_hub(reference) is is_there


def test_a_folder_is_taken_as_it_is(place, monkeypatch) -> None:
    """By a path, from home too; nothing is looked for on the hub."""
    monkeypatch.setenv("HOME", str(place / "home"))
    (place / "home" / "w").mkdir(parents=True)
    (place / "a" / "b").mkdir(parents=True)
    for reference, folder in (
        ("hf:~/w", place / "home" / "w"),
        ("hf:a/b", Path("a/b")),
        ("a/b", Path("a/b")),
    ):
        assert resolve_weights(reference) == weights_here(reference) == folder
        assert resolve_tokenizer(reference) == tokenizer_here(reference) == folder
    assert resolve_tokenizer("gone/far") == tokenizer_here("gone/far") == Path("gone/far")
    for reference, of_run in (
        ("hf:./gone", ""), ("hf:/gone/one", ""), ("hf:~/gone", ""), ("hf:a/b/gone", ""), ("hf:gone", ""),
        ("hf:runs/a/hf", ", which the stage export of a run makes"),
    ):  # fmt: skip
        assert weights_here(reference) is None
        with pytest.raises(KieloError) as caught:
            resolve_weights(reference)
        assert str(caught.value).startswith(
            f"model.weights = {reference!r}: there is no folder {reference[3:]}{of_run}. Fix: hf:FOLDER, "
        )


def test_weights_are_fetched_once(hub) -> None:
    """The cache is asked by each kind of file; safetensors come first, pickled ones where there are none."""
    hub.served = ["config.json"]
    assert resolve_weights("hf:org/one@v2") == hub.snapshot
    assert (hub.snapshot / "additional_chat_templates").is_dir()
    cache = [
        ("cache", "org/one", "v2", pattern, None) for pattern in ("*.safetensors", "*.bin", "tokenizer.json")
    ]
    fetches = [("hub", "org/one", "v2", pattern, None) for pattern in ("*.safetensors", "*.bin")]
    assert hub.asked == cache + fetches
    hub.asked.clear()
    hub.cached = []
    assert resolve_weights("hf:org/one") == weights_here("hf:org/one") == hub.snapshot
    assert hub.asked == [("cache", "org/one", None, "*.safetensors", None)] * 2
    hub.asked.clear()
    (hub.snapshot / "config.json").unlink()
    assert weights_here("hf:org/one") is None and len(hub.asked) == 3  # half a snapshot
    (hub.snapshot / "pytorch_model.bin").unlink()
    hub.served = ["config.json", "model.safetensors"]
    hub.asked.clear()
    assert fetch_weights("hf:org/one", hub.snapshot / "own") == hub.snapshot
    assert hub.asked == [("hub", "org/one", None, "*.safetensors", hub.snapshot / "own")]


def test_a_tokenizer_is_fetched_once(hub) -> None:
    hub.served = ["tokenizer.json"]
    assert resolve_tokenizer("hf:org/one") == hub.snapshot
    assert [one[0] for one in hub.asked] == ["cache"] * 3 + ["hub"] and hub.asked[-1][3] == "tokenizer.json"
    hub.cached = []
    hub.asked.clear()
    assert resolve_tokenizer("hf:org/one") == tokenizer_here("hf:org/one") == hub.snapshot
    assert [one[0] for one in hub.asked] == ["cache"] * 2
    (hub.snapshot / "tokenizer.json").unlink()
    assert tokenizer_here("hf:org/one") is None
    hub.served = ["config.json"]
    with pytest.raises(KieloError, match=r"^tokenizer 'hf:org/one': the repository has no tokenizer\.json$"):
        fetch_tokenizer("hf:org/one")
    hub.served = ["vocab.txt"]
    with pytest.raises(KieloError, match=r"from_pretrained\('org/one'\)\.save_pretrained\('tokenizer'\)"):
        fetch_tokenizer("hf:org/one@main")


def test_what_cannot_be_fetched_says_why(hub) -> None:
    """With the first line of what the hub's client said."""
    told = (
        r"the folder org/none does not exist, and the Hugging Face hub did not give it "
        r"\(OSError: no such repository\)$"
    )
    with pytest.raises(KieloError, match=rf"^model\.weights = 'hf:org/none@x': {told}"):
        fetch_weights("hf:org/none@x")
    with pytest.raises(KieloError, match=rf"^tokenizer 'hf:org/none': {told}"):
        fetch_tokenizer("hf:org/none")


def test_with_prefetched_text_nothing_is_fetched(hub, place, monkeypatch) -> None:
    """Its folder is looked in before the cache; what is in neither is refused."""
    (place / "brought").mkdir()
    (place / "brought" / "prefetched.json").touch()
    monkeypatch.setenv("KIELO_PREFETCHED", str(place / "brought"))
    for resolve, what in ((resolve_weights, "model.weights ="), (resolve_tokenizer, "tokenizer")):
        hub.asked.clear()
        with pytest.raises(
            KieloError, match=f"^{what} 'hf:org/one': is not in KIELO_PREFETCHED={place}/brought, and"
        ):
            resolve("hf:org/one")
        assert [(one[0], one[4]) for one in hub.asked] == [("cache", place / "brought" / "hub")] * 3 + [
            ("cache", None)
        ] * 3


def test_a_reference_is_pinned_to_its_commit(place) -> None:
    """A folder is not, nor a name whose snapshot has no commit for a name."""
    (place / "a" / "b").mkdir(parents=True)
    snapshot = place / "snapshots" / COMMIT
    for reference, folder, found in (
        ("hf:org/one", snapshot, f"hf:org/one@{COMMIT}"),
        ("hf:org/one@main", snapshot, f"hf:org/one@{COMMIT}"),
        ("hf:a/b", snapshot, "hf:a/b"), ("hf:org/one@main", snapshot.with_name("main"), "hf:org/one@main"),
        ("hf:org/one", snapshot.with_name(COMMIT + "0"), "hf:org/one"),
    ):  # fmt: skip
        assert pinned(reference, folder) == found


def shard(folder: Path, index: str, **weight_map: str) -> None:
    (folder / index).write_text(json.dumps({"weight_map": weight_map}))
    for name in weight_map.values():
        (folder / name).touch()


def test_files_of_weights_in_their_order(tmp_path) -> None:
    """Hold to transformers' order: safetensors before pickled files, a single file before an index."""
    known = "model.safetensors, model.safetensors.index.json, pytorch_model.bin, pytorch_model.bin.index.json"
    with pytest.raises(KieloError, match=rf"^{tmp_path}: no weights; looked for {known}$"):
        weight_files(tmp_path)
    shard(tmp_path, "pytorch_model.bin.index.json", x="three")
    assert weight_files(tmp_path) == {tmp_path / "three": ["x"]}
    (tmp_path / "pytorch_model.bin").touch()
    assert weight_files(tmp_path) == {tmp_path / "pytorch_model.bin": None}
    shard(tmp_path, "model.safetensors.index.json", w="two", a="one", v="two")
    assert list(weight_files(tmp_path).items()) == [(tmp_path / "one", ["a"]), (tmp_path / "two", ["w", "v"])]
    (tmp_path / "model.safetensors").touch()
    assert weight_files(tmp_path) == {tmp_path / "model.safetensors": None}


@pytest.mark.parametrize(
    "present",
    [
        ("one", "shards"), ("one", "bin"), ("shards", "bin"), ("bin", "bin shards"), ("one", "bin shards"),
        ("one", "shards", "bin", "bin shards"), ("one", "shards", "named"), ("one", "named"),
    ],
)  # fmt: skip
def test_transformers_reads_the_same_file(present: tuple[str, ...], tmp_path) -> None:
    """Read the set of weights that transformers reads, and name the others."""
    names = {
        "one": "model.safetensors", "shards": "model.safetensors.index.json", "bin": "pytorch_model.bin",
        "bin shards": "pytorch_model.bin.index.json", "named": "model.fp32.safetensors.index.json",
    }  # fmt: skip
    config = GPT2Config(vocab_size=5, n_embd=4, n_layer=1, n_head=1, n_positions=4)
    model, filled = GPT2LMHeadModel(config), {}
    for number, kind in enumerate(present, start=1):
        torch.nn.init.constant_(model.transformer.wte.weight, number)
        stored = {
            name: value.clone() for name, value in model.state_dict().items() if name != "lm_head.weight"
        }
        file = names[kind].removesuffix(".index.json") if kind in ("one", "bin") else f"{kind}-1"
        file = file if "." in file else file + (".bin" if "bin" in kind else ".safetensors")
        (torch.save if "bin" in kind else save_file)(stored, tmp_path / file)
        if file != names[kind]:
            weight_map = {"weight_map": dict.fromkeys(stored, file), "metadata": {}}
            (tmp_path / names[kind]).write_text(json.dumps(weight_map))
        filled[file] = float(number)
    extra = {"transformers_weights": names["named"]} if "named" in present else {}
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | extra))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).transformer.wte.weight[0, 0].item()
    assert [filled[path.name] for path in weight_files(tmp_path)] == [theirs]
    said = passed_over_in_words(tmp_path)
    chosen = "named" if "named" in present else present[0]
    assert said.startswith(f"{tmp_path} has more than one set of weights: {names[chosen]} is read, as")
    assert all(names[kind] in said for kind in present)
    assert said in overridden_in_words(Model(weights=f"hf:{tmp_path}"))


def test_one_set_of_weights_passes_nothing_over(tmp_path) -> None:
    """An export's index, which names its single file, is no second set."""
    assert passed_over_in_words(tmp_path) == ""
    shard(tmp_path, "model.safetensors.index.json", w="model.safetensors")
    assert passed_over_in_words(tmp_path) == ""
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert "not model.safetensors.index.json." in passed_over_in_words(tmp_path)


@pytest.mark.parametrize("name", ["gone.safetensors", "../model.safetensors", "model.bin", 5, ""])
def test_a_named_file_that_is_not_there(name: object, tmp_path) -> None:
    """The file that config.json names is never replaced by another one."""
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": name}))
    with pytest.raises(KieloError, match=r"config\.json: transformers_weights = .* Fix: remove the key, or"):
        weight_files(tmp_path)


NO_MAP = "not a weight index: it has no weight_map from tensors to files"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[]", NO_MAP), ("{}", NO_MAP), ('{"weight_map": {}}', NO_MAP), ('{"weight_map": ["a"]}', NO_MAP),
        ("{", "not a weight index: not valid JSON (Expecting"),
        ("[" * 100_000, "not a weight index: not valid JSON (maximum recursion"),
        ('{"weight_map": {"w": "a", "w": "b"}}', "damaged: it names w twice"),
        *((json.dumps({"weight_map": {"w": name}}), f"w is in {name!r}, which is no name of a")
          for name in ("", ".", "..", "a/b", "a\\b", 5)),
    ],
)  # fmt: skip
def test_an_index_that_says_nothing(content, told, tmp_path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(content)
    with pytest.raises(KieloError) as caught:
        weight_files(tmp_path)
    assert str(caught.value).startswith(f"{path}: {told}")


def test_an_index_of_files_that_are_not_there_names_eight(tmp_path) -> None:
    weight_map = {f"w{number}": f"file{number}" for number in range(10)}
    (tmp_path / "file3").touch()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    named = ", ".join(f"file{number}" for number in (0, 1, 2, 4, 5, 6, 7, 8))
    with pytest.raises(KieloError, match=f"index.json names files that do not exist: {named}$"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert unique_keys(tmp_path, [("a", 1), ("b", 2)]) == {"a": 1, "b": 2}
