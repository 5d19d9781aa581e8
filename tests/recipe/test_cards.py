"""Cards and the schema: every shipped card is complete, and unknown names get the known ones."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from kielo.recipe import cards
from kielo.recipe.errors import KieloError
from kielo.recipe.schema import json_schema
from kielo.recipe.sections import Recipe


@pytest.mark.parametrize("code", cards.languages())
def test_a_language_card_serves_every_identifier(code):
    """Each identifier has codes and thresholds,
    and none asks for more certainty than short lines can give.
    """
    card = cards.language(code)
    identifiers = set(
        Recipe.model_fields["corpus"].annotation.model_fields["language_identifier"].annotation.__args__
    )
    assert card.code == code
    for table in (card.identifier_codes, card.line_language_threshold, card.document_language_threshold):
        assert set(table) == identifiers
    # A blanket 0.95 empties Danish and Basque (lid.176, measured).
    assert all(0 < value <= 0.8 for value in card.line_language_threshold.values())
    assert card.letters == card.letters.lower() and len(set(card.letters)) == len(card.letters)
    assert card.notes


def test_every_code_is_known_to_py3langid():
    """A code that the model does not know would empty the corpus."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    known = set(LanguageIdentifier.from_model_file(MODEL_FILE).labels)
    for code in cards.languages():
        assert set(cards.language(code).identifier_codes["py3langid"]) <= known


def test_the_languages_and_machines_to_begin_with():
    """Those that the first release promises."""
    assert {"et", "fi", "sv", "nb", "nn", "da", "is", "lv", "lt", "eu", "en", "ja"} <= set(cards.languages())
    assert {"lumi_g", "laptop"} <= set(cards.clusters())


@pytest.mark.parametrize("name", cards.accelerators())
def test_an_accelerator_card_has_a_source_and_date(name):
    """A peak without a source is no peak; the processor claims none."""
    card = cards.accelerator(name)
    assert card.name == name and card.source and card.date
    assert bool(card.peak_tflops) == (name != "cpu")


@pytest.mark.parametrize("name", cards.clusters())
def test_a_cluster_card_names_an_accelerator_card(name):
    """MFU can be told on every cluster whose accelerator has a peak."""
    assert cards.cluster(name).accelerator in cards.accelerators()


# Facts of which no public page was found, and whose card says so. None may be added; a page takes one away.
_NODE = {
    "accelerator", "cpu_cores_per_node", "devices_per_node", "internet_on_compute_nodes",
    "memory_gib_per_node", "network", "network_gbit_per_second_per_node", "nodes", "scheduler",
}  # fmt: skip
_OF_DEUCALION = _NODE | {
    "max_nodes_per_job", "max_wall_hours", "jobs.account", "jobs.container", "jobs.devices",
    "jobs.partitions", "jobs.storage", "jobs.stripe",
}  # fmt: skip
_ONLINE = "internet_on_compute_nodes"
WITHOUT_PAGE = {
    "abci3": {_ONLINE, "jobs.setup"},
    "deucalion_a100_40": _OF_DEUCALION,
    "deucalion_a100_80": _OF_DEUCALION,
    "dgx_h100": {"nodes"},
    "isambard_ai": {_ONLINE, "jobs.devices", "jobs.driver_cuda", "jobs.storage"},
    "jupiter_booster": {_ONLINE, "max_wall_hours", "jobs.account", "jobs.partitions", "jobs.storage"},
    "juwels_booster": _NODE | {"max_wall_hours", "jobs.partitions"},
    "karolina": {
        _ONLINE, "max_wall_hours", "memory_gib_per_node", "network", "network_gbit_per_second_per_node",
        "nodes", "jobs.account", "jobs.devices", "jobs.storage",
    },
    "leonardo_booster": {_ONLINE, "jobs.driver_cuda", "jobs.storage"},
    "meluxina": {_ONLINE, "max_wall_hours", "jobs.account", "jobs.devices", "jobs.partitions"},
    "perlmutter_a100_40": {_ONLINE},
    "perlmutter_a100_80": {_ONLINE},
    "roihu": {_ONLINE},
    "tsubame4": _NODE | {"jobs.container", "jobs.partitions", "jobs.setup"},
}  # fmt: skip
_NO_FACTS = {"name", "description", "source", "sources", "date", "notes", "jobs", "references"}
_PAGE_AND_DATE = re.compile(r"https?://\S+\.\S+.*\b20\d\d-\d\d\b")


def facts(card: cards.Cluster) -> dict[str, str]:
    """Each fact of a card → what the card says of its origin."""
    origins = {field: card.sources.get(field, card.source) for field in card.model_fields_set - _NO_FACTS}
    origins |= {f"references[{number}]": one.source for number, one in enumerate(card.references)}
    return origins | {
        f"jobs.{field}": origin for field, origin in (card.jobs.sources if card.jobs else {}).items()
    }


def without_page(card: cards.Cluster) -> set[str]:
    return {field for field, origin in facts(card).items() if not _PAGE_AND_DATE.search(origin)}


@pytest.mark.parametrize("name", [name for name in cards.clusters() if name != "laptop"])
def test_each_fact_of_a_cluster_states_its_public_page_and_a_date(name):
    """A fact without one says that none was found, and is on the list; nothing is from memory."""
    card = cards.cluster(name)
    assert without_page(card) == WITHOUT_PAGE.get(name, set())
    said = {facts(card)[field] for field in without_page(card)}
    assert all(origin.startswith("no public page found (2026-11)") for origin in said)
    text = (Path(cards.__file__).parents[1] / f"cards/clusters/{name}.toml").read_text()
    assert "from memory" not in text and "third-party" not in text


def test_a_fact_without_a_page_or_a_date_is_found():
    """Broken on purpose: of a card's own facts, of the table of jobs, and a page without a date."""
    text = (Path(cards.__file__).parents[1] / "cards/clusters/frontier.toml").read_text()
    setup = re.search(r'\nsetup = "https.*"', text)[0]
    for old, new, field in (
        ("[sources]", '[sources]\nnodes = "from memory, 2026-11"', "nodes"),
        ("[sources]", '[sources]\nnetwork = "https://docs.olcf.ornl.gov/"', "network"),
        (setup, '\nsetup = "notes of others (2026-11)"', "jobs.setup"),
    ):
        changed = cards.Cluster.model_validate(tomllib.loads(text.replace(old, new, 1)))
        assert without_page(changed) == {field}


@pytest.mark.parametrize("name", cards.clusters())
def test_a_timeout_of_infiniband_is_an_exponent(name):
    """NCCL takes 1 to 22 (docs.nvidia.com, NCCL user guide, NCCL_IB_TIMEOUT)."""
    jobs = cards.cluster(name).jobs
    for variables in (jobs.environment, jobs.environment_between_nodes) if jobs else ():
        assert 1 <= int(variables.get("NCCL_IB_TIMEOUT", 20)) <= 22


def test_drivers_names_find_their_card():
    """One card at most for each name that a driver gives."""
    found = {
        "NVIDIA H100 80GB HBM3": "h100_80",
        "NVIDIA H200": "h200",
        "NVIDIA GH200 120GB": "gh200_96",
        "NVIDIA A100-SXM4-40GB": "a100_40",
        "NVIDIA A100-SXM-64GB": "a100_64",
        "AMD Instinct MI250X": "mi250x_gcd",
        "NVIDIA GeForce RTX 4090": None,
    }
    for device_name, name in found.items():
        card = cards.accelerator_of_device(device_name)
        assert (card and card.name) == name


def test_unknown_names_are_answered_with_the_known_ones():
    """The message is the list."""
    with pytest.raises(KieloError, match="languages is called 'xx'; known: af, ar, az"):
        cards.language("xx")


def test_the_schema_knows_every_key():
    """An editor completes each key and refuses others; `extends` may stand for what is required, and
    `languages` for `language`."""
    schema = json_schema()
    json.dumps(schema)
    assert set(schema["properties"]) == set(Recipe.model_fields) | {"extends", "languages", "variants"}
    assert (
        schema["additionalProperties"] is False
        and "tokens_per_step" in schema["$defs"]["Train"]["properties"]
    )
    assert schema["then"]["required"] == ["name", "corpus"]
    assert schema["then"]["anyOf"] == [{"required": ["language"]}, {"required": ["languages"]}]
