"""Masked tokens: the same for any number of ranks, in the shares asked for, never a control token."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from kielo.artifact.manifest import read_manifest, write_stage
from kielo.artifact.token_shards import TokenShard, TokenShardWriter
from kielo.dataset.batches import NOT_COUNTED, Batch, Batches
from kielo.dataset.heldout_sets import heldout_sets
from kielo.dataset.masking import Masking, MaskingVocabulary, masking_rate, masking_vocabulary, span_lengths
from kielo.dataset.pack import pack
from kielo.dataset.pack_sequences import pack_sequences
from kielo.dataset.provenance import check_recipe
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import decode, load_tokenizer, role_id
from kielo.tokenizer.train import train_tokenizer
from tests.dataset.test_batches import LENGTH, make_documents, phase, recipe, write_corpus
from tests.dataset.test_order import plain_key, plain_scramble
from tests.tokenizer.test_by_hand import by_hand

VOCABULARY = 290
SEED, KINDS = 5, ("subword", "whole_word", "span")
MASKED = {"objective": "masked_tokens"}


def masked_recipe(**train):
    """With a vocabulary so small that most words are of several tokens."""
    plain = recipe()
    return plain.model_copy(
        update={
            "train": plain.train.model_copy(update=MASKED | train),
            "tokenizer": plain.tokenizer.model_copy(update={"vocab_size": VOCABULARY}),
        }
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("an encoder's run")
    write_corpus(folder / "corpus", make_documents(150))
    train_tokenizer(masked_recipe(), folder / "corpus", folder / "tokenizer")
    pack(masked_recipe(), folder / "corpus", folder / "tokenizer", folder / "tokens")
    return folder


def of_step(run: Path, step: int, rank: int = 0, ranks: int = 1) -> Batch:
    return Batches(run / "tokens", SEED, phase(), LENGTH, 3, True).step(step, rank, ranks)


def wide_batch(vocabulary: MaskingVocabulary, length: int = 400) -> Batch:
    """300 sequences of ordinary tokens, all of which count."""
    tokens = np.random.default_rng(2).choice(vocabulary.ordinary_ids, (300, length))
    return Batch(tokens, tokens, None, np.arange(300))


def test_the_tokenizer_has_the_tokens_of_encoders_by_role(run: Path) -> None:
    """Ids 0 to 4; documents begin with [CLS] and end with [SEP], in training and held-out text."""
    tokenizer = load_tokenizer(run / "tokenizer")
    roles = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    assert [role_id(tokenizer, role) for role in roles] == [0, 1, 2, 3, 4]
    assert tokenizer.whole.encode("lumi").ids[0] == 2 and tokenizer.whole.encode("lumi").ids[-1] == 3
    for name in ("a", "b", "heldout"):
        shard = TokenShard(run / "tokens" / name)
        stream, ends = shard.read(0, shard.num_tokens), shard.document_offsets
        assert (stream[ends[:-1]] == 2).all() and (stream[ends[1:] - 1] == 3).all()
        assert (stream == 2).sum() == len(ends) - 1


def test_tokens_of_a_decoder_are_refused_and_made_again(run: Path) -> None:
    """The recipe of another objective is no recipe of these tokens."""
    with pytest.raises(KieloError, match=r"train\.objective"):
        check_recipe(recipe(), run)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_the_same_for_any_number_of_ranks(run: Path, kind: str) -> None:
    """Bit by bit by sample's number, and those of another seed are others."""
    vocabulary = masking_vocabulary(run / "tokenizer", kind)
    masking = Masking(SEED, kind, vocabulary)
    whole = masking.hide(of_step(run, 7), 0.3)
    for ranks in (2, 3, 8):
        for rank in range(ranks):
            part = masking.hide(of_step(run, 7, rank, ranks), 0.3)
            assert np.array_equal(part.inputs, whole.inputs[rank::ranks])
            assert np.array_equal(part.labels, whole.labels[rank::ranks])
    other = Masking(SEED + 1, kind, vocabulary).hide(of_step(run, 7), 0.3)
    assert (other.labels != whole.labels).any(axis=1).mean() > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_hidden_is_a_label_and_nothing_else_changes(run: Path, kind: str) -> None:
    """Control tokens and tokens whose loss does not count stay; documents and samples are the batch's."""
    vocabulary = masking_vocabulary(run / "tokenizer", kind)
    batch = of_step(run, 3)
    batch.labels[:, 4:6] = NOT_COUNTED  # of the tokens 5 and 6
    hidden = Masking(SEED, kind, vocabulary).hide(batch, 0.999)
    is_hidden = hidden.labels != NOT_COUNTED
    assert np.array_equal(hidden.labels[is_hidden], batch.inputs[is_hidden])
    assert np.array_equal(hidden.inputs[~is_hidden], batch.inputs[~is_hidden])
    assert not is_hidden[batch.inputs < 5].any() and not is_hidden[:, 5:7].any()
    ordinary = batch.inputs >= 5
    ordinary[:, 5:7] = False
    assert is_hidden[ordinary].mean() > 0.98
    assert hidden.documents is batch.documents and hidden.samples is batch.samples
    assert (hidden.inputs == vocabulary.mask_id).sum() > 100


@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_those_asked_for(run: Path, kind: str) -> None:
    """Of 120,000 tokens: the rate, and of what is hidden 80, 10 and 10 %, within four deviations where the
    longest span counts as one draw; a lower rate hides a part of the same tokens.
    """
    vocabulary = masking_vocabulary(run / "tokenizer", kind)
    batch, masking = wide_batch(vocabulary), Masking(SEED, kind, vocabulary)
    low, high = (masking.hide(batch, rate).labels != NOT_COUNTED for rate in (0.15, 0.3))
    draws = batch.inputs.size / 10
    for is_hidden, rate in ((low, 0.15), (high, 0.3)):
        assert is_hidden.mean() == pytest.approx(rate, abs=4 * (rate * (1 - rate) / draws) ** 0.5)
    assert not (low & ~high).any()
    hidden = masking.hide(batch, 0.3)
    of_hidden, before = hidden.inputs[high], batch.inputs[high]
    shares = (of_hidden == vocabulary.mask_id).mean(), (of_hidden == before).mean()
    for share, expected in zip(shares, (0.8, 0.1 + 0.1 / len(vocabulary.ordinary_ids))):
        assert share == pytest.approx(expected, abs=4 * (expected * (1 - expected) / (0.3 * draws)) ** 0.5)
    assert set(np.unique(of_hidden)) <= {vocabulary.mask_id, *vocabulary.ordinary_ids.tolist()}


def test_a_word_is_hidden_as_a_whole(run: Path) -> None:
    """Of two tokens of one word by the decoded text, both are hidden or none."""
    tokenizer = load_tokenizer(run / "tokenizer")
    batch = of_step(run, 2)
    hidden = Masking(SEED, "whole_word", masking_vocabulary(run / "tokenizer", "whole_word")).hide(batch, 0.5)
    texts = np.array(decode(tokenizer, [[number] for number in range(VOCABULARY)]))
    pairs = hidden_pairs = 0
    for row in range(len(batch.inputs)):
        for column in range(1, LENGTH):
            left, right = batch.inputs[row, column - 1 : column + 1]
            if left < 5 or right < 5 or not (texts[left][-1:].isalpha() and texts[right][:1].isalpha()):
                continue
            pair = hidden.labels[row, column - 1 : column + 1] != NOT_COUNTED
            assert pair[0] == pair[1], (row, column)
            pairs, hidden_pairs = pairs + 1, hidden_pairs + pair[0]
    assert pairs > 50 and 0.3 < hidden_pairs / pairs < 0.7


def test_spans_have_the_published_lengths() -> None:
    """Shares of the lengths 1 to 10 are those of geometric numbers modulo 11, within four deviations."""
    draws = 200_000
    simulated = np.clip(np.random.default_rng(1).geometric(0.2, draws) % 11, 1, 10)
    lengths = span_lengths((np.arange(draws) + 0.5) / draws)
    expected = np.bincount(simulated, minlength=11) / draws
    found = np.bincount(lengths, minlength=11) / draws
    assert found[0] == 0 and (np.abs(found - expected) < 4 * np.sqrt(expected / draws) + 1e-9).all()


def test_a_sequence_always_has_a_label(run: Path) -> None:
    """At a rate near 0 one span a sequence is hidden; a sequence of control tokens alone has none."""
    vocabulary = masking_vocabulary(run / "tokenizer", "span")
    hidden = Masking(SEED, "subword", vocabulary).hide(wide_batch(vocabulary, 50), 1e-12)
    assert ((hidden.labels != NOT_COUNTED).sum(axis=1) == 1).all()
    filling = np.full((2, 8), 3)
    empty = Masking(SEED, "span", vocabulary).hide(Batch(filling, filling, None, np.arange(2)), 0.5)
    assert (empty.labels == NOT_COUNTED).all() and np.array_equal(empty.inputs, filling)


def test_the_rate_goes_from_the_first_to_the_last_step() -> None:
    assert [masking_rate(0.3, 0.15, step, 101) for step in (1, 51, 101)] == pytest.approx([0.3, 0.225, 0.15])
    assert masking_rate(0.3, 0.15, 1, 1) == 0.3
    assert [masking_rate(0.3, 0.15, step, 2) for step in (1, 2)] == pytest.approx([0.3, 0.15])


def test_ids_of_control_tokens_and_ids_of_nothing_are_not_drawn(tmp_path: Path) -> None:
    """Of the ids 0 to 9 a, b and c are ordinary: c is at 6, and a control token beside the model at 7."""
    folder = by_hand(tmp_path, "a", "b", "c", special=("</s>", "<mask>"), gap=2, mask_token="<mask>")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<extra>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    added = tokenizer.token_to_id("<extra>")
    found = masking_vocabulary(folder, "span")
    assert found.mask_id == 1 and found.pieces is None and added not in (2, 3, 6)
    assert np.flatnonzero(found.is_control).tolist() == sorted({0, 1, added})
    assert found.ordinary_ids.tolist() == [2, 3, 6]
    assert masking_vocabulary(folder, "whole_word").pieces is not None


def test_a_tokenizer_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", make_documents(40))
    train_tokenizer(recipe(), tmp_path / "corpus", tmp_path / "tokenizer")
    assert "encoder_tokens" not in read_manifest(tmp_path / "tokenizer").section
    with pytest.raises(KieloError, match="mask_token in tokenizer_config.json"):
        masking_vocabulary(tmp_path / "tokenizer", "span")


@pytest.mark.parametrize("kind", KINDS)
def test_the_hybrid_objective_has_sequences_of_both_kinds(run: Path, kind: str) -> None:
    """The causal ones are the batch as it was, in documents with negative numbers; in the others each hidden
    token is the label of the position before it. Which is which follows from the sample's number.
    """
    masking = Masking(SEED, kind, masking_vocabulary(run / "tokenizer", kind), causal_share=0.4)
    batch = of_step(run, 7)
    made, hidden = masking.training_batch(batch, 0.3), masking.hide(batch, 0.3)
    is_causal = (made.documents < 0).all(axis=1)
    assert 0 < is_causal.sum() < len(is_causal) and (made.documents[~is_causal] >= 0).all()
    assert np.array_equal(made.inputs[is_causal], batch.inputs[is_causal])
    assert np.array_equal(made.labels[is_causal], batch.labels[is_causal])
    assert np.array_equal(-1 - made.documents[is_causal], batch.documents[is_causal])
    assert np.array_equal(made.inputs[~is_causal], hidden.inputs[~is_causal])
    for row in np.flatnonzero(~is_causal):
        for place in range(LENGTH - 1):
            assert made.labels[row, place] == hidden.labels[row, place + 1]
        assert made.labels[row, -1] == NOT_COUNTED == hidden.labels[row, 0]
    for rank in range(3):
        part = masking.training_batch(of_step(run, 7, rank, 3), 0.3)
        for name in ("inputs", "labels", "documents"):
            assert np.array_equal(getattr(part, name), getattr(made, name)[rank::3])


def test_the_share_of_causal_sequences_is_the_one_asked_for(run: Path) -> None:
    """Of 20,000 samples, within four deviations; without documents each sequence is one."""
    vocabulary = masking_vocabulary(run / "tokenizer", "span")
    tokens = np.random.default_rng(2).choice(vocabulary.ordinary_ids, (20_000, 2))
    batch = Batch(tokens, tokens, None, np.arange(20_000))
    made = Masking(SEED, "span", vocabulary, causal_share=1 / 16).training_batch(batch, 0.3)
    assert set(np.unique(made.documents)) == {-1, 0}
    share, deviation = (made.documents[:, 0] < 0).mean(), (1 / 16 * 15 / 16 / 20_000) ** 0.5
    assert share == pytest.approx(1 / 16, abs=4 * deviation)
    assert Masking(SEED, "span", vocabulary).training_batch(batch, 0.3).documents is None


# A vocabulary by hand: 0 to 2 are control tokens, 3 to 9 ordinary but for 8, an id without a token. Odd ids
# go on with the word of the token before them.
BY_HAND = MaskingVocabulary(
    mask_id=1,
    is_control=np.arange(10) < 3,
    ordinary_ids=np.array([3, 4, 5, 6, 7, 9]),
    pieces=SimpleNamespace(go_on=lambda tokens: tokens[:, 1:] % 2 == 1),
)
ROWS = [[2, 3, 4, 5, 5, 6, 7, 9, 4, 3, 6, 2], [4, 4, 5, 7, 6, 6, 9, 3, 3, 3, 3, 2], [2] * 12]


def plain_draw(sample: int, stream: int, place: int) -> float:
    """The number in [0, 1) of a place of a stream of a sample, in plain integers."""
    golden = 0x9E3779B97F4A7C15
    key = plain_scramble((plain_key(SEED, "masking") + sample * golden) % 2**64)
    return (plain_scramble((key + ((stream << 32) + place) * golden) % 2**64) >> 11) / 2**53


def plain_length(draw: float) -> int:
    """The span's length whose share of the distribution covers the draw: geometric of 0.2, modulo 11."""
    shares = [0.2 * 0.8**n for n in range(11)]  # of 1, 2, …, 11, and of 12, … the same again, by a factor
    total = sum(shares)
    shares = [(shares[0] + shares[10]) / total, *(share / total for share in shares[1:10])]
    return next((n for n in range(1, 10) if draw < sum(shares[:n])), 10)


def plain_hidden(kind, row, labels, sample, rate, causal) -> tuple[list[int], list[int]]:
    """One sequence hidden token by token, as the module's description says."""
    spans, ends = [], plain_length(plain_draw(sample, 0, 1))
    for at, token in enumerate(row):
        if at == 0:
            spans.append(0)
        elif kind == "subword":
            spans.append(at)
        elif kind == "whole_word":
            spans.append(spans[-1] + (token % 2 == 0))
        else:
            spans.append(spans[-1] + (at == ends))
            ends += plain_length(plain_draw(sample, 0, spans[-1] + 1)) if at == ends else 0
    may = [
        token > 2 and (at == 0 or labels[at - 1] != NOT_COUNTED) and not (causal and at == 0)
        for at, token in enumerate(row)
    ]
    draws = [plain_draw(sample, 1, span + 1) for span in spans]
    least = min((draw for draw, allowed in zip(draws, may) if allowed), default=1)
    inputs, hidden = list(row), [NOT_COUNTED] * len(row)
    for at, token in enumerate(row):
        if may[at] and (draws[at] < rate or draws[at] == least):
            action, hidden[at] = plain_draw(sample, 2, spans[at] + 1), token
            inputs[at] = 1
            if action < 0.1:
                inputs[at] = [3, 4, 5, 6, 7, 9][int(plain_draw(sample, 3, at + 1) * 6)]
            elif action >= 0.9:
                inputs[at] = token
    return inputs, hidden


@pytest.mark.parametrize("causal", [0.0, 0.4])
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_tokens_are_those_of_the_description(kind: str, causal: float) -> None:
    """Token by token what a script with plain integers hides, of sixty sequences at three rates; with causal
    sequences also which they are, and the labels before the hidden tokens.
    """
    inputs, samples = np.array(ROWS * 20), np.arange(1000, 1060)
    labels = np.pad(inputs[:, 1:], ((0, 0), (0, 1)), constant_values=NOT_COUNTED)
    labels[:, 4:6] = NOT_COUNTED
    batch, masking = Batch(inputs, labels, None, samples), Masking(SEED, kind, BY_HAND, causal)
    for rate in (1e-9, 0.3, 0.9):
        made, hidden = masking.training_batch(batch, rate), masking.hide(batch, rate)
        for row, sample in enumerate(samples.tolist()):
            expected = plain_hidden(kind, inputs[row].tolist(), labels[row].tolist(), sample, rate, causal)
            assert (hidden.inputs[row].tolist(), hidden.labels[row].tolist()) == expected
            if causal and plain_draw(sample, 4, 1) < causal:
                assert made.inputs[row].tolist() == inputs[row].tolist()
                assert made.labels[row].tolist() == labels[row].tolist()
                assert made.documents[row].tolist() == [-1] * 12
            elif causal:
                assert made.inputs[row].tolist() == expected[0]
                assert made.labels[row].tolist() == [*expected[1][1:], NOT_COUNTED]
                assert made.documents[row].tolist() == [0] * 12
            else:
                assert made.labels[row].tolist() == expected[1] and made.documents is None
    numbered = Batch(inputs, labels, np.full(inputs.shape, 3, np.int32), samples)
    documents = masking.training_batch(numbered, 0.3).documents
    assert set(np.unique(documents)) == ({-4, 3} if causal else {3})


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> tuple[Path, set[int], list[int]]:
    """Returns a run folder whose token ids are all different, the ids that carry loss, and all ids in order.

    A third of the tokens carries loss, in runs of up to six; documents have 1 to 40 tokens.
    """
    folder, chance = tmp_path_factory.mktemp("answers"), np.random.default_rng(11)
    flags = np.repeat(chance.random(800) < 1 / 3, chance.integers(1, 7, 800))
    lengths = chance.integers(1, 41, 200)
    lengths = lengths[np.cumsum(lengths) <= len(flags)]
    flags, ids = flags[: lengths.sum()], np.arange(10, 10 + lengths.sum())
    with write_stage(folder / "tokens", "tokens", 1, {}, {}) as stage:
        for name in ("a", "heldout"):
            with TokenShardWriter(stage.folder / name, 70_000, has_loss_mask=True) as writer:
                writer.add_documents(ids, lengths, flags)
        counts = {"tokens": len(ids), "documents": len(lengths)}
        stage.counts.update({"sources": {"a": {"tokens": 0}}, "heldout": counts})
    packed = Recipe(
        name="tiny", language="et", corpus={"sources": ["a.txt"]},
        dataset={"packing": "best_fit", "sequence_length": LENGTH}, train={"tokens": 10**4},
    )  # fmt: skip
    pack_sequences(packed, folder / "tokens")
    return folder, set(ids[flags].tolist()), ids.tolist()


WITHOUT_WORDS = MaskingVocabulary(1, np.arange(70_000) < 3, np.arange(3, 10))


def read_answers(answers: Path, way: str) -> Batch:
    """All sequences of the text, in one of the ways in which a batch of it is made."""
    tokens = answers / "tokens"
    if way == "heldout":
        return heldout_sets(tokens)[0].batch(LENGTH, 10**6)
    packing = "best_fit" if way == "best_fit" else "one_stream"
    made = Batches(tokens, SEED, phase(mixture={"a": 1.0}, packing=packing), LENGTH, 0, False)
    samples = np.arange(-(-made.order.sources[0].num_tokens // LENGTH))
    return made.read(samples)


@pytest.mark.parametrize("way", ["one_stream", "best_fit", "heldout"])
@pytest.mark.parametrize("kind", ["subword", "span"])
def test_hidden_are_only_tokens_that_carry_loss(answers, kind: str, way: str) -> None:
    """The first token of a sequence too. In a stream, at rate 1, it is each of them that is an input."""
    folder, with_loss, ids = answers
    batch = read_answers(folder, way)
    whole = Masking(SEED, kind, WITHOUT_WORDS).hide(batch, 1.0)
    hidden = set(whole.labels[whole.labels != NOT_COUNTED].tolist())
    assert hidden <= with_loss
    first = set(batch.inputs[:, 0].tolist())
    assert len(first & with_loss) > 10 < len(first - with_loss)
    if way in ("one_stream", "heldout"):
        assert hidden == with_loss & set(ids[:-1])
    assert hidden & first == first & with_loss


def test_a_first_token_that_an_earlier_phase_has_had_is_not_hidden(answers) -> None:
    """A phase that begins inside of a sequence hides none of the tokens before that place."""
    (folder, with_loss, _), cut, led = answers, LENGTH // 2 + 1, 0
    later = phase(number=2, mixture={"a": 1.0}, offsets={"a": LENGTH // 2})
    for seed in range(12):  # of the order: other sequences are the first
        batch = Batches(folder / "tokens", seed, later, LENGTH, 0, False).read(np.arange(3))
        labels = Masking(SEED, "subword", WITHOUT_WORDS).hide(batch, 1.0).labels
        assert (labels[0, :cut] == NOT_COUNTED).all()
        rest = {*batch.inputs[0, cut:].tolist(), *batch.inputs[1:].ravel().tolist()}
        assert set(labels[labels != NOT_COUNTED].tolist()) == rest & with_loss
        led += int(batch.inputs[0, 0]) in with_loss
    assert led


def test_lengths_of_spans_at_their_borders() -> None:
    """Just below and at each border of the distribution, which a plain sum gives."""
    shares = [0.2 * 0.8**n for n in range(11)]
    borders = (np.cumsum([shares[0] + shares[10], *shares[1:9]]) / sum(shares)).tolist()
    below, at = (span_lengths(np.array(borders) + by).tolist() for by in (-1e-12, 1e-12))
    assert below == list(range(1, 10)) and at == list(range(2, 11))
    assert span_lengths(np.array([0.0, 1 - 2**-53])).tolist() == [1, 10]


def test_random_tokens_are_no_control_tokens_and_no_gaps(run: Path) -> None:
    """What may be drawn in place of a hidden token: all tokens but the five of encoders."""
    found = masking_vocabulary(run / "tokenizer", "span")
    assert found.mask_id == 4 and np.flatnonzero(found.is_control).tolist() == [0, 1, 2, 3, 4]
    assert found.ordinary_ids.tolist() == list(range(5, VOCABULARY)) and found.pieces is None
    assert len(found.is_control) == VOCABULARY
    assert masking_vocabulary(run / "tokenizer", "whole_word").pieces is not None
