"""Parts of a run that its layout, precision and objective choose, with stand-ins for what they need."""

from types import SimpleNamespace
from typing import Any

import pytest

from kielo.train import build
from kielo.train.build import build_step, compute_in, positions_of_rank, prepared, restore


@pytest.mark.parametrize(
    ("size", "rank", "columns"),
    [(1, 0, None), (2, 0, [0, 1, 6, 7]), (2, 1, [2, 3, 4, 5]), (4, 1, [1, 6])],
)
def test_a_context_rank_takes_a_part_of_either_half(size: int, rank: int, columns: list | None) -> None:
    """Of eight columns: one from the front and one from the back, so that all have as much to attend to."""
    axis = SimpleNamespace(size=lambda: size, get_local_rank=lambda: rank)
    found = positions_of_rank(8, {"context": axis})
    assert (found if found is None else found.tolist()) == columns


def test_a_masked_batch_has_the_rate_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.4 in the first step to 0.2 in the last of eleven; text of the next token is taken as it is."""
    made: list[Any] = []

    class Masking:
        def __init__(self, *given: Any):
            made.append(given)

        def training_batch(self, batch: str, rate: float) -> tuple[str, float]:
            return batch, rate

    monkeypatch.setattr(build, "Masking", Masking)
    monkeypatch.setattr(build, "masking_vocabulary", lambda folder, kind: (folder, kind))
    train = SimpleNamespace(
        objective="masked_tokens", masking="span", causal_share=0.25, masking_rate=0.4, final_masking_rate=0.2
    )
    identity = SimpleNamespace(train=train, seed=7, total_steps=11)
    hide = prepared(identity, SimpleNamespace(tokenizer_folder="tokenizer"))
    assert made == [(7, "span", ("tokenizer", "span"), 0.25)]
    assert [hide("batch", step) for step in (1, 6, 11)] == [
        ("batch", pytest.approx(rate)) for rate in (0.4, 0.3, 0.2)
    ]
    train.objective = "next_token"
    assert prepared(identity, SimpleNamespace())("batch", 3) == "batch"


@pytest.mark.parametrize("precision", ("fp8", "bf16"))
def test_weights_are_scaled_after_each_step_of_fp8_alone(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """And after a checkpoint is restored."""
    done: list[Any] = []
    hooks: list[Any] = []
    optimiser = SimpleNamespace(algorithm=SimpleNamespace(register_step_post_hook=hooks.append))
    monkeypatch.setattr(build, "Optimiser", lambda parameters, train: optimiser)
    monkeypatch.setattr(build, "forward_backward_of", lambda *given: given)
    monkeypatch.setattr(build, "clip_gradients", lambda *given: given)
    monkeypatch.setattr(build, "scale_weights", lambda model: done.append(("scale", model)))
    train = SimpleNamespace(max_gradient_norm=0.75)
    model = SimpleNamespace(named_parameters=lambda: "parameters")
    step = build_step(model, "mesh", train, "layout", 24, precision, "guard")
    assert step.forward_backward == (model, "mesh", train, 24, "layout", precision)
    assert step.clip() == (model, "mesh", 0.75) and (step.guard, step.optimiser) == ("guard", optimiser)
    for hook in hooks:
        hook("optimiser", (), {})
    assert done == ([("scale", model)] if precision == "fp8" else [])
    done.clear()
    checkpoints = SimpleNamespace(restore=lambda: done.append("restore"))
    restore(SimpleNamespace(checkpoints=checkpoints, current=SimpleNamespace(model="model")))
    assert done == ["restore", ("scale", "model")]


def test_the_old_model_is_gone_before_the_new_one_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are forgotten, and its garbage is collected."""
    done: list[Any] = []

    class Run:
        def __init__(self) -> None:
            self.current, self.mesh, self.log, self.time_limits = "old", "mesh", "log", "limits"
            self.guard = SimpleNamespace(device="cuda")
            self.device = SimpleNamespace(type="cuda")
            self.checkpoints = SimpleNamespace(forget=lambda: done.append("forget"))
            self.garbage = SimpleNamespace(
                begin=lambda: done.append("begin"), end=lambda: done.append("end")
            )  # fmt: skip

    run = Run()

    def refuse(*given: Any) -> None:
        done.append(("build", given[1], hasattr(run, "current")))
        raise ValueError("no memory")

    monkeypatch.setattr(build, "refuse_without_fp8", refuse)
    monkeypatch.setattr(build, "gc", SimpleNamespace(collect=lambda: done.append("collect")))
    monkeypatch.setattr(build.torch.cuda, "empty_cache", lambda: done.append("empty"))
    resolved = SimpleNamespace(
        identity=SimpleNamespace(train=SimpleNamespace(fp8="settings")), placement="placement"
    )  # fmt: skip
    with pytest.raises(ValueError, match="no memory"):
        compute_in(run, resolved, "fp8")
    assert done == ["forget", "end", "collect", "empty", ("build", "settings", False)]
