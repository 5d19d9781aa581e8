"""Megatron-Core's GPTModel with Transformer Engine's layers, optimiser and schedule; GPU only.

Set up as Megatron-LM's own scripts set up one GPU in bf16: weights in bf16 beside fp32 copies in the
optimiser, gradients summed in fp32 in one buffer. FP8 by Transformer Engine's tensorwise ("current") scaling,
the first and last layer too.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformer_engine.pytorch  # noqa: F401  Megatron-Core leaves its layers out in silence where this is missing
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.profiler import record_function

from contenders.contender import OPTIMISER, Contender, LeftOut, Work, learning_rate, next_tokens


def build(work: Work) -> Contender:
    return Megatron(work, is_fp8=False)


def build_fp8(work: Work) -> Contender:
    return Megatron(work, is_fp8=True)


class Megatron(Contender):
    def __init__(self, work: Work, is_fp8: bool) -> None:
        super().__init__(work)
        if work.device.type != "cuda" or work.precision != "bf16":
            raise LeftOut("Megatron-Core trains on GPUs, in bf16")
        self.note = "Transformer Engine" + ("; tensorwise scaling" if is_fp8 else "")
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
            model_parallel_cuda_manual_seed(1)
        config = _config(work, is_fp8)
        model = GPTModel(
            config,
            get_gpt_layer_with_transformer_engine_spec(),
            vocab_size=work.model.vocab_size,
            max_sequence_length=work.sequence_length,
            share_embeddings_and_output_weights=bool(work.model.tie_word_embeddings),
            position_embedding_type="rope",
            rotary_base=int(work.model.rope_theta),
        ).to(work.device)
        _fill(work, model)
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        self._model = DistributedDataParallel(config, settings, Float16Module(config, model))
        identity = work.resolved.identity
        self._optimiser = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=learning_rate(work),
                bf16=True,
                params_dtype=torch.bfloat16,
                weight_decay=identity.train.weight_decay,
                adam_beta1=identity.train.adam_beta1,
                adam_beta2=identity.train.adam_beta2,
                adam_eps=identity.train.adam_epsilon,
                clip_grad=identity.train.max_gradient_norm,
            ),
            [self._model],
        )
        for group in self._optimiser.param_groups:  # a schedule would set it
            group["lr"] = learning_rate(work)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimiser.scale_loss
        self._go = get_forward_backward_func()
        self._positions = torch.arange(work.sequence_length, device=work.device).expand(
            work.micro_batch_sequences, -1
        )

    def step(self, number: int) -> Tensor:
        work = self.work
        self._model.zero_grad_buffer()
        self._optimiser.zero_grad()
        parts = self._go(
            forward_step_func=self._forward,
            data_iterator=work.micro_batch_tokens(number),
            model=[self._model],
            num_microbatches=work.micro_batches,
            seq_length=work.sequence_length,
            micro_batch_size=work.micro_batch_sequences,
            forward_only=False,
        )
        with record_function(OPTIMISER):
            self._optimiser.step()
        return torch.stack([part["loss"] for part in parts]).mean()

    def _forward(self, micro_batches: Iterator[Tensor], model: torch.nn.Module) -> tuple[Tensor, Any]:
        tokens_bs = next(micro_batches)
        labels_bs = next_tokens(tokens_bs)
        is_counted = labels_bs >= 0
        losses_bs = model(tokens_bs, self._positions, None, labels=labels_bs.clamp(min=0))
        return losses_bs, partial(_mean, is_counted)


def _mean(is_counted: Tensor, losses_bs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (losses_bs.float() * is_counted).sum() / is_counted.sum()
    return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss in place


def _config(work: Work, is_fp8: bool) -> TransformerConfig:
    model = work.model
    fp8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"} if is_fp8 else {}
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bias_activation_fusion=True,
        apply_rope_fusion=True,
        masked_softmax_fusion=True,
        cross_entropy_loss_fusion=True,
        gradient_accumulation_fusion=False,  # needs APEX
        **fp8,
    )


def _fill(work: Work, model: GPTModel) -> None:
    """Fills in the weights of the work, rounded to bf16.

    Queries, keys and values are group by group in one matrix, gate over up in another, and norms inside the
    matrices after them.
    """
    shapes = {ours: shape for _, ours, shape in work.hugging_face_values()}
    parameters = dict(model.named_parameters())
    groups, size, hidden = work.model.num_key_value_heads, work.model.head_dim, work.model.hidden_size

    def value(name: str) -> Tensor:
        return work.value(name, shapes[name])

    def fill(name: str, values: Tensor) -> None:
        parameters[name].copy_(values)

    with torch.no_grad():
        fill("embedding.word_embeddings.weight", value("embed.weight"))
        fill("decoder.final_layernorm.weight", value("norm.weight"))
        if not work.model.tie_word_embeddings:
            fill("output_layer.weight", value("head.weight"))
        for number in range(work.model.num_hidden_layers):
            ours, theirs = f"layers.{number}.", f"decoder.layers.{number}."
            q, k, v = (
                value(f"{ours}attention.{letter}.weight").view(groups, -1, size, hidden) for letter in "qkv"
            )
            fill(f"{theirs}self_attention.linear_qkv.weight", torch.cat([q, k, v], dim=1).flatten(0, 2))
            fill(
                f"{theirs}self_attention.linear_qkv.layer_norm_weight", value(f"{ours}attention_norm.weight")
            )
            fill(f"{theirs}self_attention.linear_proj.weight", value(f"{ours}attention.o.weight"))
            gate_up = [value(f"{ours}mlp.{part}.weight") for part in ("gate", "up")]
            fill(f"{theirs}mlp.linear_fc1.weight", torch.cat(gate_up))
            fill(f"{theirs}mlp.linear_fc1.layer_norm_weight", value(f"{ours}mlp_norm.weight"))
            fill(f"{theirs}mlp.linear_fc2.weight", value(f"{ours}mlp.down.weight"))
