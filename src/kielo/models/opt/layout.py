"""How each parameter of an OPT lies on the tensor axis: its modules are GPT-2's."""

from kielo.models.gpt2.layout import TENSOR_AXIS

__all__ = ["TENSOR_AXIS"]
