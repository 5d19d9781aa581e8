"""Checkpoints of Megatron are read as the models that they are, and nothing in them is run."""

import argparse
import collections
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kielo.artifact import inert_data
from kielo.artifact.inert_data import read_as_data
from kielo.artifact.torch_archive import read_archive
from kielo.artifact.weights_folder import pinned, resolve_weights, weights_here
from kielo.checkpoint.hugging_face_import import load_model_weights
from kielo.checkpoint.megatron_distributed import read_tensors
from kielo.checkpoint.torch_tensors import tensors_of
from kielo.models import families
from kielo.parallel.materialise import local, local_slices, materialise
from kielo.recipe.errors import KieloError
from kielo.resolve.complete_model import overridden_in_words
from kielo.verify.round_trip import verify_round_trip
from tests.checkpoint.megatron_files import (
    Source,
    write_layers,
    write_legacy,
    write_torch_dist,
    write_universal,
)
from tests.started_ranks import run_ranks

SIZES = {
    "llama": {"intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 6},
    "qwen2": {"intermediate_size": 24, "num_key_value_heads": 2, "use_sliding_window": False},
    "qwen3": {"intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 6},
    "gpt2": {"activation_function": "gelu_new"},
    "gpt_neox": {
        "intermediate_size": 64,
        "rotary_pct": 1.0,
        "use_parallel_residual": False,
        "hidden_act": "gelu_new",
    },
    "bloom": {},
}


def made(kind: str, layers: int = 4, tied: bool = False, **sizes: Any) -> Any:
    """A model of transformers with numbers everywhere, biases and norms too."""
    values = {
        "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": layers, "num_attention_heads": 4,
        "max_position_embeddings": 32, "tie_word_embeddings": tied or kind in ("gpt2", "bloom"),
        "rms_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "layer_norm_eps": 1e-5, "attention_dropout": 0.0,
        "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **values | SIZES[kind] | sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    return model


def read(reference: str) -> Any:
    """Kielo's model with the weights."""
    folder = resolve_weights(reference)
    config = families.read_hf_config(folder)
    with torch.device("meta"):
        model = families.build_model(config)
    materialise(model, torch.device("cpu"), None)
    load_model_weights(dict(model.named_parameters()), folder, config)
    return model.eval()


def largest_difference(model: Any, reference: str) -> float:
    """Of logits of real tokens, relative to the largest logit."""
    tokens = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(1))
    ours = read(reference)
    with torch.no_grad():
        theirs = model(tokens).logits
        logits = ours.logits(ours(tokens))[..., : theirs.shape[-1]]
    return ((logits - theirs).abs().max() / theirs.abs().max()).item()


CASES = [
    ("llama", {}, {"tp": 2, "pp": 2}),
    ("llama", {"tied": True}, {"tp": 2, "pp": 2, "names": "core", "chunks": 2}),
    ("qwen2", {}, {"tp": 2, "pp": 1, "names": "core"}),
    ("qwen3", {}, {"tp": 1, "pp": 4, "names": "fused"}),
    ("gpt2", {}, {"tp": 2, "pp": 2, "version": 0}),
    ("gpt2", {}, {"tp": 2, "pp": 2, "version": 1.0}),
    ("gpt2", {}, {"tp": 4, "pp": 1, "version": 2.0, "vocab_size": 61, "rows": 64}),
    ("gpt_neox", {}, {"tp": 2, "pp": 2, "names": "fused", "chunks": 2}),
]


@pytest.mark.parametrize(("kind", "of_model", "of_files"), CASES)
def test_logits_are_those_of_the_same_weights(kind, of_model, of_files, tmp_path) -> None:
    model = made(kind, **of_model)
    write_legacy(tmp_path, Source(model), **of_files)
    assert largest_difference(model, f"megatron:{tmp_path}") <= 1e-5
    rows = 61 if "vocab_size" in of_files else 64
    assert families.read_hf_config(resolve_weights(f"megatron:{tmp_path}")).vocab_size == rows


@pytest.mark.parametrize("kind", ["bloom", "gpt2"])
def test_layers_of_deepspeed(kind, tmp_path) -> None:
    model = made(kind)
    write_layers(tmp_path, Source(model), 2)
    assert largest_difference(model, f"megatron:{tmp_path}") <= 1e-5
    (tmp_path / "global_step7" / "layer_04-model_01-model_states.pt").unlink()
    refused(f"megatron:{tmp_path}", r"1 of 12 files are missing, such as layer_04-model_01")


def test_deepspeed_without_a_pipeline(tmp_path) -> None:
    """All layers are in one file for each tensor rank; of ZeRO 3 they are divided further."""
    model = made("gpt2", layers=2)
    write_legacy(tmp_path / "legacy", Source(model), 2, 1)
    iteration = tmp_path / "deepspeed" / "global_step7"
    iteration.mkdir(parents=True)
    for path in (tmp_path / "legacy" / "iter_0000007").iterdir():
        state = torch.load(path / "model_optim_rng.pt", weights_only=False)
        state["module"] = state.pop("model")
        torch.save(state, iteration / f"{path.name}_model_states.pt")
    (tmp_path / "deepspeed" / "latest").write_text("global_step7")
    assert largest_difference(model, f"megatron:{tmp_path / 'deepspeed'}") <= 1e-5
    for path in list(iteration.iterdir()):
        path.rename(iteration / f"zero_pp_rank_0_{path.name}")
    refused(
        f"megatron:{tmp_path / 'deepspeed'}", "a part of weights that ZeRO stage 3 divides.*Fix: DeepSpeed"
    )


@pytest.mark.parametrize(
    ("kind", "of_files"),
    [
        ("bloom", {"tp": 4}),
        ("gpt2", {"tp": 2, "is_pipeline": False}),
        ("llama", {"tp": 2}),
        ("llama", {"tp": 4, "in_two_parts": False, "is_pipeline": False}),
    ],
)
def test_universal_checkpoints_of_deepspeed(kind, of_files, tmp_path) -> None:
    """One file for each whole parameter, as ds_to_universal.py joins the ranks' slices."""
    model = made(kind, num_key_value_heads=4) if kind == "llama" else made(kind)
    iteration, reference = write_universal(tmp_path, Source(model), **of_files), f"megatron:{tmp_path}"
    assert largest_difference(model, reference) <= 1e-5
    assert families.read_hf_config(resolve_weights(reference)).vocab_size == 61
    file = sorted(iteration.glob("zero/*.mlp.dense_4h_to_h.weight/fp32.pt"))[0]
    torch.save(torch.zeros(7), file)
    refused(reference, "dense_4h_to_h.weight/fp32.pt: has no tensor `param`")
    file.unlink()
    refused(reference, r"fp32.pt: missing, as are 0 more of \d+ files.*Fix: copy the iteration again")
    shutil.rmtree(file.parent)
    refused(reference, "but it lacks layers.0.mlp.down.weight")
    states = sorted(iteration.glob("mp_rank_*"))
    states[0].rename(iteration / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    for path in states[1:]:
        path.unlink()
    refused(reference, "a universal checkpoint of ZeRO stage 3, whose tensors have no shapes")
    (iteration / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    refused(reference, "has no mp_rank_00_model_states.pt, .* the conversion is not finished")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_core_s_distributed_format(kind, tmp_path) -> None:
    """Equal layers are stacked in one tensor, and torch writes the file."""
    model = made(kind)
    folder = write_torch_dist(tmp_path, Source(model)) / "iter_0000007"
    assert largest_difference(model, f"megatron:{tmp_path}") <= 1e-5
    (file,) = folder.glob("*.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    refused(f"megatron:{tmp_path}", "distcp: cut short: a tensor of its table ends beyond byte")
    file.unlink()
    refused(f"megatron:{tmp_path}", "distcp: is missing, and has .*Fix: copy the iteration again")
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    refused(f"megatron:{tmp_path}", "sharded_backend = 'zarr', and Kielo reads torch_dist")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_megatron_core_is_the_referee(kind, tmp_path) -> None:
    """The core's own model writes both of its formats; its logits are those of the import."""
    pytest.importorskip("megatron.core")
    command = [sys.executable, "-m", "tests.checkpoint.megatron_core_model", kind, str(tmp_path)]
    subprocess.run(command, check=True, timeout=280)
    expected = torch.load(tmp_path / "logits.pt")
    for form in ("torch_dist", "legacy"):
        ours = read(f"megatron:{tmp_path / form}")
        with torch.no_grad():
            logits = ours.logits(ours(torch.load(tmp_path / "tokens.pt")))
        assert ((logits - expected).abs().max() / expected.abs().max()).item() <= 1e-5


@pytest.mark.full
def test_eight_by_eight_into_other_layouts(tmp_path) -> None:
    """TP8 x PP8 of the format; every rank of Kielo's layouts gets its slices."""
    model = made("llama", layers=8, num_attention_heads=16, num_key_value_heads=8, head_dim=2)
    write_legacy(tmp_path, Source(model), tp=8, pp=8, names="core")
    assert largest_difference(model, f"megatron:{tmp_path}") <= 1e-5
    whole = {name: value.detach() for name, value in read(f"megatron:{tmp_path}").named_parameters()}
    for shard, tensor in ((1, 2), (2, 1), (2, 2)):
        for parts in run_ranks(slices_of_rank, shard * tensor, tmp_path, shard, tensor):
            for name, (box, values) in parts.items():
                assert torch.equal(whole[name][box], values), name


def slices_of_rank(folder: Path, shard: int, tensor: int) -> dict[str, Any]:
    from kielo.parallel.mesh import AXES, build_mesh
    from kielo.parallel.parallelise import parallelise
    from kielo.ranks.world import start_world
    from kielo.recipe.sections import Layout

    source = resolve_weights(f"megatron:{folder}")
    config = families.read_hf_config(source)
    world = start_world(30, "cpu")
    layout = Layout(**dict.fromkeys(AXES, 1) | {"shard": shard, "tensor": tensor})
    with torch.device("meta"):
        model = families.build_model(config)
    model = materialise(parallelise(model, build_mesh(world, layout), layout, "fp32"), world.device, None)
    parameters = dict(model.named_parameters())
    load_model_weights(parameters, source, config)
    return {n: (local_slices(p), local(p).detach().clone()) for n, p in parameters.items()}


def test_a_round_trip_makes_the_hugging_face_folder(tmp_path) -> None:
    model = made("llama", layers=2)
    write_legacy(tmp_path / "m", Source(model), 2, 1, dtype=torch.bfloat16, vocab_size=61)
    result = verify_round_trip(f"megatron:{tmp_path / 'm'}", tmp_path / "hf")
    assert result["passed"] and not result["left_out"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(again[name], value.bfloat16()), name


def test_which_iteration_is_read(tmp_path) -> None:
    """The tracker's, which is written last; a named folder is as good, but not a newer one."""
    iteration = write_legacy(tmp_path, Source(made("llama", layers=2)), 1, 1) / "iter_0000007"
    found = resolve_weights(f"megatron:{tmp_path}")
    assert found == iteration and pinned(f"megatron:{tmp_path}", found) == f"megatron:{iteration}"
    assert weights_here(f"megatron:{iteration}") == iteration and weights_here("megatron:nowhere") is None
    shutil.copytree(iteration, tmp_path / "iter_0000009")
    assert resolve_weights(f"megatron:{tmp_path}") == iteration
    refused(f"megatron:{tmp_path}/iter_0000009", r"is not finished: .*iteration.txt says 7.*Fix: megatron:")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("11")
    refused(f"megatron:{tmp_path}", r"says 11, but .*iter_0000011 has no checkpoint")
    tracker.write_text("release")
    iteration.rename(tmp_path / "release")
    assert resolve_weights(f"megatron:{tmp_path}") == tmp_path / "release"
    tracker.unlink()
    refused(f"megatron:{tmp_path}", r"no checkpoint of Megatron: .*Fix: megatron:.*iter_0000009")
    refused("megatron:nowhere", "no such folder, nowhere")


def refused(reference: str, why: str) -> None:
    with pytest.raises(KieloError, match=why):
        read(reference)


def test_files_that_do_not_belong_together_are_named(tmp_path) -> None:
    model = Source(made("llama", layers=2))
    write_legacy(tmp_path, model, 2, 2)
    iteration, reference = tmp_path / "iter_0000007", f"megatron:{tmp_path}"
    path = iteration / "mp_rank_01_001" / "model_optim_rng.pt"
    whole = path.read_bytes()
    state = torch.load(path, weights_only=False)

    def changed(**values: Any) -> None:
        torch.save(state | values, path)

    changed(args=argparse.Namespace(**vars(state["args"]) | {"tensor_model_parallel_size": 4}))
    refused(reference, r"mp_rank_01_001.*tensor degree 4, but the files here are of 2 tensor ranks")
    changed(args=argparse.Namespace(**vars(state["args"]) | {"padded_vocab_size": 72}))
    refused(reference, r"args.padded_vocab_size = 72, but 64 in .*mp_rank_00_000")
    changed(checkpoint_version=2.0)
    refused(reference, r"mp_rank_01_001.*checkpoint_version = 2.0, but 3.0")
    path.write_bytes(whole[:-900])
    refused(reference, r"mp_rank_01_001.*cut short, damaged, being written")
    path.unlink()
    refused(reference, r"mp_rank_01_001: has no model_optim_rng.pt: it is being written")
    path.parent.rmdir()
    refused(reference, r"1 of 4 files are missing, such as mp_rank_01_001")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"squared_relu": True}, "args.squared_relu = True, which no model family"),
        ({"num_experts": 8}, "args.num_experts = 8, which no model family"),
        ({"position_embedding_type": "t5"}, "args.position_embedding_type = 't5', which no model family"),
        ({"swiglu": False}, "no model family of Kielo has args.normalization = rmsnorm.*swiglu = False"),
        ({"num_layers": 3}, "has 2 layers, and its arguments say 3"),
        ({"add_bias_linear": True}, "its arguments make it a llama, but it lacks .*bias"),
        ({"padded_vocab_size": 80}, "embed.weight has 64 rows, and the vocabulary 80 tokens"),
        ({"hidden_size": "16"}, "args.hidden_size = '16' is no size"),
        ({"rope_theta": 5000}, "args.rotary_base = 10000, but args.rope_theta = 5000"),
        ({"num_query_groups": 1}, "queries, keys and values have 48 rows, and should have 36"),
    ],
)
def test_models_of_no_family_are_refused_by_name(changes, why, tmp_path) -> None:
    write_legacy(tmp_path, Source(made("llama", layers=2)), 1, 1, **changes)
    refused(f"megatron:{tmp_path}", why)


def test_unknown_tensors_are_refused_and_other_vectors_told(tmp_path, caplog) -> None:
    write_legacy(tmp_path, Source(made("llama", layers=2)), 2, 1, names="core")
    path = tmp_path / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["model"]["decoder.layers.1.pre_mlp_layernorm.weight"] += 1
    torch.save(state, path)
    read(f"megatron:{tmp_path}")
    assert "1 vectors differ between tensor ranks, such as layers.1.mlp_norm.weight" in caplog.text
    state["model"]["decoder.layers.1.mlp.router.weight"] = torch.ones(3)
    torch.save(state, path)
    refused(f"megatron:{tmp_path}", r"mp_rank_01.*has other tensors than .*mlp.router.weight")
    torch.save(state, tmp_path / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt")
    refused(f"megatron:{tmp_path}", "tensors that a llama does not have: decoder.layers.1.mlp.router.weight")


def test_what_the_arguments_leave_open_is_said(tmp_path) -> None:
    """Megatron-DeepSpeed has rope_theta in place of rotary_base."""
    from kielo.recipe.sections import Model

    changes = {"rotary_base": None, "rope_theta": 5000}
    write_legacy(tmp_path, Source(made("llama", layers=2)), 1, 1, **changes)
    assert families.read_hf_config(resolve_weights(f"megatron:{tmp_path}")).rope_theta == 5000
    said = overridden_in_words(Model(weights=f"megatron:{tmp_path}", hidden_size=99))
    for part in (
        "model.hidden_size = 99 (16 there)",
        "is read as a llama",
        "all 64 rows of the vocabulary stay",
        "HuggingFaceTokenizer, my/tokenizer",
        "its moments are taken only with train.optimiser_from_weights = true",
    ):
        assert part in said


class _Runs:
    def __init__(self, call: Any, *arguments: Any):
        self.made = call, arguments

    def __reduce__(self) -> Any:
        return self.made


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (_Runs(os.system, "touch RAN"), "names (posix|nt).system"),
        ({"args": _Runs(os.system, "touch RAN")}, "names (posix|nt).system"),
        ({"args": argparse.Namespace(a=_Runs(eval, "1"))}, "names builtins.eval"),
        ({"model": _Runs(pytest.skip, "no")}, "names _pytest"),
        ({"model": _Runs(getattr, "a", "b")}, "names builtins.getattr"),
    ],
)
def test_a_hostile_pickle_is_refused_and_not_run(content, why, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, "model_optim_rng.pt")
    with pytest.raises(KieloError, match=why):
        read_archive(Path("model_optim_rng.pt"), plain_under="args")
    assert not Path("RAN").exists()


def test_unknown_classes_are_data_only_inside_the_arguments() -> None:
    class_of_a_fork = _Runs(pytest.param, 3)
    content = {"args": argparse.Namespace(kind=class_of_a_fork), "model": {}}
    found = read_as_data(pickle.dumps(content), "x", "args")
    assert found["args"].state["kind"].arguments == (3,)
    with pytest.raises(KieloError, match="names _pytest"):
        read_as_data(pickle.dumps(content | {"args": 0, "other": class_of_a_fork}), "x", "args")


def test_a_pickle_of_plain_data_is_what_pickle_reads() -> None:
    plain = {"a": [1, -2, 2**80, 1.5, None, True, "ä", b"x"], "b": (1, (2,), [3]), (1, 2): {}, 3: {"c": {4}}}
    ordered = collections.OrderedDict(x=1, y=plain)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        found = read_as_data(pickle.dumps(ordered, protocol), "x")
        assert found.pop("y").pop(3)["c"] in ([4], {4}) or protocol < 4
        assert found == {"x": 1}


def test_what_is_too_large_is_not_read(tmp_path, monkeypatch) -> None:
    """A pickle's size is compared before its bytes are read, and its objects are counted."""
    torch.save({"a": [1, 2, 3]}, tmp_path / "small.pt")
    whole = pickle.dumps([[], [], (1, 2, 3, 4)])  # a list, two in it and a tuple
    monkeypatch.setattr(inert_data, "MOST_OBJECTS", 4)
    assert read_as_data(whole, "x") == [[], [], (1, 2, 3, 4)]
    monkeypatch.setattr(inert_data, "MOST_OBJECTS", 3)
    with pytest.raises(KieloError, match="x: refused: its pickle makes more than 3 objects"):
        read_as_data(whole, "x")
    with zipfile.ZipFile(tmp_path / "order.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"N.")
        archive.writestr("a/byteorder", b"little" + b" " * 11)
    with pytest.raises(KieloError, match="not little-endian"):
        read_archive(tmp_path / "order.pt")
    monkeypatch.setattr(inert_data, "MOST_BYTES", 10)
    monkeypatch.setattr(zipfile.ZipFile, "read", None)
    with pytest.raises(KieloError, match="small.pt: its pickle has .* bytes, and Kielo reads up to 10"):
        read_archive(tmp_path / "small.pt")
    (tmp_path / ".metadata").write_bytes(b" " * 11)
    monkeypatch.setattr(Path, "read_bytes", None)
    with pytest.raises(KieloError, match=".metadata: its pickle has 11 bytes"):
        read_tensors(tmp_path, bool)


def test_bombs_are_refused(tmp_path) -> None:
    """Deep tuples, a tensor of a terabyte, and a table of tables that hold each other twice."""
    for bomb in (
        b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
        b"\x80\x04)" + b"\x85" * 100_000 + b".",
        b"\x80\x04N" + b"\x94h\x00\x86" * 300 + b".",
    ):
        with pytest.raises(KieloError, match="more than 100 deep"):
            read_as_data(bomb, "x")
    for damaged in (
        b"",
        b"\x80\x04",
        b"\x80\x04N",
        b"\x80\x04)R.",
        b"\x80\x04h\x09.",
        b"\x80\x04}((K\x01\x85\x85N\x75.",
    ):
        with pytest.raises(KieloError, match="cut short or damaged"):
            read_as_data(damaged, "x")
    model = Source(made("llama", layers=2))
    write_legacy(tmp_path, model, 1, 1, names="core")
    path = tmp_path / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    huge = torch.nn.Parameter(torch.ones(1))
    torch.save(state | {"model": state["model"] | {"output_layer.weight": huge}}, path)
    archive = read_archive(path, plain_under="args")
    (tensor,) = archive.content["model"]["output_layer.weight"].arguments[:1]
    tensor.arguments = (*tensor.arguments[:2], (2**19, 2**19), (2**19, 1), *tensor.arguments[4:])
    with pytest.raises(KieloError, match="of 1,099,511,627,776 bytes ends beyond its storage of 4"):
        tensors_of(archive, archive.content["model"])
    tensor.arguments = (*tensor.arguments[:2], (2**19, 2**19), (0, 0), *tensor.arguments[4:])
    with pytest.raises(KieloError, match="of 1,099,511,627,776 bytes is larger than its storage of 4"):
        tensors_of(archive, archive.content["model"])
    table = state["model"]
    for _ in range(40):
        table = {"a": table, "b": table}
    torch.save(state | {"model": table}, path)
    refused(f"megatron:{tmp_path}", "refused: its tables are nested more than 16 deep")
