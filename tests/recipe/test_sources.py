"""The sources of a recipe: names that are made of places, and keys that do not go together."""

from typing import Any

import pytest
from pydantic import ValidationError

from kielo.recipe.sections import Recipe, Source
from kielo.recipe.several_languages import source_languages
from kielo.recipe.source_kinds import KINDS


def names(*sources: Any) -> list[str]:
    recipe = Recipe(name="x", language="et", corpus={"sources": list(sources)})
    return [source.name for source in recipe.corpus.sources]


def test_a_source_is_named_after_its_place() -> None:
    of_place = {
        "a/b/uudised.jsonl.zst": "uudised", "tekst.html.gz": "tekst", "a.b.txt": "a_b", "C:\\x\\y.txt": "y",
        "texts/*.txt": "texts", "texts/[ab].txt": "texts", "texts/?/": "texts", "*.txt": "text",
        "_ilus-.txt": "ilus", "õ.txt": "text", "my texts": "my_texts", "x" * 95 + ".txt": "x" * 90,
    }  # fmt: skip
    assert {place: names(place)[0] for place in of_place} == of_place
    others = [
        {"debian_package": "maint-guide"}, {"huggingface_dataset": "OWNER/uudis.v1"}, {"tokens": "a/ids.bin"},
        {"debian_package": "first", "huggingface_dataset": "second"},
    ]  # fmt: skip
    assert names(*others) == ["maint-guide", "uudis_v1", "ids", "first"]


def test_sources_of_one_name_are_numbered() -> None:
    """A name that a person gave is taken, wherever in the list it is; so is that of held-out text."""
    assert names("a/x.txt", "b/x.txt", "c/x.txt") == ["x", "x_2", "x_3"]
    assert names("x.txt", "b/x.txt", {"path": "y.txt", "name": "x_2"}) == ["x", "x_3", "x_2"]
    assert names({"path": "y.txt", "name": "x"}, "x.txt") == ["x", "x_2"]
    assert names("heldout.txt", {"path": "heldout", "name": ""}) == ["heldout_2", "heldout_3"]
    written = Recipe(name="x", language="et", corpus={"sources": " a.txt, b.txt,,"}).corpus.sources
    assert [(source.name, source.path) for source in written] == [("a", "a.txt"), ("b", "b.txt")]
    as_tuple = Recipe(name="x", language="et", corpus={"sources": ("a.txt",)}).corpus.sources
    assert as_tuple == (Source(name="a", path="a.txt"),)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"path": "a", "debian_package": "bc"}, "Fix: path, or debian_package and/or huggingface_dataset"),
    ({"path": "a", "huggingface_dataset": "o/n"}, "Fix: path, or debian_package and/or"),
    ({"path": "a", "tokens": "b"}, "Fix: either tokens or raw text"),
    ({"debian_package": "bc", "tokens": "b"}, "Fix: either tokens or raw text"),
    ({}, "no place of the text. Fix: path, debian_package, huggingface_dataset or tokens"),
    ({"tokens": "a", "max_documents": 3}, "tokens are read as they are"),
    ({"tokens": "a", "text_field": "x"}, "tokens are read as they are"),
    ({"tokens": "a", "kind": "code"}, "tokens are read as they are"),
    ({"path": "a", "tokens_dtype": "uint16"}, "tokens_dtype describes ready token files"),
    ({"path": "a", "name": "heldout"}, "heldout and heldout.… are names of the held-out text"),
    ({"path": "a", "name": "heldout.x"}, "heldout and heldout.… are names of the held-out text"),
    ({"path": "a", "kind": "code", "language": "et"}, "kind = 'code' has no language"),
    ({"path": "a", "kind": "parallel", "language": "et"}, 'kind = "parallel" has two languages'),
    ({"path": "a", "kind": "parallel"}, 'kind = "parallel" has two languages'),
    ({"path": "a", "reverse_share": 0.5}, 'reverse_share need kind = "parallel"'),
    ({"path": "a", "pair_fields": ["a", "b"]}, 'reverse_share need kind = "parallel"'),
    ({"path": "a", "loss": "all"}, 'loss needs kind = "instructions"'),
    ({"path": "a", "kind": "parallel", "language": ["et", "fi"], "pair_fields": "a"}, "names 1 fields"),
    ({"path": "a", "kind": "parallel", "language": ["et", "fi"], "templates": "{target}"},
     r"templates: '\{target\}': has no \{source\}, so a side of each pair would be lost"),
]  # fmt: skip


@pytest.mark.parametrize("given", REFUSED, ids=lambda given: " ".join(map(str, given[0].items())) or "empty")
def test_keys_that_do_not_go_together(given) -> None:
    values, reason = given
    with pytest.raises(ValidationError, match=reason):
        Source.model_validate(values)


def test_keys_that_go_together() -> None:
    both = Source(debian_package="bc", huggingface_dataset="o/n")
    assert (both.debian_package, both.huggingface_dataset) == ("bc", "o/n")
    ready = Source(tokens="a", tokens_dtype="uint32", name="heldouts")
    assert (ready.tokens, ready.tokens_dtype, ready.name) == ("a", "uint32", "heldouts")
    pair = Source(
        path="a",
        kind="parallel",
        language=["et", "fi"],
        pair_fields=["a", "b"],
        templates=["{source} {target}"],
    )
    assert pair.pair_fields == ("a", "b") and pair.language == ("et", "fi")
    assert Source(path="a", kind="instructions", loss="answers").loss == "answers"
    assert Source(path="a", language="fi").language == ("fi",)


def test_languages_of_a_source() -> None:
    """Its own, else the recipe's; code has none."""
    assert source_languages(Source(path="a"), "et") == ("et",)
    assert source_languages(Source(path="a", language=["fi", "sv"]), "et") == ("fi", "sv")
    assert source_languages(Source(path="a", kind="code"), "et") == ()
    assert [name for name, kind in KINDS.items() if kind.has_language] == ["text", "parallel", "instructions"]
