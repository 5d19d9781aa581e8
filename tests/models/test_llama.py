"""Llama against transformers' LlamaForCausalLM: tiny random weights, CPU, fp32."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kielo.models.blocks.decoder import init_weights
from kielo.models.families import complete, hf_config, read_hf_config
from kielo.models.llama.model import Llama
from kielo.models.llama.tables import to_hugging_face
from kielo.models.parameter_shapes import parameters, parameters_without_embedding
from kielo.recipe.sections import Model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# 96 tokens in 128 rows, of which the last 32 hold what nobody must see.
TINY = complete(
    Model(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=96,
        max_position_embeddings=64,
    ),
    64,
)
VARIANTS = {
    "plain": TINY,
    "llama3 rope, tied": TINY.model_copy(
        update={"rope_scaling": LLAMA3_ROPE, "rope_theta": 5e5, "tie_word_embeddings": True}
    ),
    "linear rope, biases, wide heads": TINY.model_copy(
        update={
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 16,
            "num_key_value_heads": 4,
        }
    ),
}


def pair(config: Model) -> tuple[Llama, LlamaForCausalLM]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**hf_config(config))).float()
    ours = Llama(config)
    their_weights = dict(theirs.named_parameters())
    names = to_hugging_face(config)
    assert [name for name, _ in ours.named_parameters()] == list(names)
    assert {piece.name for piece in names.values()} == set(their_weights)
    with torch.no_grad():
        for our_name, parameter in ours.named_parameters():
            their_weights[names[our_name].name].normal_(0, 0.1)
            parameter[: names[our_name].rows].copy_(their_weights[names[our_name].name])
    return ours, theirs


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_and_gradients_equal_hugging_face(config: Model) -> None:
    """The same weights give the same logits (≤ 1e-5) and gradients, whatever the RoPE, tying,
    biases and padding.
    """
    ours, theirs = pair(config)
    tokens = torch.randint(0, config.vocab_size, (2, 64))
    hidden = ours(tokens)
    logits = ours.head(hidden)[..., : config.vocab_size]
    their_logits = theirs(tokens).logits
    torch.testing.assert_close(logits, their_logits, atol=1e-5, rtol=0)

    weight = torch.randn_like(logits)
    (logits * weight).sum().backward()
    (their_logits * weight).sum().backward()
    their_weights = dict(theirs.named_parameters())
    names = to_hugging_face(config)
    for name, parameter in ours.named_parameters():
        expected = their_weights[names[name].name].grad
        rows = names[name].rows
        difference = (parameter.grad[:rows] - expected).norm() / expected.norm()
        assert difference < 1e-5, (name, float(difference))
        assert rows is None or not parameter.grad[rows:].any()


def test_documents_are_walls() -> None:
    """A document's hidden states are those that it has alone in the sequence's place."""
    model = Llama(TINY)
    init_weights(model, seed=1)
    tokens = torch.randint(0, TINY.vocab_size, (1, 24))
    documents = torch.tensor([[0] * 10 + [1] * 14])
    changed = tokens.clone()
    changed[0, :10] = 5
    together, other = model(tokens, documents), model(changed, documents)
    torch.testing.assert_close(together[:, 10:], other[:, 10:])
    assert not torch.allclose(together[:, :10], other[:, :10])
    torch.testing.assert_close(model(tokens, torch.zeros_like(documents)), model(tokens), atol=1e-5, rtol=0)


def test_materialised_from_meta_is_the_same_model() -> None:
    """A model built on meta, filled and with its tables reset, is the one built in memory; values depend on
    name and seed.
    """
    config = VARIANTS["llama3 rope, tied"]
    expected = Llama(config)
    init_weights(expected, seed=3)
    with torch.device("meta"):
        model = Llama(config)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    model.to_empty(device="cpu")
    model.tie()
    model.reset_buffers("cpu")
    init_weights(model, seed=3)
    tokens = torch.randint(0, config.vocab_size, (1, 16))
    torch.testing.assert_close(model(tokens), expected(tokens), atol=0, rtol=0)
    assert not list(model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys())


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_count_is_the_models(config: Model) -> None:
    """The arithmetic count equals the numbers in the built model, padding left out."""
    with torch.device("meta"):
        model = Llama(config)
    names = to_hugging_face(config)
    sizes = {name: parameter[: names[name].rows].numel() for name, parameter in model.named_parameters()}
    assert parameters(config) == sum(sizes.values())
    multiplied = sum(size for name, size in sizes.items() if name != "embed.weight")
    tied_head = config.vocab_size * config.hidden_size * bool(config.tie_word_embeddings)
    assert parameters_without_embedding(config) == multiplied + tied_head


def test_round_trip_of_config(tmp_path) -> None:
    """The config that transformers saves of our export's (in its own spelling) is read back as
    the same model.
    """
    for config in VARIANTS.values():
        LlamaConfig(**hf_config(config)).save_pretrained(tmp_path)
        back = read_hf_config(tmp_path)
        assert hf_config(back) == hf_config(config)
