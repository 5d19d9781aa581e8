"""Borders of the numbers on cards, schedules of the learning rate, and phases that are completed, by hand."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kielo.recipe import cards
from kielo.recipe import check as checks
from kielo.recipe.cards import Accelerator, Cluster, Partition, Reference
from kielo.recipe.learning_rate_schedules import LEARNING_RATE_SCHEDULES
from kielo.recipe.phases import LearningRate, full_phases, longest_sequence_length
from kielo.recipe.read import NOT_GIVEN, read_recipe
from kielo.recipe.sections import Recipe

CLUSTER = {
    "name": "x", "description": "x", "accelerator": "cpu", "devices_per_node": 1, "nodes": 1,
    "memory_gib_per_node": 1, "cpu_cores_per_node": 1, "network": "x", "network_gbit_per_second_per_node": 1,
    "scheduler": "none", "internet_on_compute_nodes": True, "source": "x", "date": "x",
}  # fmt: skip
REFERENCE = {
    "parameters": 1, "nodes": 1, "tflops_per_device": 1, "tolerance": 1, "software": "x", "source": "x",
}  # fmt: skip
ACCELERATOR = {"name": "x", "device": "cuda", "peak_tflops": {}, "source": "x", "date": "x"}
# The card, its values, and of a field the largest value that is too small and the smallest that is enough.
ABOVE: list[tuple[type, dict[str, Any], dict[str, tuple[float, float]]]] = [
    (Cluster, CLUSTER, {
        "devices_per_node": (0, 1), "nodes": (0, 1), "memory_gib_per_node": (0, 0.001),
        "cpu_cores_per_node": (0, 1), "network_gbit_per_second_per_node": (-0.001, 0),
        "ring_share": (0, 0.001), "max_nodes_per_job": (0, 1), "file_system_gb_per_second": (0, 0.001),
        "failures_per_1000_device_days": (0, 0.001), "billed_per_node_hour": (0, 0.001),
        "start_timeout_seconds": (0.999, 1), "file_stall_seconds": (0.999, 1),
    }),
    (Partition, {"name": "x"}, {"max_hours": (0, 0.001), "max_nodes": (0, 1)}),
    (Reference, REFERENCE, {
        "parameters": (0, 0.001), "nodes": (0, 1), "tflops_per_device": (0, 0.001), "tolerance": (0, 0.001),
    }),
    (Accelerator, ACCELERATOR, {"memory_bytes": (0, 1), "given_bytes": (0, 1), "context_bytes": (-1, 0)}),
]  # fmt: skip


def test_numbers_of_cards_have_borders() -> None:
    for card, values, borders in ABOVE:
        for field, (below, least) in borders.items():
            assert getattr(card.model_validate(values | {field: least}), field) == least
            with pytest.raises(ValidationError, match=field):
                card.model_validate(values | {field: below})
    assert Cluster.model_validate(CLUSTER | {"ring_share": 1}).ring_share == 1
    with pytest.raises(ValidationError, match="ring_share\n  Input should be less than or equal to 1 "):
        Cluster.model_validate(CLUSTER | {"ring_share": 1.001})


def test_texts_of_cards_are_not_empty() -> None:
    for field in ("description", "network", "source", "date"):
        with pytest.raises(ValidationError, match=field):
            Cluster.model_validate(CLUSTER | {field: ""})
    with pytest.raises(ValidationError, match="it has no name. Fix: name, qos or constraint"):
        Partition(name="")
    with pytest.raises(ValidationError, match="min_nodes 3 is more than max_nodes 2"):
        Partition(name="a", min_nodes=3, max_nodes=2)
    with pytest.raises(ValidationError, match="partitions\n  Tuple should have at least 1 item"):
        cards.Jobs(partitions=[], sources={"partitions": "x"})
    with pytest.raises(ValidationError, match="jobs.sources is empty for: partitions"):
        cards.Jobs(partitions=[{"name": "a"}], sources={"partitions": " "})


def test_what_does_not_go_together_in_a_card_is_refused() -> None:
    """A timeout of no adapter, two constraints, Slurm's words for another scheduler, unknown sources."""
    sources = {"partitions": "x", "options": "x", "environment": "x"}
    jobs = {"partitions": [{"qos": "regular", "constraint": "gpu"}], "sources": {"partitions": "x"}}
    assert Cluster.model_validate(CLUSTER | {"scheduler": "slurm", "jobs": jobs}).jobs.partitions[0].label
    for value in ("120", "0", "23", "-1", "ten", "1.5", ""):
        with pytest.raises(ValidationError, match=f"NCCL_IB_TIMEOUT = {value} is an exponent"):
            cards.Jobs(
                partitions=[{"name": "a"}], environment={"NCCL_IB_TIMEOUT": value},
                sources={"partitions": "x", "environment": "x"},
            )  # fmt: skip
    for value in ("1", "22"):
        variables = {"NCCL_IB_TIMEOUT": value}
        more = {"environment_between_nodes": "x"}
        between = cards.Jobs(
            partitions=[{"name": "a"}], environment_between_nodes=variables,
            sources={"partitions": "x"} | more,
        )  # fmt: skip
        assert between.environment_between_nodes == variables
    for option in ("--constraint=fast", "-C fast"):
        with pytest.raises(ValidationError, match="in options replaces the constraint"):
            cards.Jobs(
                partitions=jobs["partitions"], options=[option],
                sources={one: sources[one] for one in ("partitions", "options")},
            )  # fmt: skip
    for scheduler in ("pbs", "grid_engine"):
        for queue in ({"qos": "regular"}, {"name": "a", "qos": "b"}, {"name": "a", "constraint": "b"}):
            of_other = {"scheduler": scheduler, "jobs": jobs | {"partitions": [queue]}}
            with pytest.raises(ValidationError, match=f"only Slurm has. Fix: a name alone, for {scheduler}"):
                Cluster.model_validate(CLUSTER | of_other)
    with pytest.raises(ValidationError, match="no field of the card is called node"):
        Cluster.model_validate(CLUSTER | {"sources": {"node": "x"}})
    with pytest.raises(ValidationError, match="it is empty for: nodes"):
        Cluster.model_validate(CLUSTER | {"sources": {"nodes": " "}})


def test_an_own_card_is_read_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And from another folder; a name that is no card's gets a card's name to make."""
    texts = {}
    for folder, nodes in (("a", 3), ("b", 4)):
        (tmp_path / folder).mkdir()
        texts[folder] = "".join(
            f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}\n"
            for key, value in (CLUSTER | {"nodes": nodes}).items()
        )
        (tmp_path / folder / "my.toml").write_text(texts[folder])
        monkeypatch.chdir(tmp_path / folder)
        assert cards.cluster("my.toml").nodes == nodes
    path = tmp_path / "b" / "my.toml"
    path.write_text(texts["a"])
    path.touch()
    os.utime(path, (1, 1))
    assert cards.cluster("my.toml").nodes == 3
    told = {"my site": "my_site", "..": "NAME", "a.b-c": "a.b-c", "õ_": "NAME"}
    assert {name: cards.a_new_card(name).split()[3] for name in told} == told


def test_heights_of_schedules() -> None:
    """100 tokens after the warm-up, 40 of them of the decay, at their borders and between."""
    cosine, linear, wsd = (LEARNING_RATE_SCHEDULES[name].height for name in ("cosine", "linear", "wsd"))
    assert [cosine(at, 100, 100) for at in (0, 50, 100)] == [1.0, pytest.approx(0.5), 0.0]
    assert cosine(25, 100, 100) == pytest.approx(0.5 + 0.25 * math.sqrt(2))
    assert [linear(at, 100, 100) for at in (0, 25, 100)] == [1.0, 0.75, 0.0]
    assert [wsd(at, 100, 40) for at in (0, 60, 61, 80, 100)] == [1, 1, pytest.approx(39 / 40), 0.5, 0]
    assert wsd(99, 100, 0) == 1.0 and wsd(25, 50, 80) == 0.5


def test_tokens_of_a_decay() -> None:
    """Whole steps, and never more than the warm-up leaves; a schedule without a share decays all along."""
    wsd, linear = LEARNING_RATE_SCHEDULES["wsd"], LEARNING_RATE_SCHEDULES["linear"]
    assert wsd.decay_tokens(0.25, 1090, 100, 10) == 270  # of 109 steps 27.25
    assert wsd.decay_tokens(0.9, 1000, 200, 10) == 800 and wsd.decay_tokens(0.0, 1000, 200, 10) == 0
    assert linear.decay_tokens(0.25, 1000, 200, 10) == 800


def recipe(**more: Any) -> Recipe:
    train = {
        "tokens": None, "tokens_per_step": 2048, "micro_batch_sequences": 3, "learning_rate": 0.5,
        "final_learning_rate_ratio": 0.25, "schedule": "wsd", "warmup_share": 0.125, "decay_share": 0.375,
        "trainable": ["embed"],
    }  # fmt: skip
    corpus = {"sources": [{"name": "a", "path": "a.txt"}, {"name": "b", "path": "b.txt"}]}
    dataset = {"sequence_length": 512, "mixture": {"a": 1.0}}
    data = {"name": "x", "language": "et", "corpus": corpus, "dataset": dataset, "train": train}
    return Recipe.model_validate(data | more)


OWN = {
    "tokens": 4096, "tokens_per_step": 1024, "sequence_length": 256, "mixture": {"b": 2.0},
    "micro_batch_sequences": 1, "learning_rate": 0.75, "final_learning_rate_ratio": 0.0625,
    "schedule": "cosine", "warmup_share": 0.25, "decay_share": 0.5, "trainable": ["head"],
    "max_gradient_norm": 0.25,
}  # fmt: skip


def test_phases_are_completed() -> None:
    """What a phase leaves out is that of [train] and [dataset]; a rate that it does not begin goes on."""
    first, second, third = full_phases(recipe(phases=[{"tokens": 2048}, OWN, {"tokens": 6144}]))
    usual = LearningRate(0.5, 0.25, "wsd", 0.125, 0.375)
    for phase, number, tokens, rate in ((first, 1, 2048, usual), (third, 3, 6144, None)):
        assert (phase.number, phase.tokens, phase.tokens_per_step) == (number, tokens, 2048)
        assert (phase.sequence_length, phase.mixture, phase.learning_rate) == (512, {"a": 1.0}, rate)
        assert (phase.micro_batch_sequences, phase.trainable, phase.given) == (3, ("embed",), {"tokens"})
    assert (second.number, second.tokens, second.tokens_per_step) == (2, 4096, 1024)
    assert (second.sequence_length, dict(second.mixture)) == (256, {"b": 2.0})
    assert (second.micro_batch_sequences, second.trainable) == (1, ("head",))
    assert (first.max_gradient_norm, second.max_gradient_norm) == (None, 0.25)
    assert second.learning_rate == LearningRate(0.75, 0.0625, "cosine", 0.25, 0.5)
    keys = [phase.key(name) for phase in (first, second) for name in ("sequence_length", "schedule")]
    assert keys == [
        "dataset.sequence_length", "train.schedule", "phases.2.sequence_length", "phases.2.schedule",
    ]  # fmt: skip
    assert longest_sequence_length(recipe(phases=[OWN, OWN | {"sequence_length": 128}])) == 256
    (alone,) = full_phases(recipe())
    assert (alone.number, alone.tokens, alone.learning_rate, alone.given) == (1, 2048, usual, frozenset())
    assert alone.key("mixture") == "dataset.mixture" and alone.key("tokens") == "train.tokens"


def test_languages_of_sources_are_checked_where_their_text_is_cleaned(monkeypatch) -> None:
    """An identifier must know them, or the text is clean already; code has none."""

    def told(**source: Any) -> list[str]:
        corpus = {"sources": [{"name": "a", "path": "a.txt"} | source], "language_identifier": "lid176"}
        found = checks.check(recipe(corpus=corpus, dataset={"sequence_length": 512}), lambda key: "file")
        return [one.message for one in found]

    real = checks.language
    for code, identifier_codes, works in (
        ("fi", {"py3langid": ("fi",), "lid176": ()}, "py3langid"),
        ("sv", {"lid176": ()}, "an identifier of your own (kielo languages sv --learn), or clean = false"),
    ):
        card = cards.language(code).model_copy(update={"identifier_codes": identifier_codes})
        with monkeypatch.context() as patch:
            patch.setattr(
                checks, "language", lambda asked, card=card: card if asked == card.code else real(asked)
            )
            assert told(language=["et", code], clean=False) == []
            assert told(language=["et", code]) == [
                "file: corpus.sources, a: corpus.language_identifier = 'lid176' does not know language "
                f"{code!r}. Fix: {works}"
            ]
    (message,) = told(language="xx")
    assert message.startswith("file: corpus.sources, a: language = 'xx' has no card;")


def test_values_that_stand_in_are_only_for_keys_that_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('language = "et"\nname = "x"\n')
    stand_ins = {"name": "other", "corpus": {"sources": ["a.txt"]}}
    found = read_recipe(path, stand_ins=stand_ins)
    assert found.recipe.name == "x" and found.recipe.corpus.sources[0].path == "a.txt"
    assert found.origins["corpus.sources"] == NOT_GIVEN and found.origins["name"] == str(path)
