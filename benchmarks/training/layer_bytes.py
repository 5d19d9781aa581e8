"""Bytes of activations that a layer keeps from forward to backward, beside Megatron's formula.

    python benchmarks/training/layer_bytes.py

One rank of a job that is not there is laid out as for training, in tensors without memory, and goes forward
with two numbers of layers; the difference of what it then holds is a layer's. The formula counts bytes of
bf16, with flash attention and sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section 4,
without dropout). Prints a table and writes results/layer_bytes.json and results/layer_bytes.md, which
derives the formula.
"""

import argparse
import datetime
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from kielo.models.families import build_model, complete
from kielo.models.family_tables import layer_types
from kielo.parallel.compile import apply_compile
from kielo.parallel.context_parallel import apply_context_parallel
from kielo.parallel.materialise import local, materialise
from kielo.parallel.mesh import build_mesh
from kielo.parallel.projection import apply_projection
from kielo.parallel.recompute import apply_recompute
from kielo.parallel.tensor_parallel import apply_tensor_parallel
from kielo.recipe.sections import Layout, Model, Recompute
from kielo.resolve.activation_bytes import layer_bytes, layer_parts
from kielo.train.build import positions_of_rank
from kielo.verify.rank_watch import RankWatch
from kielo.verify.torch_fakes import fake_tensors, fake_world, groups_of

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from page_tables import put_tables

RESULTS = Path(__file__).parents[1] / "results" / "layer_bytes.json"
MARK = "layers: written by benchmarks/training/layer_bytes.py"
_BF16 = 2
_FEW, _MANY = 1, 3  # layers
LENGTH = 4096  # tokens, one sequence
# Llama 3.1 70B (Dubey et al. 2024, arXiv:2407.21783, table 3), and Megatron's GPT of 175B (Korthikanti et al.
# 2022, table 3).
MODELS = {
    "Llama-3.1-70B": {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28_672, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    },
    "GPT 175B": {
        "model_type": "gpt2", "hidden_size": 12_288, "intermediate_size": 49_152, "num_attention_heads": 96,
        "num_key_value_heads": 96, "head_dim": 128, "hidden_act": "gelu_new", "attention_bias": True,
        "mlp_bias": True,
    },
}  # fmt: skip


def model_of(shape: dict[str, Any], sequence_length: int) -> Model:
    """Returns a complete model; its vocabulary and number of layers do not matter here."""
    keys = {"vocab_size": 1024, "tie_word_embeddings": False, "num_hidden_layers": _MANY}
    return complete(Model(**keys | shape), sequence_length)


def formula_bytes(model: Model, tokens: int, layout: Layout) -> float:
    """Returns the formula's bytes of a layer: s b h / t × (12 + 4 g/a + 6 f/h), a plain MLP 4 f/h.

    `norms` takes away the normed inputs of attention and MLP, 4; `activations` the MLP's product, 2 f/h.
    `operators` keeps the layer's input, 2, and what its matrices and attention give: queries 2, keys and
    values 4 g/a, attention 2, the summed outputs of attention and MLP 2 + 2, and 2 f/h for each other matrix
    of the MLP. `full` keeps the input.
    """
    if layout.recompute == "full":
        return tokens * model.hidden_size / layout.tensor * 2
    groups = model.num_key_value_heads / model.num_attention_heads
    width, matrices = model.intermediate_size / model.hidden_size, layer_parts(model).mlp_matrices
    if layout.recompute == "operators":
        units = 10 + 4 * groups + 2 * (matrices - 1) * width
    else:
        units = 12 + 4 * groups + (6 if matrices == 3 else 4) * width
        units -= 4 * ("norms" in layout.recomputed)
        units -= 2 * width * ("activations" in layout.recomputed)
    return tokens * model.hidden_size / layout.tensor * units


def kept_bytes(model: Model, sequence_length: int, layout: Layout) -> float:
    """Returns the bytes of a layer that rank 0 of the tensor axis holds after the forward, in bf16."""
    one_stage = layout.model_copy(update={"pipeline": 1, "shard": 1})
    with fake_world(0, layout.tensor * layout.context, has_pipeline=False) as world:
        mesh = build_mesh(world, one_stage)
        held = []
        for layers in (_FEW, _MANY):
            some = model.model_copy(update={"num_hidden_layers": layers})
            with torch.device("meta"):
                laid_out = build_model(some).to(torch.bfloat16)
            apply_projection(laid_out)
            apply_tensor_parallel(laid_out, mesh, one_stage)
            apply_context_parallel(laid_out, mesh, one_stage)
            apply_recompute(laid_out, layout)
            with fake_tensors(), RankWatch(*groups_of(mesh)) as watch:
                laid_out = materialise(laid_out, world.device, None)
                watch.ledger.name(map(local, laid_out.parameters()), "parameters")
                tokens = torch.zeros(1, sequence_length // layout.context, dtype=torch.int64)
                hidden = laid_out(tokens, positions_s=positions_of_rank(sequence_length, mesh))
                held.append(watch.ledger.held_bytes("activations"))
                del hidden
    return (held[1] - held[0]) / (_MANY - _FEW)


def compiled_bytes(model: Model, sequence_length: int, layout: Layout) -> float:
    """Returns what `kept_bytes` does for compiled layers: storages that autograd saves, less the weights'.

    The compiler partitions forward and backward as for machine code, which is not written. Both models have
    each kind of layer: layers of a kind share a table of RoPE and a mask.
    """
    held = []
    kinds = layer_types(model)
    few = 1 + max(map(kinds.index, set(kinds[:_MANY])))
    numbers = few, few + _MANY - _FEW
    torch._dynamo.reset()  # once: layers of both models share their code
    with fake_world(0, layout.tensor, has_pipeline=False) as world:
        mesh = build_mesh(world, layout.model_copy(update={"shard": 1}))
        for layers in numbers:
            with torch.device("meta"):
                some = model.model_copy(update={"num_hidden_layers": layers})
                compiled = build_model(some).to(torch.bfloat16)
            apply_projection(compiled)
            apply_tensor_parallel(compiled, mesh, layout)
            apply_recompute(compiled, layout)
            materialise(compiled, world.device, None)
            apply_compile(compiled)
            weights = {local(weight).untyped_storage()._cdata for weight in compiled.parameters()}
            saved: dict[int, Tensor] = {}

            def pack(tensor: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
                saved[local(tensor).untyped_storage()._cdata] = tensor
                return tensor

            with saved_tensors_hooks(pack, lambda tensor: tensor):
                compiled(torch.zeros(1, sequence_length, dtype=torch.int64))
            held.append(
                sum(local(x).untyped_storage().nbytes() for key, x in saved.items() if key not in weights)
            )
    return (held[1] - held[0]) / (_MANY - _FEW)


def measured() -> Iterator[dict[str, Any]]:
    """Yields a row for each model, number of tensor ranks and choice of `layout.recompute`."""
    for name, shape in MODELS.items():
        model = model_of(shape, LENGTH)
        for tensor in (2, 4, 8):
            for recompute in get_args(Recompute):
                layout = Layout(tensor=tensor, recompute=recompute)
                kept = kept_bytes(model, LENGTH, layout)
                formula = formula_bytes(model, LENGTH, layout)
                yield {
                    "model": name, "tensor": tensor, "recompute": recompute, "bytes": round(kept),
                    "formula_bytes": round(formula), "by_the_formula": round(kept / formula, 4),
                    "planned_bytes": round(layer_bytes(model, layout, _BF16)[0] * LENGTH),
                }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """Returns the measured bytes of all models, numbers of tensor ranks and choices, as Markdown."""
    lines = ["| model | tensor ranks | recompute | MB of a layer | by the formula |", "|---|--:|---|--:|--:|"]
    lines += [
        f"| {row['model']} | {row['tensor']} | `{row['recompute']}` | {row['bytes'] / 1e6:.1f} "
        f"| {row['by_the_formula']:.3f} |"
        for row in found["layers"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--to", type=Path, default=RESULTS, help="the file to write")
    options = parser.parse_args()
    rows = []
    for row in measured():
        rows.append(row)
        print(
            f"{row['model']}, TP{row['tensor']}, {row['recompute']}: {row['bytes'] / 1e6:.1f} MB "
            f"{row['by_the_formula']:.3f} × the formula",
            flush=True,
        )
    found = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "tokens": LENGTH,
        "layers": rows,
    }
    options.to.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.to == RESULTS:
        put_tables(RESULTS.with_suffix(".md"), {MARK: table(found)})


if __name__ == "__main__":
    main()
