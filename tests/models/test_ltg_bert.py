"""LTG-BERT against a slow reference of its equations; its sizes, names, config.json and buckets."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kielo.checkpoint.hugging_face_import import load_model_weights
from kielo.checkpoint.tensor_table import join
from kielo.models import families
from kielo.models.blocks.decoder import init_weights
from kielo.models.blocks.relative_attention import RelativeMaskMaker, row_of_distance
from kielo.models.ltg_bert import tables
from kielo.models.parameter_shapes import parameter_shapes, parameters, token_flops
from kielo.models.piece import by_stored_name
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Model
from kielo.verify.round_trip import verdict, verify_round_trip
from tests.models.ltg_bert_reference import Reference

VOCABULARY, LENGTH = 50, 12
# Longer than 4 tokens apart, distances share rows.
TINY = {
    "architectures": ["LtgbertForMaskedLM"], "vocab_size": VOCABULARY, "hidden_size": 24,
    "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 3,
    "max_position_embeddings": 16, "position_bucket_size": 8, "layer_norm_eps": 1e-5,
}  # fmt: skip
HPLT_BASE = TINY | {
    "vocab_size": 32_768, "hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 12,
    "num_attention_heads": 12, "max_position_embeddings": 512, "position_bucket_size": 32,
    "layer_norm_eps": 1e-7, "hidden_dropout_prob": 0.1,
}  # fmt: skip
LAYOUTS = pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
# Sums in another order, in float64, of numbers of size 1 to 10.
EQUAL = {"atol": 1e-6, "rtol": 0.0}


def read(folder: Path, config: dict[str, Any]) -> Model:
    (folder / "config.json").write_text(json.dumps(config))
    return families.read_hf_config(folder)


def random_model(folder: Path, layout: str) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """(the model, its tensors by published names, each with the model's values), in float64."""
    model = families.build_model(read(folder, TINY | {"position_heads": layout})).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
            parameter.add_(float(name.endswith("norm.weight")))
    return model, stored_tensors(model)


def stored_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    grouped = by_stored_name(tables.to_hugging_face(model.config))
    return {name: join(pieces, {part: values[part] for part in pieces}) for name, pieces in grouped.items()}


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and document numbers, [2, LENGTH]."""
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    return tokens, torch.stack([torch.arange(LENGTH) >= 5, torch.arange(LENGTH) >= 9]).int()


def documents_of(kind: str) -> Tensor | None:
    """Document numbers of `batch`. causal: the first sequence is."""
    documents = batch()[1]
    if kind == "causal":
        documents[0] = -1 - documents[0]
    return None if kind == "one text" else documents


@LAYOUTS
@pytest.mark.parametrize("kind", ["one text", "documents", "causal"])
def test_logits_and_gradients_are_those_of_the_equations(tmp_path, layout: str, kind: str) -> None:
    """Within 1e-6 in float64, of every tensor, both ways to cut positions into heads; the loss weighs each
    logit by another number, so that every gradient is one. A batch may have a causal sequence beside others.
    """
    model, stored = random_model(tmp_path, layout)
    reference = Reference(stored, 3, 1e-5, layout == "interleaved", 16)
    for tensor in stored.values():
        tensor.requires_grad_()
    (tokens, _), documents = batch(), documents_of(kind)
    logits = model.logits(model(tokens, documents))
    expected = torch.stack(
        [
            reference.logits(tokens[row].tolist(), None if documents is None else documents[row].tolist())
            for row in range(2)
        ]
    )
    torch.testing.assert_close(logits, expected, **EQUAL)
    weights = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view_as(logits).sin()
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    grouped = by_stored_name(tables.to_hugging_face(model.config))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, pieces in grouped.items():
        found = join(pieces, {part: gradients[part] for part in pieces})
        assert found.abs().max() > 1e-3, name
        torch.testing.assert_close(found, stored[name].grad, **EQUAL, msg=name)


def test_the_two_ways_to_cut_positions_differ(tmp_path) -> None:
    """The same weights give other logits: a wrong choice would load in silence."""
    (one, _), (other, _) = (random_model(tmp_path, layout) for layout in ("concatenated", "interleaved"))
    tokens, _ = batch()
    assert (one(tokens) - other(tokens)).abs().max() > 0.05


@LAYOUTS
def test_flex_attention_computes_the_dense_scores(tmp_path, layout: str) -> None:
    """Uncompiled, forward: within 1e-6 of the dense code in fp32, with documents, without, and causal."""
    model, _ = random_model(tmp_path, layout)
    model = model.float()
    attention, maker = model.layers["0"].attention, model.make_relative_mask
    with torch.no_grad():
        x = model.embed(batch()[0])
        for numbers in map(documents_of, ("one text", "documents", "causal")):
            dense, blocks = (
                attention(x, model.relative_table.weight, make(numbers, LENGTH))
                for make in (maker.dense, maker.in_blocks)
            )
            torch.testing.assert_close(blocks, dense, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("distance", "bucket"), [(0, 0), (15, 15), (16, 16), (17, 17), (100, 24), (511, 31), (9000, 31)]
)
def test_distances_have_the_published_buckets(distance: int, bucket: int) -> None:
    assert row_of_distance(distance, 32, 512) == 31 + bucket
    assert row_of_distance(-distance, 32, 512) == 31 - bucket


def test_the_table_of_rows_has_all_of_them() -> None:
    """Over a sequence of 512 each of the 63 rows is used, in order of the distance."""
    rows = RelativeMaskMaker(32, 512).dense(None, 512).rows_qn
    assert sorted(set(rows.flatten().tolist())) == list(range(63))
    assert (rows[1:] >= rows[:-1]).all() and rows[300, 299] == 32


def test_published_sizes(tmp_path) -> None:
    """HPLT's base model, counted and built; NorBERT 3 of the same network, as its sizes are rounded."""
    base = read(tmp_path, HPLT_BASE)
    assert parameters(base) == 124_984_832
    with torch.device("meta"):
        built = families.build_model(base)
    assert sum(parameter.numel() for parameter in built.parameters()) == 124_984_832
    assert {name: tuple(value.shape) for name, value in built.named_parameters()} == parameter_shapes(base)
    for hidden, heads, layers, inside, millions in (
        (192, 3, 12, 512, 15), (384, 6, 12, 1024, 40), (768, 12, 12, 2048, 123),
    ):  # fmt: skip
        config = HPLT_BASE | {
            "architectures": ["NorbertForMaskedLM"], "vocab_size": 50_000, "hidden_size": hidden,
            "num_attention_heads": heads, "num_hidden_layers": layers, "intermediate_size": inside,
        }  # fmt: skip
        assert round(parameters(read(tmp_path, config)) / 1e6) == pytest.approx(millions, abs=1)


def test_a_token_is_charged_for_all_keys_of_the_sequence(tmp_path) -> None:
    """Six a parameter that multiplies it, and in each of 12 layers 12 × 768 a key and a relative position."""
    base = read(tmp_path, HPLT_BASE)
    rows = (32_768 + 63) * 768 + 2 * 768
    head = 32_768 * 768  # tied, and multiplied all the same
    expected = 6 * (124_984_832 - rows + head) + 12 * 12 * 768 * (512 + 63)
    assert token_flops(base, 512) == expected


@pytest.mark.parametrize(
    ("change", "layout"),
    [
        ({}, "concatenated"),
        ({"architectures": ["NorbertForMaskedLM"]}, "interleaved"),
        ({"architectures": None, "auto_map": {"AutoModel": "modeling_norbert.NorbertModel"}}, "interleaved"),
        ({"_name_or_path": "ltg/bnc-bert-span"}, "interleaved"),
        ({"_name_or_path": "HPLT/hplt_bert_base_et"}, "concatenated"),
        ({"position_heads": "interleaved"}, "interleaved"),
    ],
    ids=str,
)
def test_position_heads_follow_from_classes_and_repository(tmp_path, change: dict, layout: str) -> None:
    assert read(tmp_path, TINY | change).position_heads == layout


@LAYOUTS
def test_an_exported_config_is_read_back_alike(tmp_path, layout: str) -> None:
    """Published keys, the epsilon that was trained with, and no dropout."""
    model = read(tmp_path, TINY | {"position_heads": layout})
    written = families.hf_config(model, pad_token_id=3)
    assert written["layer_norm_eps"] == 1e-5
    assert written["hidden_dropout_prob"] == written["attention_probs_dropout_prob"] == 0.0
    assert read(tmp_path, written) == model


def test_published_files_are_read(tmp_path) -> None:
    """Names of the published files, with the head stored twice and the saved rows of distances, in fp32; an
    export gives every weight back, the head too.
    """
    model, stored = random_model(tmp_path, "concatenated")
    files = {name: tensor.float().contiguous() for name, tensor in stored.items()}
    files["classifier.nonlinearity.5.weight"] = files["embedding.word_embedding.weight"].clone()
    for layer in range(2):
        indices = torch.zeros(16, 16, dtype=torch.int64)
        files[f"transformer.layers.{layer}.attention.position_indices"] = indices
    save_file(files, tmp_path / "model.safetensors")
    ours = families.build_model(model.config)
    load_model_weights(dict(ours.named_parameters()), tmp_path, model.config)
    tokens, _ = batch()
    torch.testing.assert_close(ours(tokens), model.float()(tokens), atol=1e-6, rtol=0)
    trip = verify_round_trip(str(tmp_path))
    assert trip["passed"] and len(trip["tensors"]) == len(files) - 2, verdict(trip)
    assert [name.rpartition(".")[2] for name in trip["left_out"]] == ["position_indices"] * 2
    for name in ("embedding.relative_embedding", "transformer.layers.1.mlp.mlp.1.weight"):
        save_file({kept: files[kept] for kept in files if kept != name}, tmp_path / "model.safetensors")
        with pytest.raises(KieloError, match=name):
            load_model_weights(dict(ours.named_parameters()), tmp_path, model.config)


def test_first_weights_are_those_of_the_rule(tmp_path) -> None:
    """Deviation √(2 / 5 hidden), cut off at two of them; the MLP's of layer 1 are divided by 2."""
    config = read(tmp_path, TINY | {"hidden_size": 240, "intermediate_size": 200, "num_attention_heads": 4})
    model = families.build_model(config)
    init_weights(model, 3)
    deviation = (2 / (5 * 240)) ** 0.5
    for name, parts in (("attention.o", 1.0), ("mlp.gate", 4**-0.5), ("mlp.down", 4**-0.5)):
        weight = model.get_parameter(f"layers.1.{name}.weight")
        # a normal distribution that is cut off at 2 has 0.880 of its deviation; 48,000 numbers
        assert weight.std().item() == pytest.approx(0.880 * parts * deviation, rel=0.02)
        assert weight.abs().max() <= 2 * parts * deviation
    assert not model.head.bias.any() and model.embed.weight is model.head.weight
    assert not model.embed.weight[VOCABULARY:].any()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_norm_eps": None}, "layer_norm_eps"),
        ({"architectures": ["LtgbertForTokenClassification"]}, "architectures"),
        ({"position_bucket_size": 7}, "position_bucket_size"),
        ({"max_position_embeddings": 5}, "position_bucket_size = 2"),
    ],
    ids=str,
)
def test_refusals_name_file_and_key(tmp_path, change: dict, named: str) -> None:
    with pytest.raises(KieloError, match=named) as error:
        read(tmp_path, TINY | change)
    assert "config.json" in str(error.value)


def test_longer_sequences_than_the_table_are_refused(tmp_path) -> None:
    model, _ = random_model(tmp_path, "concatenated")
    with pytest.raises(KieloError, match="max_position_embeddings = 16"):
        model(torch.zeros(1, 17, dtype=torch.int64))


def test_a_key_left_out_is_the_base_models(tmp_path) -> None:
    """As in the published code; sizes that differ between models are needed, and told together."""
    needed = {"vocab_size": 90, "intermediate_size": 50, "layer_norm_eps": 1e-3}
    given = {"architectures": ["LtgbertForMaskedLM"]}
    model = read(tmp_path, given | needed)
    assert (model.hidden_size, model.num_hidden_layers, model.num_attention_heads) == (768, 12, 12)
    assert (model.num_key_value_heads, model.head_dim) == (12, 64)
    assert (model.max_position_embeddings, model.position_bucket_size) == (512, 32)
    assert (model.vocab_size, model.intermediate_size, model.layer_norm_epsilon) == (90, 50, 1e-3)
    assert (model.tie_word_embeddings, model.attention_bias, model.mlp_bias) == (True, True, False)
    with pytest.raises(KieloError, match="json: lacks vocab_size; lacks intermediate_size; lacks layer_norm"):
        read(tmp_path, given)
    with pytest.raises(KieloError, match=r"hidden_act = 'silu' \(known: 'gelu_new'\)"):
        read(tmp_path, given | needed | {"hidden_act": "silu"})
