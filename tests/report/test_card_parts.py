"""Parts of the model card, from recipes and scores of a few words: what is said, and what is not."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard

from kielo import __version__
from kielo.artifact.durable import is_own_text
from kielo.artifact.scores import (
    BitsPerByte,
    FluencyScores,
    MadePairScores,
    MinimalPairScores,
    PairAccuracy,
    TaskScore,
)
from kielo.models.families import complete
from kielo.recipe.sections import Model, Recipe
from kielo.report import model_card
from kielo.report.gather import gather
from kielo.report.model_card import write_model_card
from tests.report.made_page import NOTHING
from tests.report.synthetic_run import RECIPE, SOURCE_IN_WORDS, STAGES, source_folder
from tests.report.test_encoder_report import SCORES as MASKED


def recipe(sources: list[dict[str, Any]] | None = None, **train: Any) -> Recipe:
    changed = RECIPE.model_copy(update={"train": RECIPE.train.model_copy(update=train)})
    if sources is None:
        return changed
    return Recipe.model_validate(changed.model_dump() | {"corpus": {"sources": sources}})


def card(**found: Any) -> str:
    return model_card.render(replace(NOTHING, **found))


def part(title: str, text: str) -> str:
    """Returns what stands below a title, up to the next one."""
    return text.partition(f"## {title}\n\n")[2].partition("\n\n## ")[0]


def overview(model_type: str) -> SimpleNamespace:
    return SimpleNamespace(model=SimpleNamespace(model_type=model_type), rows=lambda: [("a", "b_c")])


@pytest.mark.parametrize(
    ("train", "kind", "tag"),
    [
        ({}, "causal", "text-generation"), ({"objective": "masked_tokens"}, "masked", "fill-mask"),
        ({"objective": "masked_tokens", "causal_share": 0.3}, "masked and causal", "fill-mask"),
    ],
)  # fmt: skip
def test_the_kind_of_model(train: dict[str, Any], kind: str, tag: str) -> None:
    """Only of the two uses at once the card says how its outputs are shifted."""
    text = card(recipe=recipe(**train))
    assert f"\n\nA {kind} language model for the language `no`, made with Kielo 9.8.\n\n" in text
    assert f"\npipeline_tag: {tag}\ntags:\n- kielo\n---\n\n# demo" in text
    assert ("is about the next token, as GPT-BERT's" in text) is (kind == "masked and causal")
    assert text.startswith('---\nlicense: "mpl-2.0"\nlanguage:\n- "no"\nlibrary_name: transformers\npipeline')


@pytest.mark.parametrize(
    ("share", "model_type", "words"),
    [
        (0.0, "modernbert", 'pipeline("fill-mask", model=folder)'),
        (0.3, "modernbert", "logits[0, place - 1].topk(5)"),
        (0.0, "ltg_bert", 'pipeline("fill-mask", model=folder, trust_remote_code=True)'),
        (0.3, "ltg_bert", "logits[0, place - 1].topk(5)"),
    ],
)  # fmt: skip
def test_how_an_encoder_is_loaded(share: float, model_type: str, words: str) -> None:
    """Of the two uses from the position before; with the export's own code if transformers has none."""
    text = card(recipe=recipe(objective="masked_tokens", causal_share=share), overview=overview(model_type))
    every = ('pipeline("fill-mask", model=folder', "logits[0, place - 1].topk(5)")
    assert words in text and sum(one in text for one in every) == 1
    assert ("trust_remote_code=True" in text) is (model_type == "ltg_bert")


def test_a_decoder_is_loaded_with_the_first_prompt(run_folder: Path) -> None:
    text = part("How to load it", card())
    assert 'inputs = tokenizer("…", return_tensors="pt")' in text
    scores = gather(run_folder, RECIPE, STAGES).scores
    samples = [scores.samples[0].model_copy(update={"prompt": 'õ "x"'}), *scores.samples[1:]]
    text = card(scores=scores.model_copy(update={"samples": samples}))
    assert 'inputs = tokenizer("õ \\"x\\"", return_tensors="pt")' in text


def test_scores_of_tasks_are_in_the_front_matter(run_folder: Path) -> None:
    """As the client of the Hugging Face hub reads them; without tasks there is no such part."""
    scores = gather(run_folder, RECIPE, STAGES).scores
    task = {"task": "xcopa_et", "metric": "acc,none", "value": 0.5125, "questions": 500, "shots": 3}
    text = card(scores=scores.model_copy(update={"tasks": [TaskScore(**task)]}))
    (found,) = ModelCard(text).data.eval_results
    assert (found.dataset_name, found.dataset_args) == ("xcopa_et", {"num_few_shot": 3})
    assert (found.metric_type, found.metric_name, found.metric_value) == ("acc", "acc,none", 0.5125)
    assert ModelCard(card(scores=scores)).data.eval_results is None


def test_fluency_of_a_decoder(run_folder: Path) -> None:
    """Pairs by term if the file has terms, with 1.96 standard errors; shares of the model's own text."""
    scores = gather(run_folder, RECIPE, STAGES).scores
    one = PairAccuracy(pairs=400, likelihood=0.6, standard_error=0.0245, fewer_tokens=0.533)
    pairs = MinimalPairScores(file="blimp.zip", all=one, groups={"a_1": one, "a_2": one}, terms={"a_b": one})
    made = MadePairScores(file="", all=one, groups={"word_order": one}, wanted=9, sentences=9, in_training=0)
    wrote = FluencyScores(
        texts=30, repeated=0.053, repeated_in_heldout=0.092, languages={"et": 0.99, "en": 0.01}
    )
    found = {"minimal_pairs": pairs, "made_pairs": made, "fluency": wrote}
    text = part("Fluency", card(scores=scores.model_copy(update=found)))
    of_all = "60.0 ± 4.8 % |"
    after = (
        "With 95 % intervals. Guessing is right in 50 %, and a model that only prefers fewer tokens in "
        "53.3 %."
    )
    rule = "|---|--:|--:|\n"
    assert text.split("\n\n") == [
        f"| minimal pairs of blimp.zip | pairs | good sentence likelier |\n{rule}"
        f"| a\\_b | 400 | {of_all}\n| all | 400 | {of_all}",
        after,
        f"| minimal pairs that rules made from held-out text | pairs | good sentence likelier |\n{rule}"
        f"| word\\_order | 400 | {of_all}\n| all | 400 | {of_all}",
        after,
        "Of its own continuations of 30 held-out texts, 99.0 % is in `et`, 1.0 % is in `en` by the corpus' "
        "identifier, and 5.3 % of the words are repeated (held-out text: 9.2 %).",
    ]
    assert "## Fluency" not in card(scores=scores)


def test_a_table_of_hidden_tokens() -> None:
    text = card(masked_scores=MASKED, recipe=recipe(objective="masked_tokens"))
    assert part("Hidden tokens", text).split("\n\n") == [
        "3,000 tokens of held-out text were hidden, 15 % by subword; more is better. The baselines were "
        "given the same training text.",
        "| | predicted |\n|---|--:|\n| **this model** | 41.5 % |\n| token unigram | 4.0 % |\n"
        "| token bigram | 17.1 % |\n| token bigrams of both neighbours | 42.0 % |",
        "Each token in turn hidden, the model needs 0.987 bits per byte of held-out text; with the later "
        "tokens of its word hidden too, 1.234.",
        "Of 4 minimal pairs of pairs.tsv it finds the good sentence likelier in 75.0 %, and in 50.0 % with "
        "the later tokens of a word hidden too.",
        "A linear classifier of its frozen states (layer 3) finds the part of speech of 93.1 % of 1,234 "
        "words; the most frequent tag of each word is right in 87.6 %.",
    ]
    assert part("Limits", text).startswith("The model predicts hidden tokens; it has not been taught a task,")


def test_without_results_only_what_is_known_is_said() -> None:
    """No table of bits without baselines, no parity without a certificate."""
    text = card()
    titles = [line for line in text.split("\n") if line.startswith("## ")]
    assert titles == ["## How to load it", "## Training text", "## Limits"]
    assert part("Training text", text) == (
        "- Source: Debian package libreoffice-help-et\n- Licence of the text: MPL-2.0 (LibreOffice help)"
    )
    assert part("Limits", text).startswith("The model continues text; it has not been taught to follow")
    none = dict.fromkeys(("minimal_pairs", "made_pairs", "fluency"))
    scores = SimpleNamespace(bits_per_byte=BitsPerByte(model=1.0), samples=[], tasks=[], **none)
    assert "Held-out" not in card(scores=scores)


@pytest.mark.parametrize(("passed", "said"), [(True, "Passed: this"), (False, "Not passed: this")])
def test_parity_on_the_card(run_folder: Path, passed: bool, said: str) -> None:
    found = gather(run_folder, RECIPE, STAGES).parity.model_copy(update={"passed": passed})
    assert part("Parity", card(parity=found)).startswith(said)
    on_ranks = found.model_copy(update={"layout": "pipeline 2 × tensor 2, in bf16"})
    below = f"{said.partition(':')[0]} on ranks: trained by Kielo in pipeline 2 × tensor 2, in bf16, and by "
    for given in ({}, {"parity": found}):  # of the whole run, and beside the certificate of one process
        text = card(parity_on_ranks=on_ranks, **given)
        assert part("Parity", text).split("\n\n")[-1].startswith(below) and text.count("## Parity") == 1
    found = found.model_copy(update={"source": source_folder(passed)})
    assert part("Parity", card(parity=found)).endswith(f". {SOURCE_IN_WORDS[passed]}")


def test_the_training_on_the_card() -> None:
    """The last logged step, with its tokens where they are known."""
    steps = [SimpleNamespace(step=10, tokens=1000), SimpleNamespace(step=1234, tokens=5678)]
    corpus = {"bytes_kept": 1500, "documents_kept": 1300, "bytes_in": 2_000_000, "documents_in": 4100}
    text = part("Training text", card(corpus=corpus, training=SimpleNamespace(steps=steps)))
    assert text.split("\n")[2:] == [
        "- After cleaning: 1.50 kB in 1,300 documents, of 2.00 MB in 4,100",
        "- Training: 1,234 optimiser steps, 5,678 tokens",
    ]
    steps[-1].tokens = None
    assert card(training=SimpleNamespace(steps=steps)).count("- Training: 1,234 optimiser steps\n") == 1
    assert "- Training" not in card(training=SimpleNamespace(steps=[]))


def test_sources_are_named_without_paths() -> None:
    """Each origin of a source, in the order in which they are tried; text from the hub for certain."""
    hub = {"huggingface_dataset": "o/wiki", "huggingface_subset": "et"}
    sources = [
        {"name": "a", "debian_package": "help-et", "huggingface_dataset": "o/help"},
        hub | {"name": "b"}, {"name": "c", "path": "/secret/d/e_f.txt", "licence": "CC*"},
        {"name": "g", "path": "/secret/talk.jsonl", "kind": "instructions", "loss": "answers"},
        {"name": "h", "path": "/secret/talk2.jsonl", "kind": "instructions", "loss": "all"},
        hub | {"name": "i"},
    ]  # fmt: skip
    text = card(recipe=recipe(sources))
    assert [line for line in text.split("\n") if line.startswith("- Source")] == [
        "- Source: Debian package help-et, or where that is missing Hugging Face dataset o/help",
        "- Source: Hugging Face dataset o/wiki (et)", "- Source: local text c; licence: CC\\*",
        "- Source: local text g: conversations, trained on their answers alone",
        "- Source: local text h: conversations", "- Source: Hugging Face dataset o/wiki (et)",
    ]  # fmt: skip
    assert '\ndatasets:\n- "o/wiki"\ntags:' in text and "/secret" not in text
    assert "chat template" in text and "apply_chat_template(chat, add_generation_prompt=True" in text
    assert part("Limits", text).startswith("The model has learned from conversations;")
    assert "datasets:" not in card() and "chat template" not in card()


def test_several_languages() -> None:
    sources = [
        {"name": "a", "path": "/x", "language": ["no", "fi"]},
        {"name": "b", "path": "/y", "language": "sv"},
    ]
    text = card(recipe=recipe(sources))
    assert "for the languages `no`, `fi`, `sv`, made" in text
    assert '\nlanguage:\n- "no"\n- "fi"\n- "sv"\n' in text


def test_what_begins_markup_is_escaped() -> None:
    strange = RECIPE.model_copy(update={"name": "a\\`*_[]<>|b", "description": ""})
    text = card(recipe=strange, overview=overview("llama"))
    assert "\n\n# a\\\\\\`\\*\\_\\[\\]\\<\\>\\|b\n\nA causal" in text and "| a | b\\_c |" in text


def export_card(of_recipe: Recipe | None, weights: str | None = None, **changed: Any) -> str:
    model = complete(Model(model_type="llama", vocab_size=97, weights=weights), 64)
    usual = {"model": model, "origin": "step 7", "run": "a_b", "dtype": "bf16", "is_hybrid": False}
    return model_card.render_export(of_recipe, **usual | changed)


SOURCES = [
    {"name": "a", "huggingface_dataset": "o/wiki"},
    # Text that may have come from elsewhere, and a folder of the machine.
    {"name": "b", "huggingface_dataset": "o/books", "debian_package": "books-fi", "language": "fi"},
    {"name": "c", "path": "/secret/c.txt"},
]
COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("weights", "base"),
    [
        (None, None),
        (f"hf:OWNER/NAME@{COMMIT}", "OWNER/NAME"),
        # Folders of the machine that trained, which this machine has not.
        ("hf:weights/finnish", None),
        ("hf:/secret/weights", None),
    ],
)
def test_front_matter_of_an_export_is_what_the_hub_reads(weights: str | None, base: str | None) -> None:
    """Read by the hub's own client: all that recipe and checkpoint say, and nothing that they do not say."""
    of_recipe = {"license": "mpl-2.0", "language": ["no", "fi"], "datasets": ["o/wiki"]}
    usual = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["kielo"]}
    if base:
        usual["base_model"] = base
    for found, expected in ((recipe(SOURCES), usual | of_recipe), (None, usual)):
        text = export_card(found, weights)
        assert ModelCard(text).data.to_dict() == expected and "/secret" not in text
        assert ("## First weights" in text) is (weights is not None)


def test_the_card_of_an_export() -> None:
    """What it is of; without a recipe no word of languages, text and limits; never a result."""
    text = export_card(recipe(SOURCES))
    assert "# a\\_b\n\nA small Llama" in text and "- Source: Hugging Face dataset o/wiki\n" in text
    assert (
        "A causal language model for the languages `no`, `fi` (llama, weights in bf16): step 7 of the run "
        f"a\\_b, exported by `kielo` {__version__}.\n\n## How to load it\n\n```python\n"
    ) in text
    encoder = complete(Model(model_type="ltg_bert", vocab_size=97), 64)
    bare = export_card(None, model=encoder, run=None, is_hybrid=True)
    assert "# A masked and causal language model\n\nA masked and causal language model (ltg_bert" in bare
    titles = [line for line in bare.split("\n") if line.startswith("## ")]
    assert titles == ["## How to load it"] and "is about the next token" in bare


def test_a_card_that_a_person_changed_stays(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "README.md"
    for text in (card(), card(), card(recipe=RECIPE.model_copy(update={"name": "other"}))):
        write_model_card(tmp_path, text)  # its own card is replaced
        assert is_own_text(path) and path.read_text(encoding="utf-8").startswith(text)
    path.write_text("mine", encoding="utf-8")
    write_model_card(tmp_path, card())
    assert path.read_text() == "mine"
    assert capsys.readouterr().err == f"{path} was changed by hand and is kept\n"
