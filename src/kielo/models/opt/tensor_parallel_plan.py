"""Tensor-parallel plan of an OPT, whose modules are GPT-2's."""

from kielo.models.gpt2.tensor_parallel_plan import TENSOR_PARALLEL_PLAN

__all__ = ["TENSOR_PARALLEL_PLAN"]
