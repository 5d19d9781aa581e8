"""Tasks that a model in training is asked: their scores, the losses beside them, and what is refused."""

import json
import math
import os
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from kielo.artifact.metrics import METRICS_NAME, TaskScores, TrainingStep, of_kind, read_metrics
from kielo.artifact.scores import TaskScore
from kielo.evaluate import tasks_in_training
from kielo.evaluate.contender import Contender, load_checkpoint
from kielo.evaluate.tasks import score_task
from kielo.evaluate.tasks_harness import Harness
from kielo.evaluate.tasks_in_training import TaskInTraining, TasksInTraining, sign_or_stop
from kielo.models.families import complete
from kielo.ranks.rendezvous import find_rendezvous
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Evaluate, Model
from kielo.resolve.resolved import Resolved
from kielo.train import run as train_run
from kielo.train.laid_out_model import LaidOutModel
from kielo.train.run import train
from kielo.train.signals import Triggers
from kielo.train.state import State
from tests.evaluate.test_bits_per_byte import byte_tokenizer
from tests.evaluate.test_own_tasks import write_own
from tests.started_ranks import run_ranks
from tests.train.tiny_run import LENGTH, resolve, write_tokens

VOCABULARY = 257
TEXTS = ("kala", "mets ja", "jogi")
BITS = (
    "task: bits\noutput_type: loglikelihood_rolling\ndataset_path: json\n"
    "dataset_kwargs: {data_files: {test: FOLDER/texts.jsonl}}\ntest_split: test\n"
    "doc_to_text: ''\ndoc_to_target: '{{text}}'\nmetric_list: [{metric: bits_per_byte}]\n"
)
WRITTEN = {"question": "Mis?", "answer": "Tartu"}


def of_layout(folder: Path, sizes: dict[str, int], **changes: Any) -> Any:
    """The run of `tiny_run` with a byte tokenizer, which has random tokens and no text."""
    config = Model(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, vocab_size=VOCABULARY, vocab_multiple=10,
        max_position_embeddings=LENGTH, initializer_range=0.2,
    )  # fmt: skip
    stages = {"pipeline_layers": (1, 1), "pipeline_stages_per_rank": 1} if "pipeline" in sizes else {}
    own = {"train_folder": str(folder / "run" / "train"), "tokenizer_folder": str(folder / "tokenizer")}
    return resolve(folder, model=complete(config, LENGTH), total_steps=4, **own, **sizes, **stages, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tokens, their tokenizer, and a folder with a task of likelihoods and a task of written text."""
    write_tokens(tmp_path / "tokens")
    (tmp_path / "tokenizer").mkdir()
    byte_tokenizer().whole.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    write_own(tmp_path / "own", WRITTEN, kind="generation")
    (tmp_path / "own" / "bits.yaml").write_text(BITS.replace("FOLDER", str(tmp_path / "own")))
    lines = (json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "own" / "texts.jsonl").write_text("".join(lines))
    return tmp_path


def trained(resolved: Any, settings: Evaluate | None) -> list[Any]:
    """Train on a rank, and return the rows of the log."""
    asked: dict[str, Any] = {}
    if settings is not None:
        tasks = TasksInTraining(settings, resolved)
        asked = {"ready": tasks.ready, "periodic": tasks.periodic()}
    assert train(resolved, **asked).outcome == "finished"
    return read_metrics(Path(resolved.placement.train_folder) / METRICS_NAME)


def bits_by_hand(contender: Any) -> float:
    """Bits per byte of the texts, each after the end-of-text token, one by one."""
    nats = 0.0
    for text in TEXTS:
        ids = torch.tensor([[0, *byte_tokenizer().whole.encode(text).ids]])
        logs = contender.logits(ids[:, :-1], contender.documents(ids[:, :-1]))[0].float().log_softmax(-1)
        nats -= logs.gather(1, ids[0, 1:, None]).sum().item()
    return nats / math.log(2) / sum(map(len, TEXTS))


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes", [{}, {"shard": 2}, {"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}]
)
def test_scores_are_those_of_the_checkpoint_and_losses_stay(sizes: dict[str, int], folder: Path) -> None:
    """Bit for bit, with held-out text after the tasks, in each layout."""
    pytest.importorskip("lm_eval")
    settings = Evaluate(tasks=("bits", "capitals"), task_folders=(str(folder / "own"),), every_steps=2)
    resolved = of_layout(folder, sizes, heldout_every_steps=2)
    ranks = resolved.placement.world_size
    (rows, *_) = run_ranks(trained, ranks, resolved, settings, timeout_seconds=300)
    scored = of_kind(rows, TaskScores)
    assert [(row.step, row.scored_task, row.unscored) for row in scored] == [(2, "bits", ""), (4, "bits", "")]
    checkpoint = folder / "run" / "train" / "checkpoints" / "step_00000004"
    alone = load_checkpoint(checkpoint, of_layout(folder, {}), folder / "tokenizer")
    (last,) = scored[-1].task_scores
    assert (last.metric, last.questions) == ("bits_per_byte,none", 3)
    assert (folder / "run" / "train" / "asking").exists()
    with torch.no_grad():
        assert last.value == pytest.approx(bits_by_hand(alone), rel=1e-5)
    assert scored[0].task_scores[0].value != last.value
    own = {"train_folder": str(folder / "plain" / "train")}
    placement = resolved.placement.model_copy(update=own)
    plain = resolved.model_copy(update={"placement": placement})
    (others, *_) = run_ranks(trained, ranks, plain, None)
    assert [row.loss for row in of_kind(rows, TrainingStep)] == [
        row.loss for row in of_kind(others, TrainingStep)
    ]
    assert state_of(folder / "run", checkpoint.name) == state_of(folder / "plain", checkpoint.name)


def trained_with_a_stop(resolved: Resolved, settings: Evaluate, stops_at: int, by: str) -> list[Any]:
    """Ask for a stop after a batch of questions. Return the outcome and the rows of the log."""
    own, run, calls = LaidOutModel.logits, Path(resolved.placement.train_folder).parent, []

    def logits(laid: LaidOutModel, *tokens: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == stops_at and by == "file":
            (run / "triggers").mkdir(exist_ok=True)
            (run / "triggers" / "stop").touch()
        elif len(calls) == stops_at and find_rendezvous().rank == resolved.placement.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return own(laid, *tokens)

    tasks = TasksInTraining(settings, resolved)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaidOutModel, "logits", logits)
        patch.setattr(train_run, "Triggers", partial(Triggers, look_seconds=0.0))
        first = train(resolved, ready=tasks.ready, periodic=tasks.periodic())
    (run / "triggers" / "stop").unlink(missing_ok=True)
    return [first.outcome, read_metrics(Path(resolved.placement.train_folder) / METRICS_NAME)]


@pytest.mark.full
@pytest.mark.parametrize(("sizes", "by"), [({}, "file"), ({"shard": 2}, "file"), ({"pipeline": 2}, "signal")])
def test_a_stop_ends_a_task_and_the_next_attempt_asks_it_again(
    sizes: dict[str, int], by: str, folder: Path
) -> None:
    """By a file, and by a signal to the last rank alone: the same scores and state as without a stop."""
    pytest.importorskip("lm_eval")
    settings = own_settings(folder, "bits")
    resolved = of_layout(folder, sizes, heldout_every_steps=2)
    ranks = resolved.placement.world_size
    (found, *_) = run_ranks(trained_with_a_stop, ranks, resolved, settings, 1, by, timeout_seconds=300)
    outcome, between = found
    assert outcome == "requeue"
    (stopped,) = of_kind(between, TaskScores)
    assert (stopped.step, stopped.task_scores, stopped.unscored) == (2, [], "the run was asked to stop")
    assert max(row.step for row in of_kind(between, TrainingStep)) == 2
    (rows, *_) = run_ranks(trained, ranks, resolved, settings, timeout_seconds=300)
    own = {"train_folder": str(folder / "plain" / "train")}
    plain = resolved.model_copy(update={"placement": resolved.placement.model_copy(update=own)})
    (whole, *_) = run_ranks(trained, ranks, plain, settings, timeout_seconds=300)
    scored = [(row.step, row.task_scores) for row in of_kind(rows, TaskScores) if not row.unscored]
    assert scored == [(row.step, row.task_scores) for row in of_kind(whole, TaskScores)]
    assert [step for step, _ in scored] == [2, 4]
    last = "step_00000004"
    assert state_of(folder / "run", last) == state_of(folder / "plain", last)


def state_of(run: Path, checkpoint: str) -> dict[str, bytes]:
    """Chunk of a tensor → its bytes, of weights and of the optimiser's state."""
    files = sorted((run / "train" / "checkpoints" / checkpoint).glob("rank_*.safetensors"))
    assert files
    return {f"{file.name} {key}": one.tobytes() for file in files for key, one in load_file(file).items()}


@pytest.mark.full
def test_a_task_that_cannot_be_asked_is_refused_before_training(folder: Path) -> None:
    """On every rank, with the reason: an unknown task, data that are not here, written text alone."""
    pytest.importorskip("lm_eval")
    own = {"task_folders": (str(folder / "own"),), "every_steps": 2}
    resolved = of_layout(folder, {"shard": 2})
    for names, told in (
        (("bits", "bitz"), "no score of bitz: neither lm-eval .* Fix: bits"),
        (("capitals",), r"has to write text in each task \(capitals\).* Fix: evaluate.every_steps = 0"),
    ):
        with pytest.raises(RuntimeError, match=told) as caught:
            run_ranks(trained, 2, resolved, Evaluate(tasks=names, **own), timeout_seconds=300)
        assert str(caught.value).count("KieloError") >= 2
    (folder / "own" / "texts.jsonl").unlink()
    with pytest.raises(RuntimeError, match="no score of bits: its data are not on this machine"):
        run_ranks(trained, 2, resolved, Evaluate(tasks=("bits",), **own), timeout_seconds=300)
    assert not (folder / "run" / "train" / METRICS_NAME).exists()


NEVER: Any = SimpleNamespace()
UNASKED = Contender("test", NEVER, byte_tokenizer(), 0, 0, 16, False, torch.device("cpu"))


def own_settings(folder: Path, *names: str) -> Evaluate:
    return Evaluate(tasks=names, task_folders=(str(folder / "own"),), every_steps=2)


def test_a_folder_of_tasks_that_changes_ends_no_training(folder: Path) -> None:
    """The task has no score of another version, nor of a file that is broken, and the reason is said."""
    pytest.importorskip("lm_eval")
    settings = own_settings(folder, "bits")
    before = Harness(settings).hash_of_folders
    (folder / "own" / "texts.jsonl").write_text('{"text": "teine"}\n')
    changed = "evaluate.task_folders: files have changed since the training started"
    assert score_task(UNASKED, settings, "bits", before, lambda: None) == ([], changed)
    (folder / "own" / "capitals.toml").write_text("= 1")
    found, reason = score_task(UNASKED, settings, "bits", before, lambda: None)
    assert found == [] and reason.startswith(f"{folder / 'own' / 'capitals.toml'}: not valid TOML")
    (folder / "own").rename(folder / "away")
    found, reason = score_task(UNASKED, settings, "bits", before, lambda: None)
    assert found == [] and reason.startswith("evaluate.task_folders: no such folder")


@pytest.mark.full
def test_a_stop_ends_the_task_at_work(folder: Path) -> None:
    """Between two batches of questions, so that the others wait in no computation."""
    pytest.importorskip("lm_eval")
    settings, is_stopping = own_settings(folder, "bits"), iter((False, True))
    before_batch = partial(sign_or_stop, folder / "asking", lambda: next(is_stopping))
    before = Harness(settings).hash_of_folders
    found = score_task(UNASKED, settings, "bits", before, before_batch)
    assert found == ([], "the run was asked to stop")


def test_a_task_at_work_is_a_sign_of_life(tmp_path: Path) -> None:
    """Once a minute, and none after the run was asked to stop."""
    sign = tmp_path / "asking"
    sign_or_stop(sign, lambda: False)
    for age, is_new in ((30, False), (90, True)):
        then = time.time() - age
        os.utime(sign, (then, then))
        sign_or_stop(sign, lambda: False)
        assert (sign.stat().st_mtime > then + 10) == is_new
    sign.unlink()
    with pytest.raises(KieloError, match="the run was asked to stop"):
        sign_or_stop(sign, lambda: True)
    assert not sign.exists()


def score(value: float, error: float | None = 0.1) -> TaskScore:
    return TaskScore(task="a", metric="acc,none", value=value, standard_error=error, questions=4, shots=0)


@pytest.mark.parametrize(
    ("found", "reason", "kept", "told"),
    [
        ([score(0.5)], "", [score(0.5)], ""),
        ([], "its file failed", [], "its file failed"),
        ([score(math.inf), score(0.5, math.nan)], "", [score(0.5, None)], "a acc,none is inf"),
    ],
)
def test_a_row_has_finite_scores_and_the_reason_for_others(
    found: list, reason: str, kept: list, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read back as it was written. A task is due every N steps and at the end, or never."""
    monkeypatch.setattr(tasks_in_training, "score_task", lambda *_: (found, reason))
    contender: Any = SimpleNamespace()
    task = TaskInTraining("a", Evaluate(), contender, 3, 10)
    assert [step for step in range(1, 11) if task.due(step)] == [3, 6, 9, 10]
    assert not any(TaskInTraining("a", Evaluate(), contender, 0, 10).due(step) for step in range(1, 11))
    state = State()
    state.advance(5, 1)
    row = task.row(state)
    assert (row.step, row.tokens, row.task_scores, row.unscored) == (1, 5, kept, told)
    (tmp_path / METRICS_NAME).write_text(row.model_dump_json(exclude_unset=True) + "\n")
    assert read_metrics(tmp_path / METRICS_NAME) == [row]
