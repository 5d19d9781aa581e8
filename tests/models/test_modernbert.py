"""ModernBERT beyond what every family is tested for: windows, masked-token loss, sizes, files and FLOPs."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM, pipeline

from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.hugging_face_export import export
from kielo.dataset.batches import causal_documents
from kielo.models import families
from kielo.models.blocks.decoder import init_weights
from kielo.models.parameter_shapes import parameter_shapes, parameters, token_flops
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Model
from kielo.tokenizer.train import ENCODER_TOKENS, save, train_on
from tests.models.equality import our_logits, pair
from tests.models.tiny_configs import LENGTH, TINY, VOCABULARY

# answerdotai/ModernBERT-base as transformers 4 saved it, shortened, and what its larger form changes.
BASE = {
    "architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0,
    "classifier_activation": "gelu", "classifier_bias": False, "classifier_pooling": "mean",
    "decoder_bias": True, "deterministic_flash_attn": False, "embedding_dropout": 0.0,
    "global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "hidden_activation": "gelu",
    "hidden_size": 768, "initializer_cutoff_factor": 2.0, "initializer_range": 0.02,
    "intermediate_size": 1152, "layer_norm_eps": 1e-05, "local_attention": 128, "local_rope_theta": 10_000.0,
    "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "model_type": "modernbert",
    "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 12, "num_hidden_layers": 22,
    "pad_token_id": 50_283, "position_embedding_type": "absolute", "vocab_size": 50_368,
}  # fmt: skip
LARGE = {
    "hidden_size": 1024, "intermediate_size": 2624, "num_hidden_layers": 28, "num_attention_heads": 16,
}  # fmt: skip


def read(folder, config: dict[str, Any]) -> Model:
    (folder / "config.json").write_text(json.dumps(config))
    return families.read_hf_config(folder)


@pytest.mark.parametrize("change", [{}, LARGE], ids=["base", "large"])
def test_published_sizes_are_transformers_own(tmp_path, change: dict) -> None:
    """Counted, by shapes and in transformers' model of the same file; local layers have a window of 64 to
    each side, and every third layer from the first on sees all.
    """
    config = read(tmp_path, BASE | change)
    with torch.device("meta"):
        theirs = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(tmp_path))
    expected = sum(parameter.numel() for parameter in theirs.parameters())
    assert parameters(config) == expected == (395_881_664 if change else 149_655_232)
    shapes = parameter_shapes(config)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == expected
    assert (config.sliding_window, config.rope_theta, config.rope_local_base_freq) == (65, 160_000, 10_000)
    assert config.layer_types[:4] == ("full_attention", *["sliding_attention"] * 2, "full_attention")


@pytest.mark.parametrize("sliding_window", [1, 5, 64, 900])
def test_flops_count_the_pairs_that_see_each_other(tmp_path, sliding_window: int) -> None:
    """12 × 768 FLOPs for each pair of query and key, counted one by one over a sequence of 64, in local
    layers and full ones; and 6 a parameter that multiplies.
    """
    length = 64
    config = read(tmp_path, BASE).model_copy(update={"sliding_window": sliding_window})
    near = sum(abs(a - b) < sliding_window for a in range(length) for b in range(length))
    full = config.layer_types.count("full_attention")
    pairs = full * length**2 + (22 - full) * near
    multiplied = parameters(config) - 768  # the norm of the embedding
    found = token_flops(config, length) - 6 * multiplied
    assert abs(found - 12 * 768 * pairs / length) <= 22  # each layer's are rounded down


def test_the_recipe_has_usual_windows() -> None:
    """Without keys of its own: a window of 65 tokens, and all of the text in every third layer."""
    model = families.complete(Model(model_type="modernbert", num_hidden_layers=5, vocab_size=64), 128)
    families.check(model)
    kinds = [layer.kind for layer in families.build_model(model).layers.values()]
    assert [kind == "full_attention" for kind in kinds] == [True, False, False, True, False]
    assert model.sliding_window == 65 and model.hidden_act == "gelu" and not model.attention_bias


@pytest.mark.parametrize("variant", [name for name in TINY if name.startswith("modernbert")])
@pytest.mark.parametrize("has_causal", [False, True], ids=["both sides", "one causal"])
def test_packed_documents_are_apart_as_in_transformers(tmp_path, variant: str, has_causal: bool) -> None:
    """Two documents packed in one sequence give the logits that transformers gives with their mask, within
    1e-5: windows and documents together, and with a causal sequence beside another one.
    """
    ours, theirs = pair(TINY[variant], tmp_path)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    documents = (torch.arange(LENGTH) >= 9).int().expand(2, -1)
    seen = documents[:, None, :, None] == documents[:, None, None, :]
    places = torch.arange(LENGTH)
    distance = places[:, None] - places
    near = distance.abs() <= theirs.config.sliding_window
    if has_causal:
        documents = torch.stack((causal_documents(documents[0]), documents[1]))
        seen = seen & ((documents >= 0)[:, None, :, None] | (distance >= 0))
    masks = {
        "full_attention": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf),
        "sliding_attention": torch.zeros(seen.shape).masked_fill(~(seen & near), -torch.inf),
    }
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=masks).logits
        torch.testing.assert_close(our_logits(ours, tokens, documents), expected, atol=1e-5, rtol=0)
        assert (our_logits(ours, tokens) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"norm_bias": True}, "norm_bias"),
        ({"decoder_bias": False}, "decoder_bias"),
        ({"classifier_bias": True}, "classifier_bias"),
        ({"mlp_dropout": 0.1}, "mlp_dropout"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        (
            {"rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }},
            "rope_scaling of type linear",
        ),
        ({"num_attention_heads": 7}, "hidden_size 768"),
    ],
    ids=str,
)  # fmt: skip
def test_refusals_name_file_and_key(tmp_path, change: dict, named: str) -> None:
    with pytest.raises(KieloError, match=named) as error:
        read(tmp_path, BASE | change)
    assert "config.json" in str(error.value)


def test_an_irregular_order_of_layers_is_written_as_a_list_alone(tmp_path) -> None:
    """transformers 4's number of layers is there only where it means the same."""
    regular = read(tmp_path, BASE)
    assert families.hf_config(regular)["global_attn_every_n_layers"] == 3
    kinds = ("sliding_attention", *regular.layer_types[1:])
    written = families.hf_config(regular.model_copy(update={"layer_types": kinds}))
    assert "global_attn_every_n_layers" not in written and written["layer_types"] == list(kinds)
    assert read(tmp_path, written).layer_types == kinds


def test_an_export_fills_masks_in_transformers(tmp_path) -> None:
    """A fill-mask pipeline of the exported folder, with Kielo's tokenizer of encoders, gives the tokens that
    our model gives at the mask, with its probabilities within 1e-6.
    """
    recipe = read_recipe("demo_estonian").recipe
    sections = {
        "tokenizer": recipe.tokenizer.model_copy(update={"vocab_size": 270}),
        "train": recipe.train.model_copy(update={"objective": "masked_tokens"}),
    }
    words = train_on(["tere tere maailm, tere"] * 9, recipe.model_copy(update=sections))
    save(words, tmp_path / "tokenizer", None, ENCODER_TOKENS)
    asked = Model(
        model_type="modernbert", hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, sliding_window=5, initializer_range=0.3, vocab_size=words.get_vocab_size(),
    )  # fmt: skip
    ours = families.build_model(families.complete(asked, 32))
    init_weights(ours, 3)
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    checkpointer.save(3, {f"model/{name}": value.detach() for name, value in ours.named_parameters()}, {})
    folder = export(checkpointer.settle(), tmp_path / "hf", ours.config, tmp_path / "tokenizer")
    text = "Tere [MASK], tere!"
    ids = torch.tensor(words.encode(text).ids)
    with torch.no_grad():
        expected = our_logits(ours, ids[None])[0, ids.tolist().index(words.token_to_id("[MASK]"))]
    found = pipeline("fill-mask", model=str(folder))(text, top_k=5)
    best = expected.softmax(-1).topk(5)
    assert [one["token"] for one in found] == best.indices.tolist()
    assert [one["score"] for one in found] == pytest.approx(best.values.tolist(), abs=1e-6)
