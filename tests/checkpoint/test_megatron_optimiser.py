"""Adam's state of a Megatron checkpoint is taken over exactly, or refused with the reason."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kielo.artifact.checkpoint_index import read_plain
from kielo.artifact.weights_folder import resolve_weights
from kielo.checkpoint.hugging_face_import import load_first_moments, load_first_weights, read_tables
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.models import families
from kielo.models.families import read_hf_config
from kielo.parallel.materialise import materialise
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import TrainIdentity
from kielo.train.optimiser import Optimiser
from kielo.train.run import train
from tests.checkpoint.megatron_files import UPDATES, Source, moments, write_legacy, write_universal
from tests.checkpoint.test_megatron import made
from tests.train.tiny_run import resolve, write_tokens

LR, DECAY = 1e-2, 0.1
TRAIN = TrainIdentity(optimiser_from_weights=True, weight_decay=DECAY)


def taken_over(reference: str, folder: Path) -> tuple[Any, Optimiser]:
    """Kielo's model and optimiser with the state of the checkpoint."""
    model_config = read_hf_config(resolve_weights(reference))
    identity = argparse.Namespace(
        model=model_config.model_copy(update={"weights": reference}), train=TRAIN, seed=1
    )
    with torch.device("meta"):
        model = families.build_model(model_config)
    materialise(model, torch.device("cpu"), None)
    (folder / "tokenizer").mkdir(exist_ok=True)
    placement = argparse.Namespace(tokenizer_folder=str(folder / "tokenizer"))
    dtypes = load_first_weights(dict(model.named_parameters()), identity, placement)
    # An export has the dtypes of the model's weights, not of the optimiser's.
    assert set(dtypes.values()) == {table.dtype for table in read_tables(resolve_weights(reference)).values()}
    optimiser = Optimiser(model.named_parameters(), TRAIN)
    optimiser.resume(load_first_moments(optimiser.moments(), identity), begun={})
    return model, optimiser


def a_step(model: Any, logits: Any, optimiser: Any, **how: Any) -> Any:
    tokens = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(1))
    found = logits(tokens)[..., :61]
    torch.nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimiser.step(**how)
    with torch.no_grad():
        return logits(tokens)[..., :61]


def expected(model: Any) -> Any:
    """The logits after a plain torch AdamW's next step, from the same weights and moments."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    for parameter in model.parameters():
        of = {name: one.clone() for name, one in moments(parameter.detach()).items()}
        plain.state[parameter] = of | {"step": torch.tensor(float(UPDATES))}
    return a_step(model, lambda tokens: model(tokens).logits, plain)


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        ("llama", lambda at, s: write_legacy(at, s, 2, 2, dtype=torch.bfloat16, adam=True, vocab_size=61)),
        ("llama", lambda at, s: write_universal(at, s, 2)),
        pytest.param(
            "gpt2",
            lambda at, s: write_legacy(at, s, 2, 2, names="core", chunks=2, adam=True, vocab_size=61),
            marks=pytest.mark.full,
        ),
        pytest.param("bloom", lambda at, s: write_universal(at, s, 4), marks=pytest.mark.full),
    ],
)
def test_the_next_step_is_the_next_step_of_plain_adamw(kind, write, tmp_path) -> None:
    """In fp32. Logits differ by the order of sums in two implementations, which a step does not enlarge."""
    model = made(kind, num_key_value_heads=4) if kind == "llama" else made(kind)
    write(tmp_path, Source(model))
    ours, optimiser = taken_over(f"megatron:{tmp_path}", tmp_path)
    before = ours.logits(ours(torch.arange(24)[None])).detach()
    found = a_step(ours, lambda tokens: ours.logits(ours(tokens)), optimiser, lr=LR)
    theirs = expected(model)
    assert ((found - theirs).abs().max() / theirs.abs().max()).item() <= 2e-5
    assert optimiser.updates == UPDATES + 1
    moved = (ours.logits(ours(torch.arange(24)[None])) - before).abs().max() / before.abs().max()
    assert moved > 1e-2  # a step that does nothing would pass


def refused(folder: Path, why: str) -> None:
    with pytest.raises(KieloError, match=f"{why}.*Fix: train.optimiser_from_weights = false"):
        taken_over(f"megatron:{folder}", folder)


def test_an_optimiser_that_is_not_whole_is_refused(tmp_path) -> None:
    write_legacy(tmp_path, Source(made("llama", layers=2)), 1, 1, dtype=torch.bfloat16, adam=True)
    path = tmp_path / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    whole = torch.load(path, weights_only=False)

    def changed(**values: Any) -> None:
        torch.save(whole | values, path)

    def with_arguments(**values: Any) -> None:
        changed(args=argparse.Namespace(**vars(whole["args"]) | values))

    def with_optimiser(**values: Any) -> None:
        changed(optimizer={"optimizer": inner | values, "fp32_from_fp16_params": masters})

    inner, masters = whole["optimizer"]["optimizer"], whole["optimizer"]["fp32_from_fp16_params"]
    with_arguments(use_distributed_optimizer=True)
    refused(tmp_path, "--use-distributed-optimizer divides it among the data-parallel ranks")
    with_arguments(optimizer="sgd")
    refused(tmp_path, "it is of the optimiser sgd")
    changed(optimizer=None)
    refused(tmp_path, "has no optimizer, as with --no-save-optim")
    changed(optimizer={"optimizer": {"state": {}}})
    refused(tmp_path, "has no state and param_groups of Adam")
    first, second = inner["param_groups"]
    with_optimiser(param_groups=[first | {"step": 39}, second])
    refused(tmp_path, r"updates of Adam \(step\) must be one number, and are \['39', '40'\]")
    with_optimiser(param_groups=[first, second | {"params": second["params"][1:]}])
    refused(tmp_path, "4 parameters have 5 fp32 weights")
    masters = None  # as of a training in fp32
    with_optimiser(param_groups=[first, second | {"params": second["params"][1:]}])
    refused(tmp_path, r"the optimiser has \[10, 4\] parameters, and the model 10 matrices and 5 vectors")
    masters = whole["optimizer"]["fp32_from_fp16_params"]
    with_optimiser(state={n: one for n, one in inner["state"].items() if n != 2})
    refused(tmp_path, "the optimiser has no exp_avg of ")
    with_optimiser(param_groups=[first | {"params": first["params"][::-1]}, second])
    refused(tmp_path, "parameter .* of the optimiser is not .*its shape or its rounded values differ")


@pytest.mark.full
def test_a_run_takes_the_state_over_once(tmp_path) -> None:
    """A run that resumes keeps its own moments, and ends bit for bit as an uninterrupted run."""
    write_tokens(tmp_path / "a" / "tokens")
    first = resolve(tmp_path / "a", optimiser_from_weights=True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**families.hf_config(first.identity.model)))
    write_legacy(
        tmp_path / "m", Source(model), 1, 1, rows=70, dtype=torch.bfloat16, adam=True,
        vocab_size=model.config.vocab_size, make_vocab_size_divisible_by=10,
    )  # fmt: skip
    ends = []
    for name, stops in (("a", (2, 4)), ("b", (4,))):
        if name != "a":
            write_tokens(tmp_path / name / "tokens")
        resolved = resolve(tmp_path / name, optimiser_from_weights=True)
        weights = {"weights": f"megatron:{tmp_path / 'm'}"}
        identity = resolved.identity.model_copy(
            update={"model": resolved.identity.model.model_copy(update=weights)}
        )
        for stop in stops:
            train(resolved.model_copy(update={"identity": identity}), max_steps=stop)
        path = tmp_path / name / "train" / "checkpoints" / "step_00000004"
        assert read_plain(path)["optimiser_updates"] == UPDATES + 4
        ends.append(read_tensors(path))
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
