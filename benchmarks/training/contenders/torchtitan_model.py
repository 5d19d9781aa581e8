"""torchtitan's Llama 3 in its trainer's loop, with that trainer's layout, compilation and loss; GPU only.

Its recipes for one device are followed: FSDP2's mixed precision on a mesh of one rank, each block compiled,
the chunked loss, FlexAttention's causal mask; without activation checkpointing, which no contender uses, and
without CUDA graphs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as distributed
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers, parallelize_llama

from contenders.contender import OPTIMISER, Contender, LeftOut, Work, adamw, next_tokens
from kielo.models.llama.tables import to_hugging_face

_INIT: dict[str, Any] = {"weight": nn.init.zeros_}  # all are filled afterwards


def build(work: Work) -> Contender:
    return Torchtitan(work, is_fp8=False)


def build_fp8(work: Work) -> Contender:
    return Torchtitan(work, is_fp8=True)


class Torchtitan(Contender):
    def __init__(self, work: Work, is_fp8: bool) -> None:
        super().__init__(work)
        if work.device.type != "cuda" or work.precision != "bf16":
            raise LeftOut("torchtitan trains on GPUs, in bf16")
        self.note = "each block and the loss compiled" + ("; rowwise scaling" if is_fp8 else "")
        config = _config(work)
        if is_fp8:
            converter = Float8LinearConverter.Config(model_compile_enabled=True, filter_fqns=["lm_head"])
            config = converter.build().convert(config)
        compiled = CompileConfig(enable=True)
        parallelism = ParallelismConfig(data_parallel_shard_degree=1)
        dims = ParallelDims.from_config(parallelism, world_size=1)
        dims.build_mesh()
        distributed.set_spmd_backend(parallelism.spmd_backend)
        self._context = distributed.get_spmd_context(parallel_dims=dims)
        with torch.device("meta"):
            model = config.build()
        self._model = parallelize_llama(
            model,
            parallel_dims=dims,
            training=TrainingConfig(
                seq_len=work.sequence_length, local_batch_size=work.micro_batch_sequences
            ),
            parallelism=parallelism,
            compile_config=compiled,
            ac_config=None,
            dump_folder="",
        )
        self._model.to_empty(device=work.device)
        with torch.no_grad():
            self._model.init_weights(buffer_device=None)
            _fill(work, self._model)
        self._model.train()
        loss = ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=work.model.vocab_size)
        )
        self._loss = loss.build(compile_config=compiled)
        self._loss.set_lm_head(self._model.lm_head)
        self._model._skip_lm_head = True
        self._optimiser = adamw(work, self._model)
        sequences = work.micro_batches * work.micro_batch_sequences
        self._counted = torch.tensor(sequences * (work.sequence_length - 1), device=work.device)
        positions_s = torch.arange(work.sequence_length, device=work.device)
        self._positions_bs = positions_s.expand(work.micro_batch_sequences, -1).contiguous()

    def step(self, number: int) -> Tensor:
        total = torch.zeros((), device=self.work.device)
        for tokens_bs in self.work.micro_batch_tokens(number):
            masks = self._model.get_attention_masks(positions=self._positions_bs)
            with self._context():
                hidden_bsd = self._model(tokens_bs, positions=self._positions_bs, attention_masks=masks)
                loss, _ = self._loss(hidden_bsd, next_tokens(tokens_bs), self._counted)
                loss.backward()
            total += loss.detach()
        with record_function(OPTIMISER):
            limit = self.work.resolved.identity.train.max_gradient_norm
            nn.utils.clip_grad_norm_(self._model.parameters(), limit, foreach=True)
            self._optimiser.step()
            self._optimiser.zero_grad()
        return total


def _config(work: Work) -> Llama3Model.Config:
    model = work.model
    rope = ComplexRoPE.Config(
        dim=model.head_dim, max_seq_len=work.sequence_length, theta=model.rope_theta, scaling="none"
    )
    return Llama3Model.Config(
        dim=model.hidden_size,
        vocab_size=model.vocab_size,
        enable_weight_tying=bool(model.tie_word_embeddings),
        tok_embeddings=Embedding.Config(
            num_embeddings=model.vocab_size, embedding_dim=model.hidden_size, param_init=_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=model.hidden_size, param_init=_INIT),
        lm_head=Linear.Config(in_features=model.hidden_size, out_features=model.vocab_size, param_init=_INIT),
        layers=_build_llama3_layers(
            n_layers=model.num_hidden_layers,
            dim=model.hidden_size,
            n_heads=model.num_attention_heads,
            n_kv_heads=model.num_key_value_heads,
            hidden_dim=model.intermediate_size,
            rope=rope,
            fuse_qkv=True,
            attn_backend="flex",
        ),
    )


def _fill(work: Work, model: nn.Module) -> None:
    """Fills in the weights of the work.

    torchtitan's fused queries, keys and values are group by group, and its rope turns neighbours where
    Hugging Face's turns halves, so queries and keys have another order of rows.
    """
    shapes = {ours: shape for _, ours, shape in work.hugging_face_values()}
    parameters = {
        _plain(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    others = {"embed": "tok_embeddings", "norm": "norm", "head": "lm_head"}
    parts = {
        "attention_norm": "attention_norm", "attention.o": "attention.wo", "mlp_norm": "ffn_norm",
        "mlp.gate": "feed_forward.w1", "mlp.up": "feed_forward.w3", "mlp.down": "feed_forward.w2",
    }  # fmt: skip
    for ours in to_hugging_face(work.model):
        module = ours.removesuffix(".weight")
        if not module.startswith("layers."):
            name, values = others[module], work.value(ours, shapes[ours])
        else:
            _, number, part = module.split(".", 2)
            if part in ("attention.k", "attention.v"):
                continue
            is_fused = part == "attention.q"
            name = f"layers.{number}." + ("attention.qkv_linear.wqkv" if is_fused else parts[part])
            values = _fused(work, ours, shapes) if is_fused else work.value(ours, shapes[ours])
        parameter = parameters[f"{name}.weight"]
        getattr(parameter, "_local_tensor", parameter).copy_(values)


def _fused(work: Work, queries: str, shapes: dict[str, tuple[int, ...]]) -> Tensor:
    groups, size = work.model.num_key_value_heads, work.model.head_dim
    names = [queries.replace("attention.q", f"attention.{letter}") for letter in "qkv"]
    q, k, v = (
        work.value(name, shapes[name]).view(groups, -1, size, work.model.hidden_size) for name in names
    )
    q, k = (part.unflatten(2, (2, size // 2)).transpose(2, 3).flatten(2, 3) for part in (q, k))
    return torch.cat([q, k, v], dim=1).flatten(0, 2)


def _plain(name: str) -> str:
    """Returns the name without the parts that compilation and checkpointing add."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
