"""OLMo-core's Transformer in a plain loop, each block compiled where its own recipes compile."""

import torch
from olmo_core.nn.attention.backend import AttentionBackendName
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.transformer import TransformerConfig

from contenders.contender import Contender, PlainLoop, Work, next_tokens

_PARTS = {
    "attention_norm": "attention_norm",
    "attention.q": "attention.w_q",
    "attention.k": "attention.w_k",
    "attention.v": "attention.w_v",
    "attention.o": "attention.w_out",
    "mlp_norm": "feed_forward_norm",
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
}
_OTHERS = {"embed": "embeddings", "norm": "lm_head.norm", "head": "lm_head.w_out"}


def build(work: Work) -> Contender:
    config = work.model
    model = TransformerConfig.llama_like(
        d_model=config.hidden_size,
        vocab_size=config.vocab_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        layer_norm_eps=config.rms_norm_eps,
        rope_theta=int(config.rope_theta),
        feed_forward=FeedForwardConfig(hidden_size=config.intermediate_size, bias=False),
        attn_backend=AttentionBackendName.torch,  # SDPA: the others need packages of their own
        tie_word_embeddings=bool(config.tie_word_embeddings),
    ).build(init_device="meta")
    if work.peers_compile:
        model.apply_compile()
    model.to_empty(device=work.device)
    model.init_weights(max_seq_len=work.sequence_length, device=work.device)  # and its rotary tables
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for _, ours, shape in work.hugging_face_values():
            parameters[_name(ours, parameters)].copy_(work.value(ours, shape))

    def loss_of(tokens_bs: torch.Tensor) -> torch.Tensor:
        return model(tokens_bs, labels=next_tokens(tokens_bs), return_logits=False).loss

    return PlainLoop(work, model, loss_of, "each block compiled" if work.peers_compile else "")


def _name(ours: str, parameters: dict[str, torch.nn.Parameter]) -> str:
    module = ours.removesuffix(".weight")
    if module in _OTHERS:
        return f"{_OTHERS[module]}.weight"
    _, number, part = module.split(".", 2)
    # Some versions call a block's attention its sequence mixer.
    name = f"blocks.{number}.{_PARTS[part]}.weight"
    return name if name in parameters else name.replace("attention.", "sequence_mixer.")
