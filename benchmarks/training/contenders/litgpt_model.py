"""LitGPT's GPT in a plain loop, with the loss of its own pretraining and compiled as that compiles it."""

import torch
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy

from contenders.contender import Contender, PlainLoop, Work, next_tokens, on_device

_LAYER = {
    "attention_norm": "norm_1",
    "attention.o": "attn.proj",
    "mlp_norm": "norm_2",
    "mlp.gate": "mlp.fc_1",
    "mlp.up": "mlp.fc_2",
    "mlp.down": "mlp.proj",
}
_OTHERS = {"embed": "transformer.wte", "norm": "transformer.ln_f", "head": "lm_head"}


def build(work: Work) -> Contender:
    model = on_device(work, lambda: GPT(_config(work)))
    model.reset_parameters()  # the rotary tables: buffers without memory yet
    model.cos, model.sin = model.cos.to(work.device), model.sin.to(work.device)
    if work.model.tie_word_embeddings:
        model.lm_head.weight = model.transformer.wte.weight
    _fill(work, dict(model.named_parameters(remove_duplicate=False)))
    called = torch.compile(model) if work.peers_compile else model

    def loss_of(tokens_bs: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(called(tokens_bs), next_tokens(tokens_bs))

    return PlainLoop(work, model, loss_of, "compiled whole" if work.peers_compile else "")


def _config(work: Work) -> Config:
    model = work.model
    return Config(
        block_size=work.sequence_length,
        n_layer=model.num_hidden_layers,
        n_embd=model.hidden_size,
        vocab_size=model.vocab_size,
        padded_vocab_size=model.vocab_size,
        n_head=model.num_attention_heads,
        n_query_groups=model.num_key_value_heads,
        head_size=model.head_dim,
        rope_base=int(model.rope_theta),
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=model.rms_norm_eps,
        mlp_class_name="LLaMAMLP",
        intermediate_size=model.intermediate_size,
    )


def _fill(work: Work, parameters: dict[str, torch.nn.Parameter]) -> None:
    values = {ours: shape for _, ours, shape in work.hugging_face_values()}
    with torch.no_grad():
        for ours, shape in values.items():
            module = ours.removesuffix(".weight")
            if module in _OTHERS:
                parameters[f"{_OTHERS[module]}.weight"].copy_(work.value(ours, shape))
                continue
            _, number, part = module.split(".", 2)
            place = f"transformer.h.{number}"
            if part in _LAYER:
                parameters[f"{place}.{_LAYER[part]}.weight"].copy_(work.value(ours, shape))
            elif part == "attention.q":  # queries, keys and values lie one after the other in one matrix
                names = [ours.replace("attention.q", f"attention.{letter}") for letter in "qkv"]
                parameters[f"{place}.attn.qkv.weight"].copy_(
                    torch.cat([work.value(name, values[name]) for name in names])
                )
