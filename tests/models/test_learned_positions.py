"""GPT-2 and OPT: learned positions in packed sequences, and what of a config.json is refused."""

import json

import pytest
import torch
from transformers import AutoConfig

from kielo.models import families
from kielo.models.blocks.decoder import init_weights
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Model
from tests.models.equality import mean_loss, our_logits, pair, their_gradients
from tests.models.tiny_configs import LENGTH, TINY, VOCABULARY

# The published config.json of facebook/opt-350m, where it differs in its maths.
OPT_350M = {"do_layer_norm_before": False, "word_embed_proj_dim": 16}


def read(folder, variant: str, **change: object) -> Model:
    config = AutoConfig.for_model(**TINY[variant]).to_dict() | change
    (folder / "config.json").write_text(json.dumps(config))
    return families.read_hf_config(folder)


@pytest.mark.parametrize("variant", ["gpt2", "opt"])
def test_a_document_in_a_sequence_is_what_transformers_makes_of_it_alone(variant: str, tmp_path) -> None:
    """Logits of each document, and gradients of all of them, the table of positions' too."""
    ours, theirs = pair(TINY[variant], tmp_path)
    tokens = torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    borders = [[0, 1, 10, LENGTH], [0, LENGTH], [0, 3, 4, LENGTH - 1, LENGTH]]
    documents = torch.stack(
        [(torch.arange(LENGTH)[:, None] >= torch.tensor(row[1:])).sum(1) for row in borders]
    )
    packed = our_logits(ours, tokens, documents.int())
    alone = [
        torch.cat([theirs(input_ids=row[None, a:b]).logits[0] for a, b in zip(of_row, of_row[1:])])
        for row, of_row in zip(tokens, borders)
    ]
    torch.testing.assert_close(packed, torch.stack(alone), atol=2e-5, rtol=0)
    for logits in (packed, torch.stack(alone)):
        mean_loss(logits, tokens.roll(-1, 1)).backward()
    for name, gradient in their_gradients(ours, theirs).items():
        torch.testing.assert_close(ours.get_parameter(name).grad, gradient, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("variant", ["gpt2", "opt"])
def test_positions_of_earlier_runs_go_on_through_documents(variant: str, tmp_path) -> None:
    """A document inside a sequence is read at its place there, and so is all text without documents."""
    model = families.build_model(read(tmp_path, variant, initializer_range=0.1, init_std=0.1))
    init_weights(model, seed=1)
    model.restarts_positions = False
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    documents = (torch.arange(LENGTH) >= 10).int().expand(2, -1)
    with torch.no_grad():
        packed = model(tokens, documents)[:, 10:]
        there = model(tokens[:, 10:], positions_s=torch.arange(10, LENGTH))
        torch.testing.assert_close(packed, there, atol=1e-5, rtol=0)
        assert (packed - model(tokens[:, 10:])).abs().max() > 1e-2


@pytest.mark.parametrize("variant", ["gpt2", "opt"])
def test_a_sequence_longer_than_the_table_is_refused(variant: str, tmp_path) -> None:
    """The 32 positions that there are can be used; one more is an error that names the key."""
    model = families.build_model(read(tmp_path, variant))
    assert model(torch.zeros(1, 32, dtype=torch.long)).isfinite().all()
    with pytest.raises(KieloError, match="33 tokens is longer .*max_position_embeddings = 32"):
        model(torch.zeros(1, 33, dtype=torch.long))


@pytest.mark.parametrize(
    ("variant", "change", "named"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function"),
        ("gpt2", {"n_embd": None, "hidden_size": None}, "n_embd"),
        ("opt", OPT_350M, "word_embed_proj_dim.*do_layer_norm_before"),
        ("opt", {"layerdrop": 0.1}, "layerdrop"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
    ],
)
def test_configs_that_ask_for_other_maths_are_refused(
    variant: str, change: dict, named: str, tmp_path
) -> None:
    """Each by file and key; dropout, which GPT-2 and OPT were trained with, is none of them."""
    assert read(tmp_path, variant, resid_pdrop=0.1, dropout=0.1).hidden_size == 32
    with pytest.raises(KieloError, match=f"config.json.*{named}"):
        read(tmp_path, variant, **change)


@pytest.mark.parametrize(
    ("variant", "change", "named"),
    [
        ("gpt2", {"attention_bias": False}, "attention_bias"),
        ("gpt2", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("gpt2", {"sliding_window": 8}, "sliding_window"),
        ("opt", {"mlp_bias": False}, "mlp_bias"),
        ("opt", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
    ],
)
def test_recipes_that_no_export_could_hold_are_refused(
    variant: str, change: dict, named: str, tmp_path
) -> None:
    """Settings that Hugging Face's class has no key for are refused: they would be lost on the way out."""
    config = read(tmp_path, variant)
    with pytest.raises(KieloError, match=named):
        families.build_model(config.model_copy(update=change))
