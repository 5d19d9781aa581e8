"""Write a small model of megatron-core in both of its formats, and its logits: the referee of the import.

python -m tests.checkpoint.megatron_core_model {llama,gpt} FOLDER
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn import functional as F


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    # What the core asks of a GPU that is not there.
    torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: "cpu"

    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    no_dropout = SimpleNamespace(fork=contextlib.nullcontext)
    tensor_parallel.get_cuda_rng_tracker = lambda: no_dropout
    parallel_state.initialize_model_parallel(1, 1)
    is_llama = kind == "llama"
    settings = {
        "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24,
        "num_query_groups": 2 if is_llama else 4, "kv_channels": 4, "add_bias_linear": not is_llama,
        "layernorm_epsilon": 1e-5, "normalization": "RMSNorm" if is_llama else "LayerNorm",
    }  # fmt: skip
    config = TransformerConfig(
        **settings, gated_linear_unit=is_llama, activation_func=F.silu if is_llama else F.gelu,
        use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0,
    )  # fmt: skip
    positions = "rope" if is_llama else "learned_absolute"
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization=settings["normalization"]), vocab_size=64,
        max_sequence_length=32, position_embedding_type=positions,
        share_embeddings_and_output_weights=not is_llama,
    ).eval()  # fmt: skip
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
        tokens = torch.randint(0, 64, (2, 24))
        # True hides.
        mask = torch.ones(24, 24, dtype=torch.bool).triu(1)[None, None]
        logits = model(tokens, torch.arange(24).expand(2, 24), mask)
    torch.save(tokens, folder / "tokens.pt")
    torch.save(logits, folder / "logits.pt")
    given = {name: value for name, value in settings.items() if name != "layernorm_epsilon"} | {
        "norm_epsilon": 1e-5, "swiglu": is_llama, "position_embedding_type": positions, "seq_length": 32,
        "max_position_embeddings": 32, "padded_vocab_size": 64, "bias_gelu_fusion": False,
        "untie_embeddings_and_output_weights": is_llama, "group_query_attention": is_llama,
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "rotary_base": 10000,
    }  # fmt: skip
    state = {"args": argparse.Namespace(**given), "checkpoint_version": 3.0, "iteration": 7}
    place = folder / "legacy" / "iter_0000007" / "mp_rank_00"
    place.mkdir(parents=True)
    torch.save(state | {"model": model.state_dict()}, place / "model_optim_rng.pt")
    place = folder / "torch_dist" / "iter_0000007"
    place.mkdir(parents=True)
    sharded = state | {"model": model.sharded_state_dict()}
    strategy = dist_checkpointing.serialization.get_default_save_sharded_strategy("torch_dist", 1)
    dist_checkpointing.save(sharded, str(place), sharded_strategy=strategy)
    for form in ("legacy", "torch_dist"):
        (folder / form / "latest_checkpointed_iteration.txt").write_text("7")


if __name__ == "__main__":
    main()
