"""The planner's answers to questions about LUMI and H100 clusters, beside what people measured.

    python benchmarks/planner/planner_questions.py

140B on LUMI (CSC's blog post on scaling to thousands of MI250X): 161.2 TFLOP/s a module at 48 nodes and 80 %
of that at 768; 172B on H100 (LLM-jp, on Google's A3 nodes): 400 TFLOP/s in bf16 and 545 to 553 with FP8; 70B
on LUMI: does TP8 × PP4 fit 4 nodes, and is it faster than TP8 × PP8? Shapes and conventions that the texts
leave open are varied, and each line says which it took.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from published_memory import formula_memory_bytes

from kielo.plan.efficiency import ENGINES, Efficiency, fitted
from kielo.plan.planned_layout import interval
from kielo.plan.step_seconds import step_seconds
from kielo.plan.workload import ATTENTION_KERNELS, RECIPES, Workload, machine_columns
from kielo.recipe.cards import accelerator, cluster
from kielo.resolve.memory import usable_bytes

GIB = 2**30


@dataclass(frozen=True)
class Question:
    """One training by Megatron's rules: ZeRO-1, bf16 weights, `engine` as in the table of published runs."""

    model: dict[str, Any]
    machine: str
    devices: int
    tensor: int
    pipeline: int
    batch: int
    engine: str
    chunks: int = 1
    recompute: bool = False
    kernel: str = "flash"
    recipe: str = "bf16"
    sequence_parallel: bool = True
    gradient_bytes: int = 4
    network_gbit_per_second: float = 0.0  # of a node, one way; 0: the machine's
    # of the network that rings were measured to reach; 0: what is fitted on all machines
    ring_share: float = 0.0
    hides_tensor_traffic: bool = True  # as NeMo does; Megatron-LM by itself waits for it

    def workload(self) -> Workload:
        site = cluster(self.machine)
        card = accelerator(site.accelerator)
        data = self.devices // (self.tensor * self.pipeline)
        layout = {
            "tensor": self.tensor, "pipeline": self.pipeline, "chunks": self.chunks, "context": 1,
            "data": data,
            "shard": data, "zero": 1, "sequence_parallel": float(self.sequence_parallel), "micro_batch": 1,
            "micro_batches": self.batch // data, "layers_again": float(self.recompute),
            "attention_again": 0.0,
            "operators_again": 0.0, "splits_backward": 0.0, "weight_bytes": 2,
            "gradient_bytes": self.gradient_bytes,
            "optimiser_bytes": 12, "dropout": 0.0, "unfused_norms": 0.0, "whole_logits": 0.0, "tied": 0.0,
            "ring_share": self.ring_share,
            "recipe": RECIPES.index(self.recipe), "kernel": ATTENTION_KERNELS.index(self.kernel),
            "engine": ENGINES.index(self.engine),
        }  # fmt: skip
        network = (self.network_gbit_per_second or site.network_gbit_per_second_per_node) * 1e9 / 8
        return Workload.of(
            [self.model | layout | machine_columns(card, network, site.devices_per_node, self.recipe)]
        )

    def answer(self) -> dict[str, float]:
        """Returns seconds a step, TFLOP/s a device (model FLOPs, full attention), GiB of a device.

        "printed" is what Megatron-DeepSpeed would print as TFLOP/s without recomputation: its formula counts
        12 hidden² weights a layer, whatever the MLP's width and the heads of keys (megatron/utils.py,
        `throughput_calculator`; a later version has a "correction ... for all with GQA").
        """
        work = self.workload()
        efficiency, figures = fitted()
        if not self.hides_tensor_traffic:
            efficiency = Efficiency(efficiency.values | {"tensor_exposed": np.ones(len(ENGINES))})
        seconds = step_seconds(work, efficiency)
        low, high = interval(seconds.total, figures)
        weights = work.layers * work.layer_parameters + work.vocabulary * work.hidden
        scores = work.layers * work.heads * work.head_dim * work.sequence
        flops = (6 * weights + 12 * scores) * work.tokens_per_step / work.devices
        tokens = work.tokens_per_step / work.devices
        of_layers = 72 * work.layers * work.hidden**2 * (1 + work.sequence / (6 * work.hidden))
        printed = (of_layers + 4.5 * work.vocabulary * work.hidden) * tokens
        peak = formula_memory_bytes(work).peak("reserved")
        usable = usable_bytes(accelerator(cluster(self.machine).accelerator))
        return {
            "seconds": float(seconds.total[0]), "low": float(low[0]), "high": float(high[0]),
            "tflops": float((flops / seconds.total)[0]) / 1e12,
            "printed": float((printed / seconds.total)[0]) / 1e12,
            "tokens_per_second": float((work.tokens_per_step / seconds.total)[0]),
            "bubble": float((seconds.bubble / seconds.total)[0]), "gib": float(peak[0]) / GIB,
            "fits": float(peak[0] <= usable),
        }  # fmt: skip


def model(layers: int, hidden: int, heads: tuple[int, int], ffn: int, **others: int) -> dict[str, Any]:
    """Returns the model's columns; `heads` are (of queries, of keys)."""
    return {
        "layers": layers, "hidden": hidden, "heads": heads[0], "kv_heads": heads[1],
        "head_dim": hidden / heads[0], "ffn": ffn,
    } | others  # fmt: skip


BLOG_140B = model(80, 12288, (96, 96), 49152, mlp_matrices=2, vocabulary=131072, sequence=5120)
# Grouped queries and a gated MLP, as in Viking-33B, which followed Poro: the shape of `lumi_140b_scaling`.
GROUPED_140B = model(88, 12288, (96, 8), 32768, mlp_matrices=3, vocabulary=131072, sequence=5120)
LLMJP_172B = model(96, 12288, (96, 16), 38464, mlp_matrices=3, vocabulary=99584, sequence=4096)
# Each with those before it. The nodes are a3-highgpu-8g of Google's cloud (the script's folder in
# llm-jp/Megatron-LM says so), with four networks of 200 Gb/s; the trainer is Megatron-LM itself, where
# NVIDIA's own figures are of NeMo.
LLMJP_ASSUMPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("a DGX's network, six chunks a rank", {"chunks": 6}),
    ("no interleaving, as the script has it", {}),
    ("four networks of 200 Gb/s a node, as Google's A3 has", {"network_gbit_per_second": 800.0}),
    ("tensor traffic waited for, as Megatron-LM does",
        {"network_gbit_per_second": 800.0, "hides_tensor_traffic": False}),
)  # fmt: skip
LLAMA_70B = model(80, 8192, (64, 8), 28672, mlp_matrices=3, vocabulary=128256, sequence=4096)


def main() -> None:
    print(
        "140B on LUMI, TP8 PP8, micro-batch 1, batch 768 (measured: 161.2 a module at 48 nodes, 80 % at 768)"
    )
    for kernel, recompute in (("flash", False), ("flash", True), ("fused_softmax", False)):
        for chunks in (1, 2, 5):
            few, many = (
                Question(
                    BLOG_140B, "lumi_g", nodes * 8, 8, 8, 768, "megatron_deepspeed", chunks, recompute, kernel
                ).answer()
                for nodes in (48, 768)
            )
            hardware = 4 / 3 if recompute else 1.0
            print(
                f"  {kernel:13} recompute {'full' if recompute else 'none':4} chunks {chunks}: "
                f"{2 * few['tflops']:5.1f} model ({2 * few['tflops'] * hardware:5.1f} hardware) TFLOP/s a "
                f"module at 48 nodes, {few['gib']:.0f} GiB; {many['tflops'] / few['tflops']:.0%} at 768, "
                f"bubble {many['bubble']:.0%}"
            )
    for chunks in (1, 11):
        answer = Question(GROUPED_140B, "lumi_g", 384, 8, 8, 768, "megatron_deepspeed", chunks).answer()
        print(
            f"  flash, recompute none, grouped queries, chunks {chunks}: {2 * answer['tflops']:.1f} model "
            f"TFLOP/s a module at 48 nodes, {2 * answer['printed']:.1f} as Megatron-DeepSpeed prints them"
        )
    for name, share in (("as fitted", 0.0), ("as LUMI's logs of 2023 have them", 0.39)):
        weak = [
            Question(
                BLOG_140B, "lumi_g", nodes * 8, 8, 8, nodes * 16, "megatron_deepspeed", ring_share=share
            ).answer()
            for nodes in (48, 192, 768)
        ]
        few, many = (
            Question(
                BLOG_140B, "lumi_g", nodes * 8, 8, 8, 768, "megatron_deepspeed", 5, ring_share=share
            ).answer()
            for nodes in (48, 768)
        )
        scaling = ", ".join(f"{2 * answer['tflops']:.1f}" for answer in weak)
        print(
            f"  rings over the network {name}: weak scaling at 48, 192, 768 nodes {scaling}; "
            f"five chunks keep {many['tflops'] / few['tflops']:.0%} at 768"
        )
    print("172B on H100, TP4 PP16, 512 devices, batch 1728 (measured: 400 in bf16, 545 to 553 with FP8)")
    for assumption, changes in LLMJP_ASSUMPTIONS:
        for recipe, measured in (("bf16", 400.0), ("fp8", 549.0)):
            question = Question(
                LLMJP_172B, "dgx_h100", 512, 4, 16, 1728, "megatron_te", recipe=recipe, **changes
            )
            answer = question.answer()
            print(
                f"  {assumption:58} {recipe:4}: {answer['tflops']:.0f} TFLOP/s "
                f"({answer['tflops'] / measured - 1:+.0%}), "
                f"bubble {answer['bubble']:.0%}, {answer['gib']:.0f} GiB"
            )
    print("Llama 70B on LUMI, sequence 4096, micro-batch 1")
    for nodes, batch in ((4, 64), (16, 256), (128, 1024)):
        for pipeline in (4, 8):
            if nodes * 8 % (8 * pipeline):
                continue
            for recompute in (False, True):
                question = Question(
                    LLAMA_70B, "lumi_g", nodes * 8, 8, pipeline, batch, "megatron_te", recompute=recompute
                )
                answer = question.answer()
                print(
                    f"  {nodes:3} nodes TP8 PP{pipeline} recompute {'full' if recompute else 'none':4} "
                    f"batch {batch}: {answer['gib']:.0f} GiB "
                    f"({'fits' if answer['fits'] else 'does not fit'}), {answer['tokens_per_second']:.0f} "
                    f"tokens/s, bubble {answer['bubble']:.0%}"
                )


if __name__ == "__main__":
    main()
