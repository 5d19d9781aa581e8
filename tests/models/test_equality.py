"""Every family and variant against transformers' own model: tiny random weights, CPU, fp32."""

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from kielo.checkpoint.tensor_table import join
from kielo.models import families
from kielo.models.parameter_shapes import STYLES, parameters, style_of
from kielo.models.piece import by_stored_name
from tests.models.equality import batch, mean_loss, our_logits, pair, their_gradients, train
from tests.models.tiny_configs import LENGTH, TINY, VOCABULARY

# Sums in another order: a few units in the last of fp32's 24 bits, for numbers of size 1 to 10.
LOGITS, LOSS, GRADIENT = 1e-5, 1e-5, 2e-5
NO_GRADIENT = 1e-6  # a gradient that is truly zero (of a key's bias, say) is nothing but rounding


@pytest.fixture(params=TINY, scope="module")
def models(request, tmp_path_factory):
    return pair(TINY[request.param], tmp_path_factory.mktemp("theirs"))


def test_logits_loss_and_gradients_are_hugging_faces(models) -> None:
    """Logits within 1e-5, the loss within 1e-5 of itself, each gradient within 2e-5 in relative L2."""
    ours, theirs = models
    inputs, labels = batch()
    logits, their_logits = our_logits(ours, inputs), theirs(inputs, use_cache=False).logits
    torch.testing.assert_close(logits, their_logits, atol=LOGITS, rtol=0)
    assert their_logits.std() > 0.1, "numbers that are all alike would be equal too"
    loss, their_loss = mean_loss(logits, labels), mean_loss(their_logits, labels)
    assert abs(loss.item() / their_loss.item() - 1) <= LOSS
    for model, value in ((ours, loss), (theirs, their_loss)):
        model.zero_grad()
        value.backward()
    expected = their_gradients(ours, theirs)
    for name, parameter in ours.named_parameters():
        difference, size = (parameter.grad - expected[name]).norm().item(), expected[name].norm().item()
        assert difference <= GRADIENT * size + NO_GRADIENT, (name, difference, size)


def test_twenty_steps_are_hugging_faces(models) -> None:
    """Twenty AdamW steps from the same weights give the same losses within 1e-5, and they fall."""
    ours, theirs = models
    before = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
    losses = train(ours, lambda inputs: our_logits(ours, inputs))
    their_losses = train(theirs, lambda inputs: theirs(inputs, use_cache=False).logits)
    for model, state in zip(models, before):
        model.load_state_dict(state)
    worst = max(abs(a / b - 1) for a, b in zip(losses, their_losses))
    assert worst <= LOSS, worst
    assert losses != sorted(losses) and min(losses[10:]) < losses[0]


def test_names_cover_every_tensor_and_give_it_back(models, tmp_path) -> None:
    """The pieces of a file's tensor make up all of it: put together again they are the tensor,
    bit for bit.
    """
    ours, theirs = models
    theirs.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    pieces = families.module(ours.config.model_type, "tables").to_hugging_face(ours.config)
    assert list(pieces) == [name for name, _ in ours.named_parameters()]
    grouped = by_stored_name(pieces)
    assert set(grouped) == set(stored)
    values = dict(ours.named_parameters())
    for name, parts in grouped.items():
        back = join(parts, {part: values[part] for part in parts})
        assert torch.equal(back, stored[name]), name


def test_the_tensor_parallel_plan_covers_every_parameter_once(models) -> None:
    """One known style for each module with parameters, and no style that no module of any variant has."""
    ours, _ = models
    plan = families.module(ours.config.model_type, "tables").TENSOR_PARALLEL_PLAN
    assert set(plan.values()) <= set(STYLES)
    styles = Counter()
    for name, module in ours.named_modules():
        owns = any(True for _ in module.parameters(recurse=False))
        style = style_of(plan, name)
        assert not owns or (style is not None and style != "gather"), f"{name} has parameters and no style"
        styles[name] += style is not None
    assert max(styles.values()) == 1


def test_count_is_the_models(models) -> None:
    """The arithmetic count is that of the built model, without padding, and Hugging Face's own."""
    ours, theirs = models
    assert parameters(ours.config) == sum(parameter.numel() for parameter in theirs.parameters())
    assert ours.embed.weight.shape[0] == 128 > VOCABULARY


def test_an_exported_config_is_read_back_alike(models, tmp_path) -> None:
    """The config.json that transformers saves of ours, in its own spelling, is the same model; its class is
    the same too.
    """
    ours, theirs = models
    written = families.hf_config(ours.config, eos_token_id=0)
    config = AutoConfig.for_model(**written)
    assert type(config) is type(theirs.config) and written["architectures"] == [type(theirs).__name__]
    config.save_pretrained(tmp_path)
    assert families.read_hf_config(tmp_path) == ours.config


def test_documents_are_walls(models) -> None:
    """A change in one document changes nothing in the next; without document numbers it does."""
    ours, _ = models
    inputs, _ = batch()
    changed = inputs.clone()
    changed[:, :10] = (changed[:, :10] + 1) % VOCABULARY
    documents = (torch.arange(LENGTH) >= 10).int().expand(3, -1)
    with torch.no_grad():
        one, other = (our_logits(ours, tokens, documents) for tokens in (inputs, changed))
        torch.testing.assert_close(one[:, 10:], other[:, 10:], atol=1e-6, rtol=0)
        assert (our_logits(ours, inputs) - our_logits(ours, changed))[:, 10:].abs().max() > 1e-3


def test_materialised_from_meta_it_is_the_same_model(models) -> None:
    """Built on meta, filled and with its tables reset it is the model built in memory; nothing
    else is saved.
    """
    ours, _ = models
    with torch.device("meta"):
        model = families.build_model(ours.config)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    model.to_empty(device="cpu")
    model.tie()
    model.reset_buffers("cpu")
    model.load_state_dict(ours.state_dict())
    inputs, _ = batch()
    assert torch.equal(our_logits(model, inputs), our_logits(ours, inputs))
    assert set(model.state_dict()) == set(dict(model.named_parameters(remove_duplicate=False)))


def test_first_values_are_those_of_the_rules(models) -> None:
    """Every parameter gets finite values by name and seed alone; padding is zero;
    norms start as the identity.
    """
    ours, _ = models
    initial_value = families.module(ours.config.model_type, "model").initial_value
    for name, parameter in ours.named_parameters():
        value = initial_value(name, parameter.shape, ours.config, 3)
        assert value.shape == parameter.shape and value.dtype == torch.float32 and value.isfinite().all()
        assert torch.equal(value, initial_value(name, parameter.shape, ours.config, 3))
        if value.dim() == 2:
            assert not torch.equal(value, initial_value(name, parameter.shape, ours.config, 4))
            assert 0 < value[:VOCABULARY].std() < 0.5
    for name in (
        "embed.weight",
        *(("head.weight",) if "head.weight" in dict(ours.named_parameters()) else ()),
    ):
        assert not initial_value(name, (128, 32), ours.config, 3)[VOCABULARY:].any()
