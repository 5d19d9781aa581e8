"""A vocabulary padded to a round number of rows: the same training, number by number, as without."""

import pytest
import torch

from kielo.models.families import complete
from kielo.models.llama.model import Llama, initial_value
from kielo.parallel.mesh import build_mesh
from kielo.ranks.world import start_world
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Model
from kielo.train.feed import MicroBatch
from kielo.train.forward_backward import NextToken
from kielo.verify.layouts_cases import Case
from kielo.verify.layouts_rank import differences, train_laid_out
from kielo.verify.layouts_subject import Outcome, Subject, subject, train_plainly
from tests.started_ranks import run_ranks

STEPS = 4
VOCABULARY_WEIGHTS = ("embed.weight", "head.weight")


def config(tied: bool, vocab_multiple: int) -> Model:
    return complete(Model(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4, vocab_size=67, vocab_multiple=vocab_multiple, max_position_embeddings=32,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    ), 32)  # fmt: skip


def loss_and_gradients(
    model_config: Model, dtype: torch.dtype, z_loss: float, is_head_frozen: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = Llama(model_config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, model_config, seed=1))
    model.to(dtype)
    model.head.weight.requires_grad_(not is_head_frozen)
    tokens = torch.randint(0, 67, (3, 21), generator=torch.Generator().manual_seed(2))
    labels = tokens[:, 1:].clone()
    labels[0, :9] = -100
    loss = NextToken(z_loss, 13)(model, MicroBatch(tokens[:, :-1], labels, None), torch.tensor(51.0))
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("tied", "dtype", "z_loss", "is_head_frozen"),
    [
        (True, torch.float32, 0.0, False),
        (False, torch.float32, 1e-2, False),
        (False, torch.float32, 1e-2, True),
        (True, torch.bfloat16, 1e-2, False),
        (False, torch.bfloat16, 0.0, False),
    ],
    ids=str,
)
def test_a_step_is_that_of_the_unpadded_model(
    tied: bool, dtype: torch.dtype, z_loss: float, is_head_frozen: bool
) -> None:
    """67 tokens in 128 rows and in 67: the same loss and gradients from the same seed;
    padding's gradient is 0.
    """
    torch.set_num_threads(1)
    loss, gradients = loss_and_gradients(config(tied, 64), dtype, z_loss, is_head_frozen)
    expected_loss, expected = loss_and_gradients(config(tied, 1), dtype, z_loss, is_head_frozen)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-7, atol=0)
    assert gradients.keys() == expected.keys() and ("head.weight" in gradients) == (
        not tied and not is_head_frozen
    )
    for name, gradient in gradients.items():
        if name in VOCABULARY_WEIGHTS:
            assert len(gradient) == 128 and not gradient[67:].any()
            gradient = gradient[:67]
        difference = (gradient.float() - expected[name].float()).norm() / expected[name].float().norm()
        assert difference < (1e-6 if dtype == torch.float32 else 2e-2), (name, difference)


def padded_subject(tied: bool) -> Subject:
    """A subject of `kielo verify layouts`: 90 tokens in 128 rows,
    so that the last of four tensor ranks has only padding.
    """
    return subject(read_recipe("demo_estonian").recipe, {"tied": tied, "z_loss": 1e-3})


def without_padding(outcome: Outcome, vocab_size: int) -> Outcome:
    """The outcome's tokens' rows; what padding has in it must be 0, after steps with weight decay too."""
    cut = dict(outcome)
    for kind in ("gradient", "weight"):
        for name in VOCABULARY_WEIGHTS:
            if (rows := outcome.get(f"{kind}/{name}")) is not None:
                assert len(rows) == 128 and not rows[vocab_size:].any(), (kind, name)
                cut[f"{kind}/{name}"] = rows[:vocab_size]
    return cut


def laid_out_steps(layout: dict, tied: bool) -> Outcome:
    world = start_world(60, "cpu")
    case = Case(layout, switches={"tied": tied, "z_loss": 1e-3})
    return train_laid_out(padded_subject(tied), case, STEPS, world, build_mesh(world, case.section))


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        ({}, True),
        ({"tensor": 2}, False),
        pytest.param({"tensor": 4}, True, marks=pytest.mark.full),
        pytest.param({"tensor": 4}, False, marks=pytest.mark.full),
        pytest.param({"shard": 2, "tensor": 2}, True, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_more_steps_are_those_of_the_unpadded_model(layout: dict, tied: bool) -> None:
    """Losses, norms, gradients and weights of four steps, on one rank and with padding anywhere on the tensor
    axis, against a plain process whose model has no row of padding; padding is still zero at the end.
    """
    torch.set_num_threads(1)
    of = padded_subject(tied)
    bare = Subject(**(vars(of) | {"model": of.model.model_copy(update={"vocab_multiple": 1})}))
    expected = train_plainly(bare, STEPS)
    num_ranks = layout.get("shard", 1) * layout.get("tensor", 1)
    for outcome in run_ranks(laid_out_steps, num_ranks, layout, tied):
        found = differences(without_padding(outcome, of.model.vocab_size), expected)
        assert all(entry["value"] < 1e-5 for entry in found.values()), found
