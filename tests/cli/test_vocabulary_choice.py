"""`kielo tokenizer measure --model`: the model and machine that are counted with, and the advice in words."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.cli.vocabulary_choice import advise, choice_json, choice_rows, in_words
from kielo.plan.vocabulary_choice import Advice, Choice, Vocabulary
from kielo.recipe.errors import KieloError

KEPT = Choice(Vocabulary("old", "keep", 32_000, 4.0, 0, 400), 10**9, 0.1, 10 * 10**9, 0, 6e19, 0, 1000.0, 0.0)
CHEAPER = Choice(
    Vocabulary("new", "extend", 33_234, 5.0, 1234, 500), 10**9, 0.1, 8 * 10**9, 3_000_000, 4.8e19, 3e18,
    800.0, 50.0,
)  # fmt: skip
DEARER = Choice(
    Vocabulary("other", "replace", 32_000, 3.9, 12_000, None), 10**9, 0.1, 11 * 10**9, 5_000_000, 6.6e19,
    2e18, 1100.0, 40.0,
)  # fmt: skip


def in_flops(of: Choice) -> Choice:
    content = {name: getattr(of, name) for name in of.__dataclass_fields__}
    return Choice(**content | {"text_hours": None, "relearn_hours": None})


def test_a_cheaper_vocabulary_is_advised_with_its_reasons() -> None:
    """50 hours of learning pay where 200 of 1,000 are saved on 40 GB: from a quarter of it on."""
    advice = Advice(40e9, [KEPT, CHEAPER, DEARER])
    assert in_words(advice) == (
        "Extend to new: 8B tokens in place of 10B (-20%), and 850 device-hours in place of 1,000 (-15%) with "
        "the training of its new rows, for 40.0 GB of text."
    )
    assert [row[-2] for row in choice_rows(advice)[1]] == ["–", "10.0 GB", "never"]


def test_a_vocabulary_is_kept_if_no_other_saves_enough() -> None:
    """The same vocabulary under another name needs no reason."""
    same = Choice(**vars(KEPT) | {"vocabulary": Vocabulary("copy", "keep", 32_000, 4.0, 0, 400)})
    flops = [in_flops(one) for one in (KEPT, DEARER, same)]
    assert in_words(Advice(40e9, flops)) == (
        "Keep old: no other choice saves a twentieth of its 6e+19 FLOPs, for 40.0 GB of text."
    )
    replaced = Choice(**vars(CHEAPER) | {"vocabulary": Vocabulary("new", "replace", 9, 5.0, 1234)})
    assert in_words(Advice(40e9, [KEPT, replaced])).startswith("Replace by new: 8B tokens in place of 10B")
    taken = Choice(**vars(same) | {"text_hours": 900.0})
    assert in_words(Advice(40e9, [KEPT, taken])).startswith("Take copy: 10B tokens in place of 10B (+0%)")


def test_choices_are_tabled_in_hours_or_flops() -> None:
    """One decimal below 100 hours, three figures from a million on."""
    titles, rows = choice_rows(Advice(40e9, [KEPT, CHEAPER]))
    assert titles == (
        "", "tokenizer", "tokens", "device-hours", "new rows", "tokens for them", "device-hours for them",
        "device-hours in all", "pays from", "English tokens",
    )  # fmt: skip
    assert rows == [
        ("keep", "old", "10B", "1,000", "0", "0", "0", "1,000", "–", "+0%"),
        ("extend", "new", "8B", "800", "1,234", "3M", "50.0", "850", "10.0 GB", "+25%"),
    ]
    titles, rows = choice_rows(Advice(40e9, [in_flops(KEPT), in_flops(CHEAPER)]))
    assert titles[3] == "FLOPs" and rows[1][3:8] == ("4.8e+19", "1,234", "3M", "3e+18", "5.1e+19")
    for hours, shown in {99.94: "99.9", 100.4: "100", 999_999: "999,999", 1e6: "1e+06", 0.04: "0.0"}.items():
        costs = {"text_hours": hours, "relearn_hours": 0.0}
        ((*_, in_all, _, _),) = choice_rows(Advice(40e9, [Choice(**vars(KEPT) | costs)]))[1]
        assert in_all == shown


def test_a_choice_as_json_is_flat() -> None:
    found = choice_json(CHEAPER)
    assert (found["name"], found["kind"], found["new_rows"], found["text_hours"]) == (
        "new",
        "extend",
        1234,
        800,
    )
    assert "vocabulary" not in found


# --- What is counted with


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Tokenizers are numbers: so many tokens. Stands in for the prices, and notes what they are made of."""
    of = SimpleNamespace(recipe=None, model=None, nodes="not asked", choices=[], tokens=2 * 10**9)

    class Pricing:
        def __init__(self, *given: Any) -> None:
            of.recipe, of.model, of.nodes = given

        def choice(self, *given: Any) -> str:
            of.choices.append(given)
            return given[0].name

    verb = "kielo.cli.vocabulary_choice"
    monkeypatch.setattr(f"{verb}.Pricing", Pricing)
    monkeypatch.setattr(f"{verb}.recipe_tokens", lambda recipe: of.tokens)
    monkeypatch.setattr(f"{verb}.kind_of", lambda old, new: ["keep", "extend"][new - old > 0])
    monkeypatch.setattr(f"{verb}.embedding_share", lambda model, size: size / 1000)
    monkeypatch.setattr(f"{verb}.vocabulary_size", lambda tokenizer: tokenizer)
    row_map = SimpleNamespace(rows=[0] * 50, copied=20)
    monkeypatch.setattr(f"{verb}.make_row_map", lambda *_: row_map)
    return of


def ask(tokenizers: dict[str, int], figures: dict[str, dict], **flags: Any) -> Advice | None:
    options = {"model": "own_text", "relearn": None, "bytes": None, "cluster": None, "nodes": None} | flags
    return advise(SimpleNamespace(**options), tokenizers, figures)


def figures() -> dict[str, dict]:
    return {"old": {"bytes_per_token": 4.0, "english_tokens": 9}, "new": {"bytes_per_token": 5.0}}


BOTH = {"old": 300, "new": 350}


def test_vocabularies_are_priced_for_the_text(priced) -> None:
    """That of --bytes, else the recipe's tokens by the first vocabulary. A new row is one that is no copy."""
    of = figures()
    advice = ask(BOTH, of, bytes="40GB", relearn="3M")
    old, new = (given[0] for given in priced.choices)
    rows = priced.model.vocab_size
    assert (old.kind, old.size, old.new_rows, old.english_tokens) == ("keep", rows, 0, 9)
    assert (new.kind, new.size, new.new_rows, new.english_tokens) == ("extend", 350, 30, None)
    assert [given[1:] for given in priced.choices] == [(40e9, 3_000_000)] * 2
    assert (advice.text_bytes, advice.choices) == (40e9, ["old", "new"])
    assert of["new"]["embedding_share"] == 0.35 and of["old"]["embedding_share"] == rows / 1000
    assert ask(BOTH, figures()).text_bytes == 8e9 and priced.choices[-1][2] is None
    assert ask({"old": 300}, of, bytes="40GB") is None
    priced.tokens = None
    assert ask(BOTH, figures()) is None
    assert ask(BOTH, figures(), bytes="1g").text_bytes == 1e9


@pytest.mark.parametrize("flag", ["bytes", "relearn"])
def test_an_amount_is_a_number(flag, priced) -> None:
    assert ask(BOTH, figures(), **{"bytes": "1G", flag: "1"}) is not None
    for wrong in ("much", "0", "0GB", ""):
        with pytest.raises(KieloError, match=f"--{flag} '{wrong}' is not an amount. Fix: --{flag} 40G"):
            ask(BOTH, figures(), **{"bytes": "1G", flag: wrong})


def test_the_machine_is_asked_for_with_its_nodes(priced, tmp_path) -> None:
    """Those of --nodes, else the recipe's first; the one of a laptop; none without any."""
    with_nodes = tmp_path / "r.toml"
    with_nodes.write_text('extends = "own_text"\ncluster = "lumi_g"\nnodes = [3, 4]\n')
    for flags, nodes in (
        ({}, None), ({"cluster": "laptop"}, 1), ({"cluster": "lumi_g", "nodes": 2978}, 2978),
        ({"cluster": "lumi_g", "nodes": 1}, 1), ({"model": str(with_nodes)}, 3),
        ({"model": str(with_nodes), "nodes": 8}, 8),
    ):  # fmt: skip
        ask(BOTH, figures(), bytes="1G", **flags)
        assert priced.nodes == nodes
    assert priced.recipe.cluster == "lumi_g"
    for wrong, near in ((0, 1), (2979, 2978)):
        with pytest.raises(KieloError, match=f"--nodes {wrong}: lumi_g has 1 to 2978 nodes. Fix: {near}$"):
            ask(BOTH, figures(), bytes="1G", cluster="lumi_g", nodes=wrong)
    with pytest.raises(KieloError, match="--cluster lumi_g has 1 to 2978 nodes; how many. Fix: --nodes 16"):
        ask(BOTH, figures(), bytes="1G", cluster="lumi_g")


def test_a_folder_of_weights_is_trained_as_usual_for_its_size(priced, tmp_path: Path) -> None:
    """In sequences that its positions allow, and steps of whole ones: 13 of 300 tokens in 4,096."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "vocab_size": 300,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 300,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (str(tmp_path), f"hf:{tmp_path}"):
        ask(BOTH, figures(), model=model, bytes="1G")
        assert (priced.recipe.dataset.sequence_length, priced.recipe.train.tokens_per_step) == (300, 3900)
        assert (priced.model.hidden_size, priced.model.vocab_size) == (8, 300)
    config["max_position_embeddings"] = 4096
    (tmp_path / "config.json").write_text(json.dumps(config))
    ask(BOTH, figures(), model=str(tmp_path), bytes="1G")
    assert (priced.recipe.dataset.sequence_length, priced.recipe.train.tokens_per_step) == (512, 4096)
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'extends = "own_text"\n[model]\nweights = "hf:{tmp_path}"\ntransplant = "mean"\n')
    ask(BOTH, figures(), model=str(recipe), bytes="1G")
    assert priced.model.hidden_size == 8
    # Weights that are not here have the recipe's shape, and the first tokenizer's rows.
    ask(BOTH, figures(), model="norwegian_7b_warm", bytes="1G", nodes=16)
    assert (priced.model.hidden_size, priced.model.vocab_size) == (4096, 300)


def test_a_recipe_without_a_vocabulary_has_that_of_the_first_tokenizer(priced, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("[model]\nhidden_size = 32\nnum_attention_heads = 4\n")
    ask(BOTH, figures(), model=str(recipe), bytes="1G")
    assert priced.model.vocab_size == 300
