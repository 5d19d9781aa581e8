"""The tiny model that every layout trains: its sizes, text, first values and plain training, by hand."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from kielo.dataset.batches import causal_documents
from kielo.models import families
from kielo.recipe.read import read_recipe
from kielo.verify.layouts_rank import differences
from kielo.verify.layouts_subject import (
    Sizes,
    Subject,
    first_value,
    freeze,
    step_arrays,
    subject,
    train_plainly,
)
from tests.verify.test_family_layouts import recipe_of

torch.set_num_threads(1)


def llama(*sets: str, sizes: Sizes = Sizes(), **switches) -> Subject:  # noqa: B008
    return subject(read_recipe("demo_estonian", list(sets)).recipe, switches, sizes)


def test_sizes_by_hand() -> None:
    """Two heads of 8 for each one of keys; 90 tokens in the rows of four ranks."""
    assert Sizes().of_model() == {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 90, "vocab_multiple": 128,
        "max_position_embeddings": 32, "initializer_range": 0.1, "weights": None,
    }  # fmt: skip
    other = Sizes(length=40, layers=3, key_value_heads=5, intermediate_size=7, vocabulary_rows=256).of_model()
    assert (other["hidden_size"], other["num_attention_heads"], other["max_position_embeddings"]) == (
        80,
        10,
        40,
    )
    assert (other["num_hidden_layers"], other["intermediate_size"], other["vocab_multiple"]) == (3, 7, 256)
    assert Sizes().sequences == 8


def test_settings_of_the_training() -> None:
    """The switches' values, else the recipe's; the others are chosen to show faults."""
    sets = ("train.z_loss=3e-4", "dataset.mask_documents=true", "seed=5")
    of = llama(*sets)
    train = of.train
    assert (train.weight_decay, train.adam_beta1, train.adam_beta2) == (0.1, 0.9, 0.95)
    assert (train.adam_epsilon, train.max_gradient_norm, train.z_loss) == (1e-6, 0.5, 3e-4)
    assert (of.learning_rate, of.seed, of.mask_documents, of.frozen, of.has_causal) == (
        1e-3,
        5,
        True,
        False,
        False,
    )
    switched = llama(*sets, z_loss=1e-3, documents=False, frozen=True, tied=False)
    assert (switched.train.z_loss, switched.mask_documents, switched.frozen) == (1e-3, False, True)
    assert of.model.tie_word_embeddings is True and switched.model.tie_word_embeddings is False


def test_what_is_more_than_a_size_stays(tmp_path) -> None:
    """Windows of 9, layers of each kind in turn, another scale of scores, wide heads, whole keys."""
    gemma = subject(recipe_of("gemma2", tmp_path), {}).model
    assert gemma.sliding_window == 9 and gemma.query_pre_attn_scalar == 12
    assert gemma.layer_types == ("full_attention", "sliding_attention") * 2
    bloom = subject(recipe_of("bloom", tmp_path), {}).model
    assert (bloom.num_attention_heads, bloom.num_key_value_heads) == (8, 8)
    assert (bloom.hidden_size, bloom.intermediate_size) == (64, 256)
    assert subject(recipe_of("llama, linear rope, biases, wide heads", tmp_path), {}).model.head_dim == 16
    assert llama().model.head_dim == 8 and llama().model.sliding_window is None
    hybrid = subject(recipe_of("ltg_bert, interleaved", tmp_path), {})
    assert hybrid.has_causal and hybrid.train.objective == "masked_tokens"


def test_the_text_of_a_step() -> None:
    """Labels are the next tokens; row r counts 3 r fewer of them, and the last none of its first half."""
    of = llama("dataset.mask_documents=true")
    samples, inputs, labels, documents = step_arrays(of, 3)
    assert samples.tolist() == list(range(16, 24))
    assert inputs.shape == labels.shape == documents.shape == (8, 32) and documents.dtype == np.int32
    counted = labels != -100
    assert counted.sum(1).tolist()[:7] == [32, 29, 26, 23, 20, 17, 14]
    assert not counted[7, :16].any() and 0 < counted[7, 16:].sum() <= 11
    assert (labels[:, :-1] == inputs[:, 1:])[counted[:, :-1]].all()
    assert set().union(*(step_arrays(of, step)[1].flatten().tolist() for step in range(12))) == set(range(90))
    steps = np.diff(documents, axis=1)
    assert set(steps.flatten().tolist()) == {0, 1}
    again = step_arrays(of, 3)
    assert all(np.array_equal(one, other) for one, other in zip((samples, inputs, labels, documents), again))
    assert not np.array_equal(inputs, step_arrays(of, 4)[1])
    assert not np.array_equal(inputs, step_arrays(llama("seed=2"), 3)[1])


def test_every_eighth_token_begins_a_document() -> None:
    """Of 10,000 tokens 12 %, which may be the first."""
    of = llama("dataset.mask_documents=true")
    numbers = np.concatenate([step_arrays(of, step)[3] for step in range(1, 41)])
    begins = numbers[:, -1].sum()  # each begin counts one up
    assert 0.105 < begins / numbers.size < 0.135 and (numbers[:, 0] == 1).any()


def test_text_without_documents_and_of_two_objectives(tmp_path) -> None:
    assert step_arrays(llama("dataset.mask_documents=false"), 1)[3] is None
    hybrid = subject(recipe_of("ltg_bert, interleaved", tmp_path), {"documents": True})
    whole = step_arrays(hybrid, 1)[3]
    plain = step_arrays(Subject(hybrid.model, hybrid.seed, True, hybrid.train), 1)[3]
    assert np.array_equal(whole[::3], causal_documents(plain[::3]))
    assert np.array_equal(np.delete(whole, [0, 3, 6], 0), np.delete(plain, [0, 3, 6], 0))
    without = step_arrays(Subject(hybrid.model, hybrid.seed, False, hybrid.train, has_causal=True), 1)[3]
    assert not np.delete(without, [0, 3, 6], 0).any()
    assert np.array_equal(without[::3], causal_documents(np.zeros((3, 32), np.int32)))


def test_first_values_of_vectors_are_spread() -> None:
    """By 0.1 about the family's own; matrices are the family's; a box is that part of the whole."""
    of = llama()
    family = families.module("llama", "model")
    matrix = family.initial_value("embed.weight", (128, 64), of.model, of.seed, None)
    assert torch.equal(first_value(of, "embed.weight", (128, 64)), matrix)
    vector = first_value(of, "norm.weight", (64,))
    assert vector.mean() == pytest.approx(1, abs=0.05) and vector.std() == pytest.approx(0.1, rel=0.3)
    box = (slice(8, 24),)
    assert torch.equal(first_value(of, "norm.weight", (64,), box), vector[8:24])


@pytest.mark.parametrize("is_frozen", [True, False])
def test_layers_in_the_middle_are_frozen(is_frozen: bool) -> None:
    of = llama(frozen=is_frozen)
    with torch.device("meta"):
        model = families.build_model(of.model)
    freeze(of, model)
    still = {name.split(".")[1] for name, p in model.named_parameters() if not p.requires_grad}
    assert still == ({"1", "2"} if is_frozen else set())


def test_a_plain_step_is_adamw_of_the_clipped_gradient() -> None:
    """Of the loss by torch's own cross-entropy: w (1 − lr λ) − lr g / (|g| + ε), λ = 0 for vectors."""
    of = llama("train.z_loss=0.01", sizes=Sizes(layers=2))
    outcome = train_plainly(of, 1)
    model = families.build_model(of.model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(first_value(of, name, weight.shape))
    _, inputs, labels, documents = step_arrays(of, 1)
    given = None if documents is None else torch.from_numpy(documents)
    logits = model.logits(model(torch.from_numpy(inputs), given))
    labels = torch.from_numpy(labels)
    counted = labels != -100
    log_z = torch.logsumexp(logits[counted], -1)
    loss = F.cross_entropy(logits[counted], labels[counted]) + 0.01 * (log_z**2).mean()
    loss.backward()
    assert outcome["losses"].tolist() == pytest.approx([loss.item()], rel=1e-5)
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    assert outcome["norms"].tolist() == pytest.approx([norm], rel=1e-4) and norm > 0.5
    for name, weight in model.named_parameters():
        assert torch.allclose(outcome[f"gradient/{name}"], weight.grad, rtol=1e-3, atol=1e-6)
        clipped = weight.grad * 0.5 / (norm + 1e-6)
        decay = 1e-3 * 0.1 if weight.ndim > 1 else 0.0
        stepped = weight.detach() * (1 - decay) - 1e-3 * clipped / (clipped.abs() + 1e-6)
        is_large = clipped.abs() > 1e-5  # of smaller ones rounding decides
        assert torch.allclose(outcome[f"weight/{name}"][is_large], stepped[is_large], atol=2e-6), name


def test_gradients_are_those_of_the_first_step() -> None:
    of = llama(sizes=Sizes(layers=2))
    once, twice = train_plainly(of, 1), train_plainly(of, 2)
    assert once.keys() == twice.keys() and twice["losses"].shape == twice["norms"].shape == (2,)
    assert all(torch.equal(once[name], twice[name]) for name in once if name.startswith("gradient/"))
    assert not torch.equal(once["weight/norm.weight"], twice["weight/norm.weight"])


def test_differences_by_hand() -> None:
    """The largest of each kind, with its step or tensor; sizes that differ are infinitely far apart."""
    theirs = {
        "losses": torch.tensor([2.0, 4.0, 0.0]), "norms": torch.tensor([1.0, 10.0]),
        "gradient/a": torch.tensor([3.0, 4.0]), "gradient/b": torch.zeros(4),
        "weight/a": torch.tensor([3.0, 4.0]), "weight/b": torch.zeros(4), "weight/elsewhere": torch.ones(1),
    }  # fmt: skip
    ours = {
        "losses": torch.tensor([2.5, 3.0, 0.0]), "norms": torch.tensor([1.25, 9.0]),
        "gradient/a": torch.tensor([3.0, 4.5]), "gradient/b": torch.tensor([3e-4, 0, 4e-4, 0]),
        "weight/a": torch.tensor([3.0, 6.5]), "weight/b": torch.tensor([3e-4, 0, 4e-4, 0]),
    }  # fmt: skip
    found = differences(ours, theirs)
    assert found["loss"] == {"value": 0.25, "at": "step 1"} and found["norm"] == {
        "value": 0.25,
        "at": "step 1",
    }
    # Of zeros the floors count: a root mean square of 1e-4 for gradients and of 1e-3 for weights.
    assert found["gradient"] == {"value": pytest.approx(5e-4 / 2e-4), "at": "b"}
    assert found["weight"] == {"value": 0.5, "at": "a"}
    weights = differences(ours | {"weight/a": theirs["weight/a"]}, theirs)["weight"]
    assert weights == {"value": pytest.approx(5e-4 / 2e-3), "at": "b"}
    later = differences(ours | {"losses": torch.tensor([2.0, 4.0, 3e-12])}, theirs)["loss"]
    assert later == {"value": pytest.approx(3), "at": "step 3"}
    assert differences(ours | {"weight/a": torch.ones(3)}, theirs)["weight"] == {"value": math.inf, "at": "a"}
    broken = differences(ours | {"gradient/a": torch.tensor([math.nan, 1.0])}, theirs)["gradient"]
    assert broken == {"value": math.inf, "at": "a"}
    frozen = {name: value for name, value in ours.items() if name in ("losses", "norms")}
    assert differences(frozen, theirs)["weight"] == {"value": 0.0, "at": "none: its stages are frozen"}
    with pytest.raises(ValueError, match=r"other tensors than in the reference: \['weight/c'\]"):
        differences(ours | {"weight/c": torch.ones(1)}, theirs)
