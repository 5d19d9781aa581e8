"""The run of docs/training.md: a batch ramp, longer sequences, another mixture,
rewarming and steps passed over.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch.nn import functional as F

from kielo.artifact.checkpoint_index import read_plain
from kielo.artifact.manifest import write_stage
from kielo.artifact.metrics import PassedOver, TrainingStep, of_kind, read_metrics
from kielo.artifact.token_shards import TokenShard, TokenShardWriter
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.dataset.batches import NOT_COUNTED
from kielo.dataset.order import Order, OrderSource, Phase
from kielo.dataset.query import documents_of_step
from kielo.models import families
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import Resolved, read
from kielo.resolve.software import BACKEND_VARIABLE
from kielo.train import build
from kielo.train.optimiser import is_decayed
from kielo.train.run import train
from tests.house.checks import ROOT
from tests.started_ranks import run_ranks

VOCABULARY = 67
SETS = [
    "checkpoint.keep_newest=50",
    "train.log_every_steps=1",
    "train.heldout_every_steps=13",
    "train.tensorboard=false",
]
# (recipe's phase, first step, steps, first sample, sequence length, tokens per step), by hand.
PHASES = [
    (1, 1, 4, 0, 64, 256), (1, 5, 2, 16, 64, 512), (1, 7, 2, 32, 64, 768), (1, 9, 6, 56, 64, 1024),
    (2, 15, 4, 152, 128, 1024), (3, 19, 4, 184, 64, 1024), (4, 23, 6, 248, 64, 1024),
]  # fmt: skip
SKIPPED = {9, 10, 18, 19}


def write_stages(folder: Path) -> None:
    """Tokens of two sources and of held-out text, and a tokenizer for them."""
    generator = np.random.default_rng(5)
    with write_stage(folder / "tokens", "tokens", 1, {}, {}) as stage:
        counts = {}
        for name, documents in (("web", 800), ("books", 250), ("heldout", 20)):
            lengths = generator.integers(5, 60, documents)
            with TokenShardWriter(stage.folder / name, VOCABULARY) as writer:
                for length in lengths:
                    writer.add(np.append(np.sort(generator.integers(1, VOCABULARY, length)), 0))
            ids = "".join(f"{name}/{number}\n" for number in range(documents))
            (stage.folder / f"{name}.ids.txt").write_text(ids, encoding="utf-8")
            counts[name] = {"tokens": int(lengths.sum()) + documents, "documents": documents, "bytes": 1}
        stage.counts.update({"heldout": counts.pop("heldout"), "sources": counts})
    with write_stage(folder / "tokenizer", "tokenizer", 1, {}, {}) as stage:
        vocabulary = {"<|endoftext|>": 0} | {f"t{number}": number for number in range(1, VOCABULARY)}
        Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(stage.folder / "tokenizer.json"))


def resolved_in(folder: Path, *sets: str, ranks: int = 1) -> Resolved:
    """The recipe of the docs, resolved in a run folder that has its stages."""
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (folder / "recipe.toml").write_text(
        re.search(r'```toml\n(name = "phases".*?)```', text, re.S)[1], encoding="utf-8"
    )
    if not (folder / "tokens").exists():
        write_stages(folder)
    clip_the_third_phase(folder / "recipe.toml")
    return resolve(read_recipe(folder / "recipe.toml", [*SETS, *sets]).recipe, folder, ranks, "cpu")


def clip_the_third_phase(recipe: Path) -> None:
    """Gives the phase of this mixture a threshold of its own."""
    text, mixture = recipe.read_text(encoding="utf-8"), "mixture = { web = 1, books = 3 }\n"
    assert mixture in text
    recipe.write_text(text.replace(mixture, f"{mixture}max_gradient_norm = 0.25\n"), encoding="utf-8")


def on_rank(resolved: Resolved, max_steps: int | None = None) -> tuple[str, dict[int, dict[int, Any]]]:
    """Train; the outcome, and for each step of this attempt {sample: labels of its sequence}."""
    steps: dict[int, dict[int, Any]] = {}
    original = build.Feed.take

    def take(self: Any, step: int) -> Any:
        batch = original(self, step)
        rows = torch.cat([piece.labels_bs for piece in batch.micro_batches])
        steps[step] = dict(zip(batch.samples, rows.numpy(), strict=True))
        return batch

    build.Feed.take = take
    try:
        return train(resolved, max_steps).outcome, steps
    finally:
        build.Feed.take = original


def rows(folder: Path, *keys: str) -> list[tuple]:
    found = of_kind(read_metrics(folder / "train" / "metrics.jsonl"), TrainingStep)
    return [tuple(getattr(row, key) for key in keys) for row in found]


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "train" / "checkpoints" / f"step_{step:08d}"


def texts_by_hand(resolved: Resolved) -> dict[int, dict[int, tuple[np.ndarray, np.ndarray]]]:
    """Step → {sample: (inputs, labels)}, straight from the order and the shards."""
    folder, seed = Path(resolved.placement.tokens_folder), resolved.identity.seed
    mixtures = {
        1: {"books": 1, "web": 3},
        2: {"books": 1, "web": 3},
        3: {"books": 3, "web": 1},
        4: {"books": 1},
    }
    shards = {name: TokenShard(folder / name) for name in ("books", "web")}
    steps, offsets, order = {}, {}, None
    for number, first_step, num_steps, first_sample, length, tokens in PHASES:
        if order is None or order.phase.number != number:
            offsets = order.offsets_at(first_sample) if order else {}
            sources = [
                OrderSource(name, shards[name].num_tokens - 1, mixtures[number][name])
                for name in mixtures[number]
            ]
            order = Order(seed, Phase(number, first_sample, length, 128, offsets), sources)
        for step in range(first_step, first_step + num_steps):
            first = first_sample + (step - first_step) * (tokens // length)
            samples = np.arange(first, first + tokens // length)
            located, steps[step] = order.locate(samples), {}
            for sample, source, sequence, seen in zip(
                samples, located.source, located.sequence, located.seen_tokens
            ):
                text = shards[order.sources[source].name]
                piece = text.read(
                    sequence * length, min(length + 1, text.num_tokens - sequence * length)
                ).astype(np.int64)
                inputs, labels = np.zeros(length, np.int64), np.full(length, NOT_COUNTED)
                inputs[: len(piece) - 1], labels[: len(piece) - 1] = piece[:-1], piece[1:]
                labels[:seen] = NOT_COUNTED
                steps[step][int(sample)] = inputs, labels
    return steps


def rate_by_hand(tokens: int) -> float:
    """17,920 tokens from 0 to 3e-3 and down to 3e-4, then 6,144 from there to 1e-3 and down to 1e-4."""
    if tokens <= 17920:
        return min(tokens / 1792, 1) * 3e-3 if tokens <= 14336 else 3e-4 + 2.7e-3 * (17920 - tokens) / 3584
    tokens -= 17920
    return (
        3e-4 + 7e-4 * tokens / 2048
        if tokens <= 2048
        else 1e-3
        if tokens <= 5120
        else 1e-4 + 9e-4 * (6144 - tokens) / 1024
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[int, Any]]]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole")
    outcome, steps = on_rank(resolved_in(folder))
    assert outcome == "finished"
    return folder, steps


def test_every_number_of_the_docs_recipe(tmp_path: Path) -> None:
    """Ramp, phases, steps, samples and segments are those made by hand, and resolved.toml reads back."""
    resolved = resolved_in(tmp_path)
    found = [
        (
            phase.number,
            phase.first_step,
            phase.steps,
            phase.first_sample,
            phase.sequence_length,
            phase.tokens_per_step,
        )
        for phase in resolved.identity.phases
    ]
    assert found == PHASES and resolved.identity.total_steps == 28 and resolved.identity.total_tokens == 24064
    placed = resolved.placement.phases
    assert [(phase.micro_batch_sequences, phase.micro_batches_per_step) for phase in placed] == [
        (4, 1), (4, 2), (4, 3), (4, 4), (2, 4), (4, 4), (4, 4)
    ]  # fmt: skip
    assert resolved.identity.model.max_position_embeddings == 128
    flops = [placed.flops_per_token for placed in resolved.placement.phases]
    assert flops[4] - flops[0] == 6 * 2 * 32 * 64 and set(flops[:4]) == {flops[0]}
    assert [resolved.identity.tokens_after(step) for step in (0, 4, 5, 14, 28)] == [
        0,
        1024,
        1536,
        9728,
        24064,
    ]
    train_folder = Path(resolved.placement.train_folder)
    assert train(resolved, max_steps=1).step == 1
    assert read(train_folder.parent / "resolved.toml") == resolved


def test_the_text_of_every_step_is_the_orders(undisturbed: tuple[Path, dict[int, dict[int, Any]]]) -> None:
    """Every step but those passed over has the samples and labels made by hand;
    the query names documents of all.
    """
    folder, steps = undisturbed
    resolved = resolved_in(folder)
    by_hand = texts_by_hand(resolved)
    assert steps.keys() == set(range(1, 29)) - SKIPPED
    for step in steps:
        assert steps[step].keys() == by_hand[step].keys()
        assert all(np.array_equal(steps[step][sample], by_hand[step][sample][1]) for sample in steps[step])
    samples = [sample for step in range(1, 29) for sample in by_hand[step]]
    assert samples == list(range(248 + 6 * 16))
    for step in (2, 16, 18, 20, 28):
        phase = resolved.identity.phases[resolved.identity.phase_index(step)]
        found = documents_of_step(
            Path(resolved.placement.tokens_folder), resolved.identity.seed, phase, 128, 0, step, str
        )
        assert {row["sample"] for row in found} == by_hand[step].keys()


def test_losses_and_rates_are_those_of_plain_training(
    undisturbed: tuple[Path, dict[int, dict[int, Any]]],
) -> None:
    """torch's own cross-entropy, clipping and AdamW on the text by hand, at the rates by hand: losses within
    1e-5; rates go on without a jump at each border, and the new segment begins where the old one ended.
    """
    folder, steps = undisturbed
    resolved = resolved_in(folder)
    identity, config = resolved.identity, resolved.identity.model
    model, family = families.build_model(config), families.module(config.model_type, "model")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(family.initial_value(name, parameter.shape, config, identity.seed))
    groups = [
        {
            "params": [p for p in model.parameters() if is_decayed(p)],
            "weight_decay": identity.train.weight_decay,
        },
        {"params": [p for p in model.parameters() if not is_decayed(p)], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        groups,
        betas=(identity.train.adam_beta1, identity.train.adam_beta2),
        eps=identity.train.adam_epsilon,
        fused=True,
    )
    by_hand, losses, learning_rates, norms = texts_by_hand(resolved), [], [], []
    for step in steps:
        inputs, labels = (torch.from_numpy(np.stack(side)) for side in zip(*by_hand[step].values()))
        logits = model.logits(model(inputs))[..., :VOCABULARY]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=NOT_COUNTED)
        adamw.zero_grad()
        loss.backward()
        # 0.25 in the third phase, and the default's 1 in the others.
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25 if 19 <= step < 23 else 1.0)
        norms.append(norm.item())
        learning_rates.append(rate_by_hand(identity.tokens_after(step)))
        for group in adamw.param_groups:
            group["lr"] = learning_rates[-1]
        adamw.step()
        losses.append(loss.item())
    assert all(0.25 < norm < 1 for step, norm in zip(steps, norms) if 19 <= step < 23)
    found = torch.tensor(rows(folder, "loss", "learning_rate"), dtype=torch.float64)
    torch.testing.assert_close(found[:, 0], torch.tensor(losses, dtype=torch.float64), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        found[:, 1], torch.tensor(learning_rates, dtype=torch.float64), rtol=1e-12, atol=0
    )
    assert [number for (number,) in rows(folder, "phase")] == [1] * 12 + [2] * 3 + [3] * 3 + [4] * 6
    passed_over = of_kind(read_metrics(folder / "train" / "metrics.jsonl"), PassedOver)
    assert [(row.passed_over_from, row.step, row.phase) for row in passed_over] == [
        (9, 10, 1),
        (18, 18, 2),
        (19, 19, 3),
    ]


STOPS = (4, 8, 9, 14, 16, 18, 20, 22, 25)


@pytest.mark.parametrize(
    "stops", [(8, 9, 16, 18, 22), pytest.param(STOPS, marks=pytest.mark.full)], ids=["few", "all"]
)
def test_stopped_in_every_phase_and_at_every_border(
    tmp_path: Path, undisturbed: tuple[Path, dict[int, dict[int, Any]]], stops: tuple[int, ...]
) -> None:
    """Stops in one run: the same text, bitwise the same weights, each row once. What is passed over changes
    no weight and is recorded.
    """
    whole, steps = undisturbed
    seen: dict[int, dict[int, Any]] = {}
    for stop in stops:
        outcome, done = on_rank(resolved_in(tmp_path), max_steps=stop)
        assert outcome == "requeue"
        seen |= done
    outcome, done = on_rank(resolved_in(tmp_path))
    assert outcome == "finished"
    seen |= done
    assert seen.keys() == steps.keys()
    assert all(
        np.array_equal(seen[step][sample], steps[step][sample]) for step in steps for sample in steps[step]
    )
    expected, found = read_tensors(checkpoint(whole, 28)), read_tensors(checkpoint(tmp_path, 28))
    assert expected.keys() == found.keys() and all(
        torch.equal(expected[name], found[name]) for name in expected
    )
    exact = ("step", "tokens", "samples", "phase", "loss", "gradient_norm", "learning_rate")
    assert rows(tmp_path, *exact) == rows(whole, *exact)

    before, after = read_tensors(checkpoint(tmp_path, 8)), read_tensors(checkpoint(tmp_path, 10))
    assert all(torch.equal(before[name], after[name]) for name in before)
    recorded = {step: read_plain(checkpoint(tmp_path, step))["skipped_steps"] for step in (8, 10, 16, 18, 22)}
    assert recorded == {8: [], 10: [[9, 10]], 16: [[9, 10]], 18: [[9, 10], [18, 18]], 22: [[9, 10], [18, 19]]}


@pytest.mark.full
def test_compiled_layers_pass_every_border(
    tmp_path: Path, undisturbed: tuple[Path, dict[int, dict[int, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other lengths and micro-batches in each phase: losses within 1e-5 of the uncompiled run's."""
    monkeypatch.setenv(BACKEND_VARIABLE, "aot_eager")
    assert on_rank(resolved_in(tmp_path, "layout.compile=true"))[0] == "finished"
    losses = [torch.tensor(rows(folder, "loss")) for folder in (tmp_path, undisturbed[0])]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)


@pytest.mark.full
def test_another_number_of_ranks_goes_on_in_the_next_phase(
    tmp_path: Path, undisturbed: tuple[Path, dict[int, dict[int, Any]]]
) -> None:
    """Stopped on one rank in the first phase, it goes on over all borders on two, which share the columns of
    each sample: the same text, losses within 1e-5. (Two that share samples: test_length_phases.py.)
    """
    whole, steps = undisturbed
    _, seen = on_rank(resolved_in(tmp_path), max_steps=13)
    for outcome, done in run_ranks(on_rank, 2, resolved_in(tmp_path, "layout.context=2", ranks=2)):
        assert outcome == "finished"
        for step, samples in done.items():
            seen[step] = seen.get(step, {}) | samples
    assert {step: seen[step].keys() for step in seen} == {step: steps[step].keys() for step in steps}
    losses = [torch.tensor(rows(folder, "loss")) for folder in (tmp_path, whole)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)


def test_skips_may_change_for_steps_to_come(tmp_path: Path) -> None:
    """A later range is taken; one that the newest checkpoint lies behind is refused and names the folders to
    move; with these away the run goes on without those steps. Skipping up to the end still ends with a
    checkpoint.
    """
    train(resolved_in(tmp_path, "checkpoint.every_steps=11"), max_steps=13)
    assert train(resolved_in(tmp_path, "train.skip_steps=[[9, 10], [16, 17]]"), max_steps=14).step == 14
    changed = resolved_in(tmp_path, "train.skip_steps=[[9, 10], [12, 13], [27, 28]]")
    with pytest.raises(KieloError) as caught:
        train(changed)
    assert "from step 12 on. It passed over [[9, 10]]" in str(caught.value)
    assert "move step_00000013, step_00000014 out of" in str(caught.value)
    assert "resumes from step_00000011" in str(caught.value)
    with pytest.raises(KieloError, match="from step 9 on"):
        train(resolved_in(tmp_path, "train.skip_steps=[]"))
    for step in (13, 14):
        shutil.rmtree(checkpoint(tmp_path, step))
    outcome, steps = on_rank(changed)
    assert outcome == "finished" and steps.keys() == {*range(14, 27)}
    assert read_plain(checkpoint(tmp_path, 28))["skipped_steps"] == [[9, 10], [12, 13], [27, 28]]
    with pytest.raises(KieloError, match="learning_rates.2.peak: was 0.001, is now 0.002"):
        train(resolved_in(tmp_path, *_with_last_peak(2e-3)))


def _with_last_peak(peak: float) -> list[str]:
    phases = (
        "{tokens=10240}, {tokens=4096, sequence_length=128, micro_batch_sequences=2}, "
        "{tokens=4096, mixture={web=1, books=3}}, "
        f"{{tokens=6144, mixture={{books=1}}, learning_rate={peak}, warmup_share=0.3}}"
    )
    return [f"phases=[{phases}]", "train.skip_steps=[[9, 10], [12, 13], [27, 28]]"]
