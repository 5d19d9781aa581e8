"""Cards and the schema: every shipped card is complete, and unknown names get the known ones."""

import json

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
    """A peak without a source is no peak; the custom A100 and the processor claim none."""
    card = cards.accelerator(name)
    assert card.name == name and card.source and card.date
    assert bool(card.peak_tflops) == (name not in ("a100_64", "cpu"))


@pytest.mark.parametrize("name", cards.clusters())
def test_a_cluster_card_names_an_accelerator_card(name):
    """MFU can be told on every cluster whose accelerator has a peak."""
    assert cards.cluster(name).accelerator in cards.accelerators()


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
    assert set(schema["properties"]) == set(Recipe.model_fields) | {"extends", "languages"}
    assert (
        schema["additionalProperties"] is False
        and "tokens_per_step" in schema["$defs"]["Train"]["properties"]
    )
    assert schema["then"]["required"] == ["name", "corpus"]
    assert schema["then"]["anyOf"] == [{"required": ["language"]}, {"required": ["languages"]}]
