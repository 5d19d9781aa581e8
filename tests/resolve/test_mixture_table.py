"""The table of a run's text, its weights and its refusals, against sums made by hand."""

import json
import math
import re
from pathlib import Path

import pytest

from kielo.artifact.manifest import write_stage
from kielo.cli.main import main
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import full_phases
from kielo.recipe.read import read_recipe
from kielo.resolve.mixture_table import effective_tokens, mixture_table
from kielo.resolve.planned_phases import plan_phases
from kielo.resolve.resolve import resolve
from kielo.resolve.rules import StepCase, Steps, complaints, repeats_of_sources
from kielo.resolve.text import Text, num_sequences, weights_by_tokens

OWN = ["corpus.sources=fi.txt,en.txt,code.txt", "train.tokens_per_step=2048", "dataset.sequence_length=256"]
TOKENS = {"fi": 80_001, "en": 20_001, "code": 5_001}

UNREAD = {"origin": "", "files": 1, "documents_in": 0, "bytes_in": 0}  # of a source of the corpus


def own_text(*sets: str):
    return read_recipe("own_text", [*OWN, *sets]).recipe


def finish_pack(run_folder: Path) -> None:
    with write_stage(run_folder / "tokens", "tokens", 1, {}, {}) as stage:
        stage.counts["sources"] = {
            name: {"tokens": n, "documents": n // 100, "bytes": 4 * n, "words": n // 2}
            for name, n in TOKENS.items()
        }
        stage.counts["heldout"] = {"tokens": 5000, "documents": 50, "bytes": 20_000}


def test_temperature_makes_shares_more_even() -> None:
    """Shares are tokens^(1/T), normalised: XLM-R's α = 0.3 by hand; and 1 is by tokens, exactly."""
    assert weights_by_tokens(TOKENS, 1) == {name: float(n) for name, n in TOKENS.items()}
    assert weights_by_tokens({"fi": 12_345_678_901}, 1) == {"fi": 12_345_678_901.0}
    assert weights_by_tokens({"fi": 90_000, "en": 2}, 2) == {"fi": 300.0, "en": 1.41421356}
    weights = weights_by_tokens(TOKENS, 1 / 0.3)
    assert weights["fi"] / weights["code"] == pytest.approx((80_001 / 5_001) ** 0.3, rel=1e-8)
    text = Text(TOKENS, 10**5, "hash", 4096, 0)
    run = resolve(own_text("dataset.temperature=3.3", "train.tokens=40960"), "", 1, "cpu", text=text)
    assert run.identity.phases[0].mixture == weights_by_tokens(TOKENS, 3.3)


def test_a_source_has_epochs_of_its_own(tmp_path: Path) -> None:
    """A source's own limit holds for it alone, in the refusal and in a budget that follows from the text; and
    the numbers that a refusal gives do work."""
    text = Text(TOKENS, 10**5, "hash", 4096, 0)
    even = ["dataset.mixture={fi=1,en=1,code=1}", "dataset.max_epochs=2"]
    short = resolve(own_text(*even), "", 1, "cpu", text=text).identity
    longer = resolve(own_text(*even, "dataset.source_max_epochs={code=4}"), "", 1, "cpu", text=text).identity
    assert longer.total_steps == pytest.approx(2 * short.total_steps, abs=1)
    finish_pack(tmp_path)
    even += ["train.tokens=81920", f"folder={tmp_path}", "dataset.source_max_epochs={en=3}"]
    (why,) = mixture_table(own_text(*even), tmp_path).complaints
    assert "source code 5.3" in why and "more than dataset.max_epochs = 2" in why
    tokens, weight = re.search(r"at most (\d+), .* mixture.code of at most ([\d.]+),", why).groups()
    for way in (f"train.tokens={tokens}", "dataset.mixture.code=" + weight, "dataset.max_epochs=6"):
        assert not mixture_table(own_text(*even, way), tmp_path).complaints


def test_the_table_adds_up(tmp_path: Path) -> None:
    """Shares of each phase make one, a source's tokens are epochs of it, and the phases' rows its row."""
    finish_pack(tmp_path)
    phases = "phases=[{tokens=20480}, {tokens=40960, mixture={fi=3,en=1}, learning_rate=1e-3}]"
    table = mixture_table(own_text(phases, f"folder={tmp_path}"), tmp_path)
    assert not table.is_estimate and not table.complaints and table.tokens == pytest.approx(61_440, abs=3)
    for number in (1, 2):
        assert sum(row.share for row in table.phases if row.phase == number) == pytest.approx(1)
    fi = next(row for row in table.sources if row.source == "fi")
    assert fi.read_tokens == pytest.approx(20_480 * 80_001 / 105_003 + 40_960 * 3 / 4, abs=2)
    assert fi.epochs == pytest.approx(fi.read_tokens / 80_000, rel=5e-3)  # the last sequence is padded
    assert fi.amount.tokens_per_word == pytest.approx(2, abs=1e-3)


def test_what_repeats_are_worth() -> None:
    """Once is worth itself; four times nearly four; for ever no more than 1 + 15.39 times (equation 5)."""
    assert effective_tokens(1000, 0.5) == 500 and effective_tokens(1000, 1) == 1000
    assert effective_tokens(1000, 4) == pytest.approx(1000 + 15387.756 * (1 - math.exp(-3 / 15.387756)))
    assert 3600 < effective_tokens(1000, 4) < 4000
    assert effective_tokens(1000, 1e6) == pytest.approx(16_387.756)


def test_before_packing_it_estimates_or_names_what_is_missing(tmp_path: Path) -> None:
    """Raw files give an estimate, clean text a better one; a source that was never fetched is named."""
    for name, number in (("fi", 4_000_000), ("en", 800_000)):
        (tmp_path / f"{name}.txt").write_text("x" * number)
    places = f"corpus.sources={tmp_path}/fi.txt,{tmp_path}/en.txt"
    recipe = read_recipe("own_text", [places, "train.tokens_per_step=2048"]).recipe
    table = mixture_table(recipe, tmp_path / "run")
    share = 1 - recipe.dataset.heldout_share
    assert table.is_estimate and [row.amount.tokens for row in table.sources] == [
        1_000_000 * share, 200_000 * share
    ]  # fmt: skip
    with write_stage(tmp_path / "run" / "corpus", "corpus", 1, {}, {}) as stage:
        stage.counts["sources"] = [
            {"name": name, "bytes_kept": 400_000, "documents_kept": 100} | UNREAD for name in ("fi", "en")
        ]
    assert mixture_table(recipe, tmp_path / "run").sources[0].amount.tokens == 100_000 * share
    demo = read_recipe("demo_estonian").recipe
    with pytest.raises(KieloError, match="is not on this machine yet.* Fix: `kielo run"):
        mixture_table(demo, tmp_path / "nothing")


def test_raw_files_are_sized_by_hand(tmp_path: Path) -> None:
    """Compressed ones hold three times as much; of a folder all files count, at any depth; of a pattern its
    files; and a fetched source's folder. A path without a file is named.
    """
    sizes = {"a.txt": 4000, "b/c.jsonl": 1000, "b/d/e.txt.gz": 100, "b/d/f.zst": 10, "b/g.parquet": 1}
    for name, size in sizes.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)

    def tokens(path: str) -> int:
        recipe = read_recipe("own_text", [f"corpus.sources={path}", "train.tokens_per_step=256"]).recipe
        recipe = recipe.model_copy(
            update={"dataset": recipe.dataset.model_copy(update={"heldout_share": 0.5, "max_epochs": 1000})}
        )
        table = mixture_table(recipe, tmp_path / "run")
        assert table.is_estimate and table.origin == "raw files, nothing cleaned, at 4 bytes a token"
        (row,) = table.sources
        assert row.amount.documents is None and row.amount.tokens_per_word is None
        assert row.amount.bytes == pytest.approx(4 * row.amount.tokens, abs=2)
        return row.amount.tokens

    assert tokens(f"{tmp_path}/a.txt") == 4000 / 2 / 4
    assert tokens(f"{tmp_path}/b") == round((1000 + 3 * 100 + 3 * 10 + 3 * 1) / 2 / 4)
    assert tokens(f"{tmp_path}/b/**/*.gz") == round(300 / 2 / 4)
    with pytest.raises(KieloError, match="nothing.txt: no such file or folder to"):
        tokens(f"{tmp_path}/nothing.txt")
    demo = read_recipe("demo_estonian", ["train.tokens=1000000"]).recipe
    fetched = tmp_path / "run" / "raw" / demo.corpus.sources[0].name / "deep"
    fetched.mkdir(parents=True)
    (fetched / "page.txt").write_bytes(b"x" * 4_000_000)
    share = 1 - demo.dataset.heldout_share
    assert mixture_table(demo, tmp_path / "run").sources[0].amount.tokens == round(10**6 * share)


def test_clean_text_is_estimated_as_its_tokenizer_was_measured(tmp_path: Path) -> None:
    """Four bytes a token before there is one, and its own number after; documents less those held out."""
    recipe = own_text("dataset.heldout_share=0.25", "train.tokens=20480", "dataset.max_epochs=99")
    with write_stage(tmp_path / "corpus", "corpus", 1, {}, {}) as stage:
        stage.counts["sources"] = [
            {"name": name, "bytes_kept": 40_000, "documents_kept": 100} | UNREAD
            for name in ("fi", "en", "code")
        ]
    table = mixture_table(recipe, tmp_path)
    assert table.origin.endswith("at 4 bytes a token") and table.is_estimate
    amounts = [row.amount for row in table.sources]
    assert [(one.tokens, one.bytes, one.documents) for one in amounts] == 3 * [(7500, 30_000, 75)]
    with write_stage(tmp_path / "tokenizer", "tokenizer", 1, {}, {}) as stage:
        stage.counts["bytes_per_token"] = 3.0
    table = mixture_table(recipe, tmp_path)
    assert "at the 3.00 bytes a token that" in table.origin and table.sources[0].amount.tokens == 10_000


def test_a_worked_example_of_the_whole_table(tmp_path: Path) -> None:
    """Two phases of weights that are given: every row, its share, tokens and epochs, and what it is worth."""
    finish_pack(tmp_path)
    mixture = "mixture={fi=3,en=1,code=0.25}"
    phases = f"phases=[{{tokens=20480, {mixture}}}, {{tokens=40960, mixture={{fi=1,en=4}}}}]"
    table = mixture_table(own_text(phases, f"folder={tmp_path}", "dataset.max_epochs=4"), tmp_path)
    assert table.origin == f"packed tokens of {tmp_path / 'tokens'}" and not table.packing
    rows = {(row.phase, row.source): row for row in table.phases}
    # (share, sequences of the 8 a step, tokens, sequences drawn of those that a source has)
    expected = {
        (1, "fi"): (3 / 4.25, 14_456, 80 * 3 / 4.25 / 313), (1, "en"): (1 / 4.25, 4819, 80 / 4.25 / 79),
        (1, "code"): (0.25 / 4.25, 1205, 80 * 0.25 / 4.25 / 20),
        (2, "fi"): (0.2, 8192, 32 / 313), (2, "en"): (0.8, 32_768, 128 / 79),
    }  # fmt: skip
    assert list(rows) == list(expected)
    for place, (share, tokens, epochs) in expected.items():
        row = rows[place]
        assert (row.share, row.sequences_per_step) == pytest.approx((share, 8 * share))
        assert row.tokens == tokens and row.epochs == pytest.approx(epochs)
    fi, en, code = table.sources
    assert (fi.source, fi.read_tokens, fi.allowed_epochs) == ("fi", 14_456 + 8192, 4)
    assert en.epochs == pytest.approx(80 / 4.25 / 79 + 128 / 79)
    worth = 1 + 15.387756 * (1 - math.exp(-(en.epochs - 1) / 15.387756))
    assert en.effective_tokens == round(20_001 * worth)
    assert (
        code.effective_tokens == round(5001 * code.epochs) and table.tokens == 14_456 + 4819 + 1205 + 40_960
    )
    assert (en.amount.bytes, en.amount.documents, en.amount.words) == (80_004, 200, 10_000)


def test_the_verb_prints_80_columns_and_exits_1_on_refusals(tmp_path: Path, capsys, monkeypatch) -> None:
    """The table fits, JSON has the same figures, and what training would refuse is the exit code."""
    monkeypatch.chdir(tmp_path)
    finish_pack(Path("run"))
    words = ["plan", "data", "own_text", "--set", "folder=run"]
    for one in OWN:
        words += ["--set", one]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(words) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert any("tok/word" in line for line in lines) and not [line for line in lines if len(line) > 80]
    assert main([*words, "--json"]) == 0
    assert [row["source"] for row in json.loads(capsys.readouterr().out)["sources"]] == list(TOKENS)
    assert main([*words, "--set", "train.tokens=2000000"]) == 1
    assert "training would refuse" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "sequences"), [(0, 0), (1, 0), (2, 1), (257, 1), (258, 2), (513, 2), (514, 3)]
)
def test_a_stream_has_a_sequence_for_each_length_of_targets(tokens: int, sequences: int) -> None:
    """The first token is no target, and the last sequence may be padded."""
    assert num_sequences(tokens, 256) == sequences


def test_a_source_may_be_read_as_often_as_is_allowed_and_a_quota_more() -> None:
    """At the border; and the refusal has numbers that work: tokens, epochs and weight."""
    recipe = own_text("dataset.mixture={fi=3,en=1}", "train.tokens=20480", "dataset.max_epochs=2")
    asked = full_phases(recipe)

    def told(fi_sequences: int, *sets: str, of_80: float = 60) -> list[str]:
        changed = own_text("dataset.mixture={fi=3,en=1}", "train.tokens=20480", "dataset.max_epochs=2", *sets)
        tokens = {"fi": 256 * fi_sequences, "en": 256 * 100}
        phases = plan_phases(
            asked, [{"fi": of_80, "en": 80 - of_80}], None, 1, lambda name, length: tokens[name]
        )
        text = Text(tokens, 0, "hash", 0, 0, packed_sequences={256: {"fi": fi_sequences, "en": 100}})
        case = StepCase(changed, asked, text, Path("tokens"), Steps(phases))
        return complaints(case, [repeats_of_sources])

    # 60 of 80 sequences are fi's; of a source of n sequences it may read 2 n + 1
    assert told(30) == [] and told(30, of_80=61) == [] and len(told(30, of_80=61.5)) == 1
    assert told(29) == [
        "train.tokens = 20480 would read the source fi 2.07 times, more than dataset.max_epochs = 2. "
        "Fix: train.tokens of at most 18432, max_epochs of 3, mixture.fi of at most 52.72, or more text"
    ]
    own = told(29, "dataset.max_epochs=9", "dataset.source_max_epochs={fi=1.5}")
    assert own[0].startswith(
        "train.tokens = 20480 would read the source fi 2.07 times, more than dataset.source"
    )
    assert "source_max_epochs.fi of 3, mixture.fi of at most 23.83, or" in own[0]
