"""Writes checkpoints of Megatron's formats from transformers' models, from the formats' description alone.

Nothing of Kielo is used. Queries, keys and values are fused, the MLP's halves joined, the vocabulary padded
and all of it divided over ranks as in Megatron-LM's training; names are those of three generations.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as torch_checkpoint

Tensors = dict[str, Tensor]

LEGACY = {
    "norm1": "input_layernorm", "qkv": "self_attention.query_key_value", "o": "self_attention.dense",
    "norm2": "post_attention_layernorm", "fc1": "mlp.dense_h_to_4h", "fc2": "mlp.dense_4h_to_h",
}  # fmt: skip
CORE = {
    "norm1": "input_layernorm", "qkv": "self_attention.linear_qkv", "o": "self_attention.linear_proj",
    "norm2": "pre_mlp_layernorm", "fc1": "mlp.linear_fc1", "fc2": "mlp.linear_fc2",
    "q_norm": "self_attention.q_layernorm", "k_norm": "self_attention.k_layernorm",
}  # fmt: skip


def fused(q: Tensor, k: Tensor, v: Tensor, heads: tuple[int, int], tp: int, version: float) -> list[Tensor]:
    """Each rank's rows. heads: of queries, of keys."""
    (queries, groups), found = heads, []
    q, k, v = (x.view(n, -1, *x.shape[1:]) for x, n in zip((q, k, v), (queries, groups, groups)))
    for rank in range(tp):
        mine = slice(rank * groups // tp, (rank + 1) * groups // tp)
        each = queries // groups
        theirs = slice(mine.start * each, mine.stop * each)
        if version >= 2:
            rows = [
                torch.cat([q[theirs][n * each : (n + 1) * each].flatten(0, 1), k[mine][n], v[mine][n]])
                for n in range(groups // tp)
            ]
            found.append(torch.cat(rows))
        elif version == 0:
            found.append(torch.cat([x[mine].flatten(0, 1) for x in (q, k, v)]))
        else:  # each number of q, then of k, then of v
            found.append(torch.stack([x[mine].flatten(0, 1) for x in (q, k, v)], 1).flatten(0, 1))
    return found


def layer_shards(
    part: Callable[[str], Tensor | None], heads: tuple[int, int], tp: int, version: float
) -> list[Tensors]:
    """Each rank's tensors of a layer. part: "q.weight" and so on → the whole tensor or None."""
    ranks: list[Tensors] = [{} for _ in range(tp)]
    for kind in ("weight", "bias"):
        for name in ("norm1", "norm2", "q_norm", "k_norm"):
            if (value := part(f"{name}.{kind}")) is not None:
                for rank in ranks:
                    rank[f"{name}.{kind}"] = value.clone()
        if (q := part(f"q.{kind}")) is not None:
            shards = fused(q, part(f"k.{kind}"), part(f"v.{kind}"), heads, tp, version)
            for rank, value in zip(ranks, shards):
                rank[f"qkv.{kind}"] = value.clone()
        if (up := part(f"up.{kind}")) is not None:
            gate = part(f"gate.{kind}")
            for number, rank in enumerate(ranks):
                halves = [x.chunk(tp)[number] for x in (gate, up) if x is not None]
                rank[f"fc1.{kind}"] = torch.cat(halves).clone()
        for name in ("o", "fc2"):
            if (value := part(f"{name}.{kind}")) is not None:
                for number, rank in enumerate(ranks):
                    rank[f"{name}.{kind}"] = (
                        value.chunk(tp, 1)[number] if kind == "weight" else value
                    ).clone()
    return ranks


def rows_of_ranks(matrix: Tensor, rows: int, tp: int) -> list[Tensor]:
    """The vocabulary with padding rows that are not zero."""
    padding = torch.full((rows - matrix.shape[0], matrix.shape[1]), 9.0)
    return [one.clone() for one in torch.cat([matrix, padding]).chunk(tp)]


class Source:
    """A transformers model by Megatron's parts: `layer(n)` gives a function for `layer_shards`."""

    def __init__(self, model: Any):
        self.model, self.state, self.config = model, model.state_dict(), model.config
        self.kind = model.config.model_type
        self.layers = model.config.num_hidden_layers
        self.heads = (
            model.config.num_attention_heads,
            getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads,
        )

    def layer(self, number: int) -> Callable[[str], Tensor | None]:
        return lambda name: getattr(self, f"_{self.kind}")(number, *name.rsplit(".", 1))

    def _llama(self, number: int, name: str, kind: str) -> Tensor | None:
        names = {
            "norm1": "input_layernorm", "norm2": "post_attention_layernorm", "o": "self_attn.o_proj",
            "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
            "gate": "mlp.gate_proj", "up": "mlp.up_proj", "fc2": "mlp.down_proj",
            "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
        }  # fmt: skip
        return self.state.get(f"model.layers.{number}.{names[name]}.{kind}")

    _qwen2 = _qwen3 = _llama

    def _gpt2(self, number: int, name: str, kind: str) -> Tensor | None:
        names = {"norm1": "ln_1", "norm2": "ln_2", "o": "attn.c_proj", "up": "mlp.c_fc", "fc2": "mlp.c_proj"}
        module = names.get(name) or ("attn.c_attn" if name in "qkv" else "none")
        value = self.state.get(f"transformer.h.{number}.{module}.{kind}")
        if value is not None and kind == "weight" and not name.startswith("norm"):
            value = value.T.contiguous()
        return value.chunk(3)["qkv".index(name)] if value is not None and name in "qkv" else value

    def _gpt_neox(self, number: int, name: str, kind: str) -> Tensor | None:
        first, attention = (
            ("gpt_neox.layers", "attention")
            if self.kind == "gpt_neox"
            else ("transformer.h", "self_attention")
        )
        names = {
            "norm1": "input_layernorm", "norm2": "post_attention_layernorm", "o": f"{attention}.dense",
            "up": "mlp.dense_h_to_4h", "fc2": "mlp.dense_4h_to_h",
        }  # fmt: skip
        module = names.get(name) or (f"{attention}.query_key_value" if name in "qkv" else "none")
        value = self.state.get(f"{first}.{number}.{module}.{kind}")
        if value is not None and name in "qkv":  # fused head by head
            value = value.view(self.heads[0], 3, -1, *value.shape[1:])[:, "qkv".index(name)].flatten(0, 1)
        return value

    _bloom = _gpt_neox

    def end(self, name: str) -> Tensor | None:
        names = {
            "llama": {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight",
                      "norm.weight": "model.norm.weight"},
            "gpt2": {"embed.weight": "transformer.wte.weight", "positions.weight": "transformer.wpe.weight",
                     "norm.weight": "transformer.ln_f.weight", "norm.bias": "transformer.ln_f.bias"},
            "gpt_neox": {"embed.weight": "gpt_neox.embed_in.weight", "head.weight": "lm_head.weight",
                         "norm.weight": "gpt_neox.final_layer_norm.weight",
                         "norm.bias": "gpt_neox.final_layer_norm.bias"},
            "bloom": {"embed.weight": "transformer.word_embeddings.weight",
                      "embed_norm.weight": "transformer.word_embeddings_layernorm.weight",
                      "embed_norm.bias": "transformer.word_embeddings_layernorm.bias",
                      "norm.weight": "transformer.ln_f.weight", "norm.bias": "transformer.ln_f.bias"},
        }  # fmt: skip
        stored = names[self.kind if self.kind in names else "llama"].get(name)
        return None if stored is None else self.state.get(stored)


def arguments(source: Source, tp: int, pp: int, rows: int, **changes: Any) -> argparse.Namespace:
    """The arguments that Megatron-LM saves, those of the model."""
    config = source.config
    is_llama = source.kind in ("llama", "qwen2", "qwen3")
    values = {
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "num_layers": source.layers,
        "hidden_size": config.hidden_size, "num_attention_heads": source.heads[0],
        "ffn_hidden_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // source.heads[0],
        "group_query_attention": source.heads[0] != source.heads[1], "num_query_groups": source.heads[1],
        "padded_vocab_size": rows, "vocab_size": None, "make_vocab_size_divisible_by": 8,
        "seq_length": 32, "max_position_embeddings": 32,
        "normalization": "RMSNorm" if is_llama else "LayerNorm", "norm_epsilon": 1e-5, "swiglu": is_llama,
        "add_bias_linear": not is_llama, "add_qkv_bias": source.kind == "qwen2",
        "qk_layernorm": source.kind == "qwen3", "init_method_std": 0.02, "bias_gelu_fusion": True,
        "position_embedding_type": {"gpt2": "learned_absolute", "bloom": "alibi"}.get(source.kind, "rope"),
        "embed_layernorm": source.kind == "bloom", "rotary_base": 10000, "rotary_percent": 1.0,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "my/tokenizer", "z_loss_strength": 1e-4,
    }  # fmt: skip
    return argparse.Namespace(**values | changes)


def stages_of(source: Source, pp: int, chunks: int) -> list[list[range]]:
    """Layers of each pipeline rank's chunks."""
    each = source.layers // (pp * chunks)
    return [[range((c * pp + p) * each, (c * pp + p + 1) * each) for c in range(chunks)] for p in range(pp)]


def write_legacy(
    folder: Path, source: Source, tp: int, pp: int, chunks: int = 1, names: str = "legacy",
    version: float = 3.0, rows: int = 64, dtype: torch.dtype = torch.float32, adam: bool = False,
    **changes: Any,
) -> Path:  # fmt: skip
    """`folder`/iter_0000007/mp_rank_XX[_YYY]/model_optim_rng.pt, and the tracker. adam: its state too."""
    args = arguments(source, tp, pp, rows, **changes)
    iteration = folder / "iter_0000007"
    for p, own in enumerate(stages_of(source, pp, chunks)):
        for t in range(tp):
            state: dict[str, Any] = {
                "args": args, "checkpoint_version": version, "iteration": 7,
                "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}},
            }  # fmt: skip
            if version == 0:
                del state["checkpoint_version"]
            masters: list[Tensors] = []
            for c, layers in enumerate(own):
                is_first, is_last = p == c == 0, (p, c) == (pp - 1, chunks - 1)
                shards = [layer_shards(source.layer(n), source.heads, tp, version)[t] for n in layers]
                part = _model_part(source, names, shards, (t, tp, rows), (is_first, is_last))
                masters.append(flat(part))
                state["model" if chunks == 1 else f"model{c}"] = _cast(part, dtype)
            if adam:
                state["optimizer"] = mixed_precision_state(masters)
            place = iteration / (f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else ""))
            place.mkdir(parents=True)
            torch.save(state, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def flat(content: Any, prefix: str = "") -> Tensors:
    """Joined names of nested tables → tensors, in the order of the tables."""
    if isinstance(content, dict):
        return {k: v for name, one in content.items() for k, v in flat(one, f"{prefix}.{name}").items()}
    return {prefix: content} if isinstance(content, Tensor) else {}


def moments(weight: Tensor) -> dict[str, Tensor]:
    """Adam's moments of any piece of a weight: each number of them depends on one of the weight only."""
    return {"exp_avg": weight * 0.01 + 0.001, "exp_avg_sq": (weight * 0.3).square() + 1e-4}


UPDATES = 40


def mixed_precision_state(chunks: list[Tensors]) -> dict[str, Any]:
    """Return the state of a Float16OptimizerWithFloat16Params: Adam over fp32 weights, in two groups.

    Parameters with weight decay are the first group, biases and norms the second.
    """
    weights = [weight for tensors in chunks for weight in tensors.values()]
    groups = [[w for w in weights if w.dim() > 1], [w for w in weights if w.dim() == 1]]
    state, packed, first = {}, [], 0
    for number, group in enumerate(groups):
        decay = {"weight_decay": 0.1 * (number == 0), "wd_mult": 1.0 - number}
        settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "step": UPDATES}
        packed.append(settings | decay | {"params": list(range(first, first + len(group)))})
        state |= {first + n: moments(weight) for n, weight in enumerate(group)}
        first += len(group)
    inner = {"state": state, "param_groups": packed}
    return {"optimizer": inner, "fp32_from_fp16_params": [[w.clone() for w in g] for g in groups]}


def write_universal(
    folder: Path, source: Source, tp: int, is_pipeline: bool = True, in_two_parts: bool = True, **changes: Any
) -> Path:
    """Write as ds_to_universal.py: `folder`/global_step7_universal/zero/PARAMETER/{fp32,exp_avg,...}.pt.

    Ranks' slices are joined: rows one after another, columns for the second matrices, vectors of all ranks
    once, a gated MLP by halves if the model declares it (`in_two_parts`), the vocabulary without padding.
    """
    iteration = folder / "global_step7_universal"
    whole: dict[str, tuple[Tensor, dict[str, Any]]] = {}
    embed = "tied_modules.embed." if is_pipeline else "language_model.embedding."
    if is_pipeline and not source.config.tie_word_embeddings:
        embed = "1."
    whole[f"{embed}word_embeddings.weight"] = source.end("embed.weight"), {"cat_dim": 0, "vocab_tensor": True}
    if (positions := source.end("positions.weight")) is not None:
        whole[f"{embed}position_embeddings.weight"] = positions, {}
    for kind in ("weight", "bias"):
        if (norm := source.end(f"embed_norm.{kind}")) is not None:
            whole[f"{embed}word_embeddings.norm.{kind}"] = norm, {}
    for n in range(source.layers):
        ranks = layer_shards(source.layer(n), source.heads, tp, 3.0)
        prefix = f"{n + 3}." if is_pipeline else f"language_model.encoder.layers.{n}."
        for name in ranks[0]:
            module, kind = name.rsplit(".", 1)
            parts, noted = [rank[name] for rank in ranks], {}
            if module in ("o", "fc2") and kind == "weight":
                value, noted = torch.cat(parts, 1), {"cat_dim": 1}
            elif module == "fc1" and source.kind == "llama" and in_two_parts:
                halves = zip(*(part.chunk(2) for part in parts))
                value, noted = torch.cat([torch.cat(half) for half in halves]), {"param_n_sub_params": 2}
            elif module in ("qkv", "fc1"):
                value, noted = torch.cat(parts), {"cat_dim": 0}
            else:
                value = parts[0]
            whole[f"{prefix}{LEGACY[module]}.{kind}"] = value, noted
    final = f"{source.layers + 4}." if is_pipeline else "language_model.encoder.final_layernorm."
    for kind in ("weight", "bias"):
        if (norm := source.end(f"norm.{kind}")) is not None:
            whole[f"{final}{kind}"] = norm, {}
    if not source.config.tie_word_embeddings:
        head = f"{source.layers + 5}.lm_head.weight" if is_pipeline else "language_model.output_layer.weight"
        whole[head] = source.end("head.weight"), {"cat_dim": 0, "vocab_tensor": True}
    for name, (value, noted) in whole.items():
        place = iteration / "zero" / name
        place.mkdir(parents=True)
        for state, tensor in ({"fp32": value} | moments(value)).items():
            torch.save(noted | {"param": tensor.clone()}, place / f"{state}.pt")
        torch.save(torch.tensor(float(UPDATES)), place / "step.pt")
    groups = [{"betas": (0.9, 0.95), "eps": 1e-8, "params": []}]
    torch.save({"param_groups": groups, "zero_stage": 1}, iteration / "zero" / "optimizer_state.pt")
    vocabulary = source.end("embed.weight").shape[0]
    info = {"universal_checkpoint_version": 0.2, "original_vocab_size": vocabulary, "padded_vocab_size": 64}
    for t in range(tp):
        args = arguments(source, tp, 2, 64, **changes)
        content = {"args": args, "checkpoint_version": 3.0, "module": None, "universal_checkpoint_info": info}
        torch.save(content, iteration / f"mp_rank_{t:02d}_model_states.pt")
    (folder / "latest_universal").write_text("global_step7_universal")
    return iteration


def _cast(content: Any, dtype: torch.dtype) -> Any:
    if isinstance(content, dict):
        return {key: _cast(value, dtype) for key, value in content.items()}
    return content.to(dtype) if isinstance(content, Tensor) else content


def _model_part(
    source: Source,
    names: str,
    shards: list[Tensors],
    vocabulary: tuple[int, int, int],
    ends: tuple[bool, bool],
) -> dict[str, Any]:
    t, tp, rows = vocabulary
    is_first, is_last = ends
    table = LEGACY if names == "legacy" else CORE
    layers = {
        f"layers.{n}.{table[name.rsplit('.', 1)[0]]}.{name.rsplit('.', 1)[1]}": value
        for n, shard in enumerate(shards)
        for name, value in shard.items()
    }
    if names == "fused":  # transformer-engine has norms with the matrix after them
        layers = {
            name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace(
                "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"
            ): value
            for name, value in layers.items()
        }
        layers |= {"layers.0.mlp.linear_fc1._extra_state": None}
    first, last = {}, {}
    if is_first:
        first["word_embeddings"] = rows_of_ranks(source.end("embed.weight"), rows, tp)[t]
        if (positions := source.end("positions.weight")) is not None:
            first["position_embeddings"] = positions
    if is_last:
        last = {k: v for k in ("norm.weight", "norm.bias") if (v := source.end(k)) is not None}
    head = source.end("head.weight") if is_last and not source.config.tie_word_embeddings else None
    tied = rows_of_ranks(source.end("embed.weight"), rows, tp)[t] if is_last and head is None else None
    head = None if head is None else rows_of_ranks(head, rows, tp)[t]
    if names == "legacy":
        inside: dict[str, Any] = {}
        if first:
            inside["embedding"] = {k: {"weight": v} for k, v in first.items()}
        inside["encoder"] = layers | {k.replace("norm.", "final_layernorm."): v for k, v in last.items()}
        if head is not None:
            inside["output_layer"] = {"weight": head}
        model: dict[str, Any] = {"language_model": inside}
        return model | (
            {"word_embeddings_for_head": {"weight": tied}} if tied is not None and not is_first else {}
        )
    flat = {f"embedding.{k}.weight": v for k, v in first.items()} | {
        f"decoder.{k}": v for k, v in layers.items()
    }
    flat |= {f"decoder.{k.replace('norm.', 'final_layernorm.')}": v for k, v in last.items()}
    if head is None and tied is not None and not is_first:
        head = tied
    return flat | ({} if head is None else {"output_layer.weight": head})


def write_layers(folder: Path, source: Source, tp: int, rows: int = 64, **changes: Any) -> Path:
    """DeepSpeed's pipeline: `folder`/global_step7/layer_NN-model_TT-model_states.pt, with gaps in NN."""
    iteration = folder / "global_step7"
    iteration.mkdir(parents=True)
    embedding = rows_of_ranks(source.end("embed.weight"), rows, tp)
    for t in range(tp):
        first = {"word_embeddings.weight": embedding[t]}
        for kind in ("weight", "bias"):
            if (norm := source.end(f"embed_norm.{kind}")) is not None:
                first[f"word_embeddings.norm.{kind}"] = norm
        if (positions := source.end("positions.weight")) is not None:
            first["position_embeddings.weight"] = positions
        files = {1: first}
        for n in range(source.layers):
            shard = layer_shards(source.layer(n), source.heads, tp, 3.0)[t]
            files[3 + n] = {
                f"{LEGACY[name.rsplit('.', 1)[0]]}.{name.rsplit('.', 1)[1]}": value
                for name, value in shard.items()
            }
        last = {kind: source.end(f"norm.{kind}") for kind in ("weight", "bias")}
        files[source.layers + 4] = {kind: value for kind, value in last.items() if value is not None}
        for number, tensors in files.items():
            torch.save(tensors, iteration / f"layer_{number:02d}-model_{t:02d}-model_states.pt")
        args = arguments(source, tp, 2, rows, **changes)
        torch.save(
            {"args": args, "checkpoint_version": 3.0, "module": None},
            iteration / f"mp_rank_{t:02d}_model_states.pt",
        )
    (folder / "latest").write_text("global_step7")
    return folder


def write_torch_dist(folder: Path, source: Source, rows: int = 64, **changes: Any) -> Path:
    """The core's distributed format: equal layers of one tensor stacked, halves of the MLP side by side."""
    iteration = folder / "iter_0000007"
    shards = [layer_shards(source.layer(n), source.heads, 1, 3.0)[0] for n in range(source.layers)]
    one = _model_part(source, "fused", shards, (0, 1, rows), (True, True))
    stacked = {name: value for name, value in one.items() if ".layers." not in name}
    for name in (name for name in one if ".layers.0." in name and one[name] is not None):
        values = [one[name.replace(".layers.0.", f".layers.{n}.")] for n in range(source.layers)]
        stacked[name.replace(".layers.0.", ".layers.")] = torch.stack(values)
    state = stacked | {"optimizer.state.exp_avg.x": torch.ones(2), "rng_state/shard_0_1": torch.ones(2)}
    writer = torch_checkpoint.FileSystemWriter(iteration, single_file_per_rank=True)
    torch_checkpoint.save(state, storage_writer=writer, no_dist=True)
    torch.save(
        {"args": arguments(source, 8, 4, rows, **changes), "checkpoint_version": 3.0}, iteration / "common.pt"
    )
    (iteration / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder
