"""Parts of the parity check by hand: batches for transformers, traces, settings, and what is printed."""

import io
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from kielo.artifact.verify_results import FirstDifference, GradientNorms, Losses, Parity, Settings
from kielo.train.feed import MicroBatch
from kielo.verify.certificate import in_words, print_parity, verdict
from kielo.verify.hugging_face_side import hugging_face_batch
from kielo.verify.trace import (
    Trace,
    base_of,
    differing,
    first_difference,
    largest_difference,
    optimiser_settings,
    relative_difference,
    rope_settings,
    trace_forward,
)

LEAST = torch.finfo(torch.float32).min


def micro_batch(documents: list[list[int]] | None) -> MicroBatch:
    """Makes two sequences of five tokens 0 to 9 with labels 10 to 19."""
    tokens = torch.arange(10).view(2, 5)
    numbers = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    return MicroBatch(tokens, tokens + 10, numbers)


class Positioned:
    """A model whose forward takes positions."""

    def __init__(self, **config: Any):
        self.config = SimpleNamespace(**config)

    def forward(self, input_ids: Any, position_ids: Any = None) -> None: ...


class Plain(Positioned):
    def forward(self, input_ids: Any) -> None: ...


DOCUMENTS = [[0, 0, 1, 1, 1], [0, 0, 0, 0, 2]]


def mask(sees: list[str]) -> torch.Tensor:
    """Makes the mask in which the letter x is seen, of one sequence."""
    return torch.tensor([[0.0 if letter == "x" else LEAST for letter in row] for row in sees])


def test_a_batch_without_documents_has_no_mask() -> None:
    batch = hugging_face_batch(micro_batch(None), Positioned(), takes_documents_alone=True)
    assert batch.arguments.keys() == {"input_ids", "position_ids"} and batch.sequences == 2
    assert batch.arguments["position_ids"].tolist() == [[0, 1, 2, 3, 4]] and batch.is_token is None
    assert torch.equal(batch.labels, batch.arguments["input_ids"] + 10)
    assert batch.as_given(batch.labels) is batch.labels
    assert hugging_face_batch(micro_batch(None), Plain(), False).arguments.keys() == {"input_ids"}


def test_a_mask_hides_later_tokens_and_other_documents() -> None:
    arguments = hugging_face_batch(micro_batch(DOCUMENTS), Plain(), False).arguments
    found = arguments["attention_mask"]
    assert found.shape == (2, 1, 5, 5)
    assert torch.equal(found[0, 0], mask(["x....", "xx...", "..x..", "..xx.", "..xxx"]))
    assert torch.equal(found[1, 0], mask(["x....", "xx...", "xxx..", "xxxx.", "....x"]))


def test_windowed_layers_have_a_mask_of_their_own() -> None:
    """A window of two sees a token and the one before; one mask where all layers are alike."""
    narrow = mask(["x....", "xx...", ".xx..", "..xx.", "....x"])
    whole = hugging_face_batch(micro_batch(DOCUMENTS), Plain(sliding_window=2), False).arguments
    assert torch.equal(whole["attention_mask"][1, 0], narrow)
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    both = hugging_face_batch(
        micro_batch(DOCUMENTS), Plain(sliding_window=2, layer_types=kinds), False
    ).arguments["attention_mask"]
    assert both.keys() == set(kinds) and torch.equal(both["sliding_attention"][1, 0], narrow)
    assert torch.equal(both["full_attention"][1, 0], mask(["x....", "xx...", "xxx..", "xxxx.", "....x"]))
    full = Plain(sliding_window=2, layer_types=["full_attention"])
    alone = hugging_face_batch(micro_batch(DOCUMENTS), full, False).arguments["attention_mask"]
    assert torch.equal(alone, both["full_attention"])


def test_with_alibi_each_document_is_a_row() -> None:
    """Padded at its end with its first token, whose labels do not count; outputs go back to their places."""
    batch = hugging_face_batch(micro_batch(DOCUMENTS), Positioned(), takes_documents_alone=True)
    assert batch.arguments["input_ids"].tolist() == [[0, 1, 0, 0], [2, 3, 4, 2], [5, 6, 7, 8], [9, 9, 9, 9]]
    assert batch.labels.tolist() == [
        [10, 11, -100, -100], [12, 13, 14, -100], [15, 16, 17, 18], [19, -100, -100, -100],
    ]  # fmt: skip
    assert batch.arguments.keys() == {"input_ids", "position_ids"}
    assert batch.arguments["position_ids"].tolist() == [[0, 1, 2, 3]] * 4
    without = hugging_face_batch(micro_batch(DOCUMENTS), Plain(), takes_documents_alone=True)
    assert without.arguments.keys() == {"input_ids"}
    assert batch.as_given(batch.arguments["input_ids"]).tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    states = batch.arguments["input_ids"][..., None] * torch.tensor([1, 10, 100])
    assert batch.as_given(states).shape == (2, 5, 3) and batch.as_given(states)[1, 4].tolist() == [9, 90, 900]


class Block(nn.Module):
    """embed → norm → (q, k) → up, with a number that is added between q and up."""

    def __init__(self, between: float = 0.0, scale: float = 1.0):
        super().__init__()
        self.embed, self.norm, self.q, self.up = (nn.Identity() for _ in range(4))
        self.between, self.scale = between, scale

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens)) * self.scale
        return self.up(self.q(x) + self.between)


NAMES = {
    "embed": "embed",
    "norm": "layers.0.norm",
    "q": "layers.0.attention.q",
    "up": "layers.0.attention.up",
}


def traced(block: Block, tokens: torch.Tensor) -> Trace:
    modules = {ours: block.get_submodule(name) for name, ours in NAMES.items()}
    trace = trace_forward(modules, lambda: block(tokens))
    assert not any(module._forward_hooks for module in modules.values())
    return trace


def test_a_trace_has_each_module_s_input_and_output() -> None:
    tokens = torch.tensor([3.0, 4.0], requires_grad=True)
    trace = traced(Block(0.5, 2.0), tokens)
    assert list(trace.passed) == list(NAMES.values())
    given, out = trace.passed["layers.0.attention.up"]
    assert given.tolist() == out.tolist() == trace.logits.tolist() == [6.5, 8.5]
    assert not trace.logits.requires_grad and not given.requires_grad and not out.requires_grad


def test_the_first_difference_is_named_by_its_parent() -> None:
    """Between modules by what was before; as much as the limit is none."""
    tokens = torch.tensor([3.0, 4.0])
    right = traced(Block(), tokens)
    assert first_difference(right, traced(Block(), tokens), 0.0) is None
    # between q and up: (1, 1) is added to (3, 4), whose norm is 5
    found = first_difference(right, traced(Block(between=-1.0), tokens), 0.1)
    assert (found.layer, found.where) == ("layers.0.attention", "after q and before up")
    assert found.relative_difference == pytest.approx(math.sqrt(2) / math.sqrt(4 + 9))
    found = first_difference(right, traced(Block(scale=0.5), tokens), 0.99)
    assert (found.layer, found.where) == ("layers.0.attention", "before q")
    assert found.relative_difference == pytest.approx(1)
    assert first_difference(right, traced(Block(scale=0.5), tokens), 1.0) is None
    wrong = traced(Block(), tokens)
    wrong.passed["layers.0.norm"] = (tokens, 2 * tokens)
    found = first_difference(right, wrong, 0.49)
    assert (found.layer, found.relative_difference) == ("layers.0.norm", 0.5)
    assert found.where == "in it: its input is equal, its output is not"
    assert first_difference(right, wrong, 0.5) is None
    wrong.passed["embed"] = (2 * tokens, tokens)
    found = first_difference(right, wrong, 0.1)
    assert (found.layer, found.where) == ("embed", "before embed")


def test_other_token_ids_are_named() -> None:
    """They are compared exactly, and only the embedding's input are such."""
    ids, out = torch.tensor([3, 4]), torch.ones(2)
    right = Trace({"embed": (ids, out), "x": (ids, out)}, out)
    other = Trace({"embed": (ids, out), "x": (ids + 1, out)}, out)
    assert first_difference(right, other, 0.1) is None
    wrong = Trace({"embed": (ids + 1, out), "x": (ids, out)}, out)
    found = first_difference(right, wrong, 0.1)
    assert (found.layer, found.where, found.relative_difference) == (
        "embed",
        "the token ids themselves",
        math.inf,
    )


def test_relative_differences() -> None:
    ours, theirs = torch.tensor([[3.0, 6.0]]), torch.tensor([3.0, 4.0])
    assert relative_difference(ours, theirs) == pytest.approx(0.4)
    assert relative_difference(ours, theirs, floor=4.0) == pytest.approx(0.4)
    assert relative_difference(ours, theirs, floor=8.0) == pytest.approx(0.25)
    assert relative_difference(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_difference(torch.ones(3), torch.ones(2)) == math.inf
    assert relative_difference(torch.tensor([math.nan]), torch.ones(1)) == math.inf
    heads = torch.arange(24.0).view(1, 2, 3, 4)
    assert relative_difference(heads, heads.transpose(1, 2).contiguous()) == 0
    assert relative_difference(heads, heads.flip(2).transpose(1, 2)) > 0.1
    ours, theirs = {"a": ours, "b": theirs}, {"a": theirs, "b": theirs * 2}
    assert largest_difference(ours, theirs) == ("b", pytest.approx(0.5))
    assert largest_difference(ours, theirs, floor=20.0) == ("b", pytest.approx(0.25))


def test_settings_of_an_optimiser() -> None:
    """By group, with what no group has, and the types of the moments that are there."""
    weights = {name: nn.Parameter(torch.ones(2)) for name in "abc"}
    groups = [
        {"params": [weights["a"]], "weight_decay": 0.1, "eps": 1e-6},
        {"params": [weights["b"]], "weight_decay": 0.0, "betas": (0.5, 0.75)},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    expected = {
        "optimiser": "AdamW", "Adam betas": [(0.5, 0.75), (0.9, 0.95)], "Adam epsilon": [1e-8, 1e-6],
        "weight decay": {"a": 0.1, "b": 0.0}, "parameters not trained": ["c"],
        "precision of optimiser state": [],
    }  # fmt: skip
    assert optimiser_settings(adamw, weights) == expected
    weights["a"].grad = torch.ones(2)
    adamw.step()
    assert optimiser_settings(adamw, weights) == expected | {"precision of optimiser state": ["float32"]}
    other = torch.optim.AdamW([weights["c"]], amsgrad=True)
    assert optimiser_settings(other, weights)["optimiser"] == "AdamW, amsgrad"


def test_settings_of_other_kinds_differ() -> None:
    """A table, a list and a number are never the same; of tables each entry counts."""
    ours = {"a": {"x": 1}, "b": [1], "c": {"x": 1, "y": 2}, "d": 1.0}
    assert differing(ours, {"a": 3, "b": 1, "c": {"x": 1, "y": 3}, "d": "1"}) == ["a", "b", "c", "d"]
    assert differing(ours, ours | {"a": [1]}) == ["a"] and differing(ours, ours) == []


def test_settings_of_rope_tables() -> None:
    """Of full layers and of windowed ones, from the second position's angles."""

    def table(base: float) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.outer(torch.arange(2.0), base ** -torch.tensor([0.0, 0.5]))
        return angles.cos(), angles.sin()

    found = rope_settings([table(100.0), table(400.0)])
    assert list(found) == [
        "RoPE base", "RoPE inverse frequencies", "RoPE base of windowed layers",
        "RoPE inverse frequencies of windowed layers",
    ]  # fmt: skip
    assert found["RoPE base"] == pytest.approx(100) and found[
        "RoPE base of windowed layers"
    ] == pytest.approx(400)
    assert found["RoPE inverse frequencies"] == pytest.approx([1, 0.1]) and rope_settings([]) == {}
    assert base_of([8.0, 2.0, 1.0]) == 64.0


def certificate(passed: bool = True, rounding: list[float] | None = None, **changes: Any) -> Parity:
    settings = {"lr": 0.5, "weight decay": {"a": 0.1, "b": 0.0, "c": 0.1}, "steps": [1, 2, 3, 4, 5], "no": ()}
    usual = {
        "passed": passed, "max_relative_loss_difference": 0.02, "logits_max_difference": 0.003,
        "gradient_max_relative_difference": 0.0004, "weights": "", "steps": 2, "sequences_per_step": 4,
        "tolerance": 1e-2, "sequence_length": 8, "hugging_face_overrides": {},
        "settings": Settings(
            ours=settings, theirs=settings | ({} if passed else {"lr": 0.25}),
            differing=[] if passed else ["lr"],
        ),
        "losses": Losses(
            ours=[4.0, 3.0], theirs=[4.0, 2.94], relative_differences=[0.01, 0.02],
            rounding_differences=rounding,
        ),
        "gradient_norms": GradientNorms(ours=[], theirs=[]), "first_difference": None,
    }  # fmt: skip
    return Parity(**(usual | changes))


FIGURES = (
    "largest relative loss difference 2.0e-02 over 2 steps (tolerance 1e-02); logits differ by at most "
    "3.0e-03, gradients by 4.0e-04"
)


def test_the_verdict_in_words() -> None:
    """All that is known of the first difference, a line for each."""
    assert verdict(certificate()) == f"Parity with Hugging Face holds: {FIGURES}."
    said = f"NO parity with Hugging Face: {FIGURES}."
    assert verdict(certificate(False, first_difference=FirstDifference())) == said
    first = FirstDifference(
        layer="layers.0", where="before q", relative_difference=0.5, settings=["lr"], weight="w",
        gradient="g", update="u", step=2,
    )  # fmt: skip
    assert verdict(certificate(False, first_difference=first)).split("\n") == [
        said, "Setting: lr: 0.5 here, 0.25 there.",
        "First layer that differs: layers.0 (before q; relative 5.0e-01).",
        "Starting weight that differs: w.",
        "Gradient that differs most: g.", "Weight that differs most after step 1: u.",
        "Losses part at step 2.",
    ]  # fmt: skip


def printed(of: Parity, is_coloured: bool = False) -> str:
    file = io.StringIO()
    print_parity(
        of,
        Console(
            file=file, width=100, force_terminal=is_coloured, color_system="standard" if is_coloured else None
        ),
    )
    return file.getvalue()


def cells(text: str) -> list[list[str]]:
    """Returns the rows of printed tables."""
    return [
        [cell.strip() for cell in line.strip("│┃ ").replace("┃", "│").split("│")]
        for line in text.split("\n")
        if "│" in line or "┃" in line
    ]


def test_what_is_printed_of_parity() -> None:
    """Settings side by side, the losses of each step from 1, and the verdict."""
    first = FirstDifference(settings=["lr"])
    rows = cells(printed(certificate(False, first_difference=first)))
    assert rows == [
        ["Kielo", "Hugging Face"], ["≠ lr", "0.5", "0.25"],
        ["weight decay", "0: 1 tensors; 0.1: 2 tensors", "0: 1 tensors; 0.1: 2 tensors"],
        ["steps", "1, 2 … 5 (5)", "1, 2 … 5 (5)"], ["no", "none", "none"],
        ["step", "Kielo", "Hugging Face", "relative difference"],
        ["1", "4.0000000", "4.0000000", "1.0e-02"], ["2", "3.0000000", "2.9400000", "2.0e-02"],
    ]  # fmt: skip
    rows = cells(printed(certificate(rounding=[0.0001, 0.003])))
    assert rows[-3:] == [
        ["step", "Kielo", "Hugging Face", "relative difference", "by rounding alone, so far"],
        ["1", "4.0000000", "4.0000000", "1.0e-02", "1.0e-04"],
        ["2", "3.0000000", "2.9400000", "2.0e-02", "3.0e-03"],
    ]
    titles = printed(certificate())
    assert titles.startswith("Effective settings") and "\nLoss of each step (nats per token)" in titles
    losses = titles.partition("relative difference")[2].split("\n")
    assert losses[2].rstrip("│ ").endswith("1.0e-02") and "│    1 │ 4.0000000 │    4.0000000 │" in losses[2]


def test_what_is_wrong_is_red() -> None:
    """A setting that differs, a step beyond its limit, and the verdict; else the verdict is green."""
    red, green = "\x1b[1;31m", "\x1b[32m"

    def lines(of: Parity, colour: str) -> list[str]:
        found = [line for line in printed(of, True).split("\n") if colour in line]
        return [line.replace(colour, "").replace("\x1b[0m", "").strip("│ ").split(" ")[0] for line in found]

    assert lines(certificate(False, first_difference=FirstDifference()), red)[:3] == ["≠", "2", "NO"]
    assert lines(certificate(), green)[0] == "Parity" and lines(certificate(), red) == ["2"]
    assert lines(certificate(rounding=[0.0001, 0.003]), red) == []
    nan = Losses(ours=[math.nan], theirs=[1.0], relative_differences=[math.nan])
    assert lines(certificate(losses=nan), red) == ["1"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1, 2, 3, 4], "1, 2, 3, 4"), ((0.123456789, "x"), "0.12346, x"), ([], "none"), (True, "True"),
        ([[1, 2], 2, 3, 4, [5]], "1, 2, 2 … 5 (5)"), (None, "None"),
        ({"a": 0.2, "b": 0.1, "c": 0.2, "d": 0.2}, "0.1: 1 tensors; 0.2: 3 tensors"),
    ],
)  # fmt: skip
def test_a_setting_in_words(value: Any, said: str) -> None:
    assert in_words(value) == said
