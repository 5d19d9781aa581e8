"""Instructions beside text: packed by the chat template, with a mask that goes with every token."""

import json
import shutil

import numpy as np
import pytest

from kielo.artifact.documents import join_messages, read_documents
from kielo.artifact.manifest import read_manifest
from kielo.artifact.token_shards import TokenShard, TokenShardWriter
from kielo.dataset.batches import NOT_COUNTED, Batches
from kielo.dataset.heldout_sets import heldout_sets
from kielo.dataset.pack import pack
from kielo.dataset.pack_sequences import pack_sequences
from kielo.dataset.provenance import check_recipe
from kielo.dataset.query import documents_of_step
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.resolve.mixture_table import mixture_table
from kielo.tokenizer.load import decode, encode, end_of_text_id, load_tokenizer
from kielo.tokenizer.train import train_tokenizer
from tests.dataset.test_batches import LENGTH, PER_STEP, make_documents, phase, write_corpus

MIXTURE = {"a": 1.0, "chats": 2.0}


def recipe(loss: str = "answers", sources: int = 2, **tokenizer) -> Recipe:
    named = [
        {"name": "chats", "path": "chats.jsonl", "kind": "instructions", "loss": loss},
        {"name": "a", "path": "a.txt"},
    ]
    return Recipe(
        name="tiny", language="et", corpus={"sources": named[:sources]},
        tokenizer=tokenizer or {"vocab_size": 400},
        dataset={"heldout_share": 0.2, "sequence_length": LENGTH},
        train={"tokens": 4000, "tokens_per_step": LENGTH * PER_STEP},
    )  # fmt: skip


def conversations(texts: list[str]) -> list[dict]:
    """Of one, two or three questions each, some with a system message."""
    found = []
    for n in range(60):
        messages = [{"role": "system", "content": "Ole lühike."}] * (n % 4 == 0)
        for turn in range(n % 3 + 1):
            question, answer = texts[n], texts[(n + 1 + turn) % len(texts)]
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        text, turns = join_messages(messages)
        metadata = {"turns": turns, "file": "chats.jsonl", "number": n + 1}
        found.append({"id": f"chats/{n}", "source": "chats", "text": text, "metadata": metadata})
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a run")
    plain = [document | {"source": "a"} for document in make_documents(90)]
    write_corpus(folder / "corpus", [*plain, *conversations([one["text"] for one in plain])])
    train_tokenizer(recipe(), folder / "corpus", folder / "tokenizer")
    pack(recipe(), folder / "corpus", folder / "tokenizer", folder / "tokens")
    return folder


def slow_rows(run) -> dict[str, tuple[list[int], list[bool]]]:
    """Document id → (ids, whether each carries loss), put together piece by piece from the messages."""
    tokenizer = load_tokenizer(run / "tokenizer")
    begins, ends = (tokenizer.whole.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    rows = {}
    for document in read_documents(run / "corpus" / "documents"):
        ids, flags, start = [], [], 0
        for role, characters in document["metadata"].get("turns", []):
            content = document["text"][start : start + characters]
            start += characters + 1
            head, line_end = encode(tokenizer, [f"{role}\n", "\n"])
            body = encode(tokenizer, [content])[0]
            ids += [begins, *head, *body, ends, *line_end]
            is_answer = role == "assistant"
            flags += [False] * (1 + len(head)) + [is_answer] * (len(body) + 1) + [False] * len(line_end)
        if not ids:
            ids = encode(tokenizer, [document["text"]])[0]
            flags = [True] * len(ids)
        is_chat = "turns" in document["metadata"]
        rows[document["id"]] = ([*ids, end_of_text_id(tokenizer)], [*flags, not is_chat])
    return rows


def test_shards_hold_conversations_and_their_masks(run):
    """Every token and flag is what putting the pieces together gives; counts are of what carries loss; text
    has no mask."""
    rows, counts = slow_rows(run), read_manifest(run / "tokens").counts
    texts = {document["id"]: document for document in read_documents(run / "corpus" / "documents")}
    for name, of in (
        ("chats", counts["sources"]["chats"]), ("heldout", counts["heldout"]),
        ("heldout.chats", counts["heldout_sets"]["chats"]), ("a", counts["sources"]["a"]),
    ):  # fmt: skip
        shard = TokenShard(run / "tokens" / name)
        ids = (run / "tokens" / f"{name}.ids.txt").read_text().splitlines()
        expected = [rows[identifier] for identifier in ids]
        tokens = [token for row, _ in expected for token in row]
        flags = np.array([flag for _, row in expected for flag in row])
        assert shard.read(0, shard.num_tokens).tolist() == tokens and of["tokens"] == len(tokens)
        if name == "a":
            assert shard.loss_mask is None and flags.all() and "tokens_with_loss" not in of
            continue
        assert np.array_equal(shard.loss_mask, flags) and of["tokens_with_loss"] == flags.sum()
        num_bytes = 0
        for document in (texts[identifier] for identifier in ids):
            start, turns = 0, document["metadata"].get("turns")
            num_bytes += 0 if turns else len(document["text"].encode()) + 1
            for role, characters in turns or []:
                answer = document["text"][start : start + characters]
                num_bytes += len(answer.encode()) + 1 if role == "assistant" else 0
                start += characters + 1
        assert of["bytes_with_loss"] == num_bytes
    whole, _, chats = heldout_sets(run / "tokens")
    assert chats.tokens_per_byte == chats.with_loss[0] / chats.with_loss[1] != chats.tokens / chats.text_bytes
    batch = whole.batch(LENGTH, 10_000)
    assert (batch.labels != NOT_COUNTED).sum() == TokenShard(run / "tokens" / "heldout").loss_mask[1:].sum()


@pytest.mark.parametrize("ranks", [1, 3])
def test_labels_without_loss_do_not_count(run, ranks):
    """Every label of an epoch and more: counted where the mask of its own token says so, on any ranks, also
    where an earlier phase has seen a part, with documents apart or not."""
    rows = slow_rows(run)
    flags = {}
    for name in ("a", "chats"):
        ids = (run / "tokens" / f"{name}.ids.txt").read_text().splitlines()
        flags[name] = np.array([flag for identifier in ids for flag in rows[identifier][1]])
    for mask_documents in (True, False):
        of = phase(mixture=MIXTURE, offsets={"chats": 8 * LENGTH + 3})
        batches = Batches(run / "tokens", 7, of, LENGTH, 0, mask_documents)
        for step in range(1, 20):
            for rank in range(ranks):
                batch = batches.step(step, rank, ranks)
                located = batches.order.locate(batch.samples)
                for row, source in enumerate(located.source):
                    shard = batches.shards[source]
                    start = int(located.sequence[row]) * LENGTH + 1
                    own = flags[batches.names[source]][start : start + LENGTH].copy()
                    own[: located.seen_tokens[row]] = False
                    expected = np.where(own, shard.read(start, len(own)).astype(int), NOT_COUNTED)
                    assert np.array_equal(batch.labels[row, : len(own)], expected)
                    assert (batch.labels[row, len(own) :] == NOT_COUNTED).all()


def test_shards_without_a_mask_are_read_as_before(run, tmp_path):
    """Beside instructions a text's shard is byte for byte what it is alone, and so are its samples."""
    alone = Recipe.model_validate(
        recipe().model_dump() | {"corpus": {"sources": [{"name": "a", "path": "a"}]}}
    )
    plain = [one for one in read_documents(run / "corpus" / "documents") if one["source"] == "a"]
    write_corpus(tmp_path / "corpus", plain)
    tokens = pack(alone, tmp_path / "corpus", run / "tokenizer", tmp_path / "tokens")
    assert tokens.section == {"heldout_share": 0.2} and not any("mask" in name for name in tokens.files)
    for name in ("a.bin", "a.idx"):
        assert (tmp_path / "tokens" / name).read_bytes() == (run / "tokens" / name).read_bytes()
    both = [
        Batches(folder / "tokens", 7, phase(mixture={"a": 1.0}), LENGTH, 0, True)
        for folder in (run, tmp_path)
    ]
    for step in (1, 2, 9):
        ours, theirs = (batches.step(step, 0, 1) for batches in both)
        assert all(np.array_equal(getattr(ours, key), getattr(theirs, key)) for key in vars(ours))


def test_best_fit_packed_labels_follow_the_mask(run, tmp_path):
    """Pieces of documents in any order: each label is counted where the mask of its own token says so, as is
    that of a document's first token after another document, or of the next token where a document is cut.
    """
    shutil.copytree(run / "tokens", tmp_path / "tokens")
    dataset = recipe().dataset.model_copy(update={"packing": "best_fit"})
    pack_sequences(recipe().model_copy(update={"dataset": dataset}), tmp_path / "tokens")
    batches = Batches(tmp_path / "tokens", 7, phase(mixture=MIXTURE, packing="best_fit"), LENGTH, 0, True)
    counted = 0
    for step in range(1, 12):
        batch = batches.step(step, 0, 1)
        located = batches.order.locate(batch.samples)
        for row, (source, ranges) in enumerate(zip(located.source, batches.ranges(located))):
            shard = batches.shards[source]
            begins, expected = set(shard.document_offsets.tolist()), []
            for (start, count), following in zip(ranges, [*ranges[1:], None]):
                labels = list(range(start + 1, start + count + 1))
                if labels[-1] in begins:  # the document has ended
                    labels[-1] = following[0] if following and following[0] in begins else None
                expected += labels
            mask = np.ones(shard.num_tokens) if shard.loss_mask is None else shard.loss_mask[:]
            wanted = [
                NOT_COUNTED if place is None or not mask[place] else int(shard.read(place, 1)[0])
                for place in expected
            ]
            assert batch.labels[row].tolist() == wanted + [NOT_COUNTED] * (LENGTH - len(wanted))
            counted += sum(label != NOT_COUNTED for label in wanted)
    assert 0.5 < counted / (11 * PER_STEP * LENGTH) < 0.8


def test_the_query_and_the_table_count_what_carries_loss(run):
    """The rows of a step count those of its tokens that carry loss; so does the table of all tokens."""
    of = phase(mixture=MIXTURE)
    batches = Batches(run / "tokens", 7, of, LENGTH, 0, False)
    located = batches.order.locate(batches.samples(2))
    rows = documents_of_step(run / "tokens", 7, of, LENGTH, 0, 2, lambda ids: "")
    expected = 0
    for source, ((start, count),) in zip(located.source, batches.ranges(located)):
        mask = batches.shards[source].loss_mask
        expected += count if mask is None else mask[start : start + count].sum()
    assert sum(row["with_loss"] for row in rows) == expected
    assert {row["source"] for row in rows if row["with_loss"] < row["tokens"]} == {"chats"}
    assert all(row["document"].startswith("chats/") for row in rows if row["source"] == "chats")
    amounts = {row.source: row.amount for row in mixture_table(recipe(), run).sources}
    mask = TokenShard(run / "tokens" / "chats").loss_mask[:]
    assert amounts["chats"].tokens_with_loss == mask.sum() < amounts["chats"].tokens
    assert amounts["a"].tokens_with_loss is None


def test_another_loss_is_another_packing(run, tmp_path):
    """loss = "all" packs again, without a mask and with the same tokens; old tokens are refused."""
    check_recipe(recipe(), run)
    with pytest.raises(KieloError, match=r"loss = 'answers': were \['chats'\], are now \[\]"):
        check_recipe(recipe("all"), run)
    for name in ("corpus", "tokenizer", "tokens"):
        shutil.copytree(run / name, tmp_path / name)
    counts = pack(recipe("all"), tmp_path / "corpus", tmp_path / "tokenizer", tmp_path / "tokens").counts
    assert not list((tmp_path / "tokens").glob("*.loss_mask")) and "tokens_with_loss" not in counts["heldout"]
    assert (tmp_path / "tokens" / "chats.bin").read_bytes() == (run / "tokens" / "chats.bin").read_bytes()


def test_a_mask_belongs_to_its_tokens(run, tmp_path):
    """One of another length, or lost, is refused with the file's name; the flags of a document are as many as
    its tokens."""
    shutil.copytree(run / "tokens", tmp_path / "tokens")
    mask = tmp_path / "tokens" / "chats.loss_mask"
    mask.write_bytes(mask.read_bytes()[:-1])
    with pytest.raises(KieloError, match=r"chats\.loss_mask: .* bytes for the"):
        TokenShard(tmp_path / "tokens" / "chats")
    mask.unlink()
    with pytest.raises(KieloError, match=r"chats\.loss_mask"):
        Batches(tmp_path / "tokens", 7, phase(mixture=MIXTURE), LENGTH, 0, False)
    with pytest.raises(ValueError, match="loss mask"), TokenShardWriter(tmp_path / "b", 9, True) as writer:
        writer.add(np.array([1, 2]), np.array([True]))


def test_a_tokenizer_of_ones_own_gets_a_template(run, tmp_path):
    """Its marks are single tokens after end-of-text, and a recipe without instructions has none of it."""
    config = json.loads((run / "tokenizer" / "tokenizer_config.json").read_text())
    tokenizer = load_tokenizer(run / "tokenizer")
    assert [tokenizer.whole.id_to_token(n) for n in (0, 1, 2)] == [
        "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    ]  # fmt: skip
    assert config["chat_template"] and decode(tokenizer, [[1, 2]]) == ["<|im_start|><|im_end|>"]
    with pytest.raises(KieloError, match="needs at least 260"):
        train_tokenizer(recipe(vocab_size=259), run / "corpus", tmp_path / "small")
    alone = Recipe.model_validate(
        recipe().model_dump() | {"corpus": {"sources": [{"name": "a", "path": "a"}]}}
    )
    train_tokenizer(alone, run / "corpus", tmp_path / "plain")
    assert "chat_template" not in (tmp_path / "plain" / "tokenizer_config.json").read_text()
    assert "chat_tokens" not in read_manifest(tmp_path / "plain").section
    with pytest.raises(KieloError, match="plain: this tokenizer has no chat template.*Fix: "):
        train_tokenizer(recipe(path=str(tmp_path / "plain")), run / "corpus", tmp_path / "ready")


def test_a_template_that_fails_is_named_by_file_and_line(run, tmp_path):
    """Packing stops at the conversation that the template refuses."""
    shutil.copytree(run / "tokenizer", tmp_path / "ready")
    template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system role') }}"
    (tmp_path / "ready" / "chat_template.jinja").write_text(
        template + "{% endif %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(KieloError, match=r"chats: chats\.jsonl, line or row 1: .* No system role"):
        pack(recipe(), run / "corpus", tmp_path / "ready", tmp_path / "tokens")
    assert not (tmp_path / "tokens").exists()
