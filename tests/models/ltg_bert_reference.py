"""LTG-BERT by its published equations, slow and plain, in float64: loops over queries and keys of each head.

Written from the equations (Samuel et al. 2023, arXiv:2303.09859; He et al. 2021, arXiv:2006.03654, equation
4), with the published names of the tensors. It shares no code with `kielo.models`.
"""

import math

import torch
from torch import Tensor

State = dict[str, Tensor]


class Reference:
    """An LTG-BERT of tensors by their published names, float64, that may require gradients."""

    def __init__(self, state: State, heads: int, epsilon: float, interleaved: bool, longest: int):
        self.state, self.heads, self.epsilon = state, heads, epsilon
        self.interleaved, self.longest = interleaved, longest
        self.bucket = (len(state["embedding.relative_embedding"]) + 1) // 2
        self.layers = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("transformer"))

    def logits(self, tokens: list[int], documents: list[int] | None = None) -> Tensor:
        """[T, vocabulary] of one sequence; in documents with negative numbers a token sees none after it."""
        state = self.state
        x = self._norm(state["embedding.word_embedding.weight"][tokens])
        positions = self._norm(state["embedding.relative_embedding"])
        positions = (
            positions * state["embedding.relative_layer_norm.weight"]
            + state["embedding.relative_layer_norm.bias"]
        )
        for layer in range(self.layers):
            place = f"transformer.layers.{layer}."
            x = x + self._attention(place + "attention.", x, positions, documents)
            x = x + self._feed_forward(place + "mlp.mlp.", x)
        y = (
            self._norm(x) @ state["classifier.nonlinearity.1.weight"].T
            + state["classifier.nonlinearity.1.bias"]
        )
        y = self._norm(0.5 * y * (1 + torch.erf(y / math.sqrt(2))))
        return y @ state["embedding.word_embedding.weight"].T + state["classifier.nonlinearity.5.bias"]

    def _attention(self, place: str, x: Tensor, positions: Tensor, documents: list[int] | None) -> Tensor:
        state, length, hidden = self.state, *x.shape
        size = hidden // self.heads
        normed = self._norm(x)
        both = normed @ state[place + "in_proj_qk.weight"].T + state[place + "in_proj_qk.bias"]
        of_positions = positions @ state[place + "in_proj_qk.weight"].T + state[place + "in_proj_qk.bias"]
        values = normed @ state[place + "in_proj_v.weight"].T + state[place + "in_proj_v.bias"]
        outputs = []
        for head in range(self.heads):
            own = slice(head * size, (head + 1) * size)
            q, k, v = both[:, :hidden][:, own], both[:, hidden:][:, own], values[:, own]
            if self.interleaved:
                pair = of_positions[:, 2 * head * size : 2 * (head + 1) * size]
                qpos, kpos = pair[:, :size], pair[:, size:]
            else:
                qpos, kpos = of_positions[:, :hidden][:, own], of_positions[:, hidden:][:, own]
            rows = []
            for query in range(length):
                scores = []
                for key in range(length):
                    row = self._row(query - key)
                    score = q[query] @ k[key] + q[query] @ kpos[row] + k[key] @ qpos[row]
                    scores.append(score / math.sqrt(3 * size))
                weights = torch.stack(scores).exp()
                if documents is not None:
                    seen = [
                        number == documents[query] and (number >= 0 or key <= query)
                        for key, number in enumerate(documents)
                    ]
                    weights = weights * torch.tensor(seen)
                rows.append((weights / weights.sum()) @ v)
            outputs.append(torch.stack(rows))
        out = torch.cat(outputs, dim=1) @ state[place + "out_proj.weight"].T + state[place + "out_proj.bias"]
        return (
            self._norm(out) * state[place + "post_layer_norm.weight"] + state[place + "post_layer_norm.bias"]
        )

    def _feed_forward(self, place: str, x: Tensor) -> Tensor:
        both = self._norm(x) @ self.state[place + "1.weight"].T
        linear, gate = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
        tanh = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
        return self._norm(linear * 0.5 * gate * (1 + tanh)) @ self.state[place + "4.weight"].T

    def _row(self, distance: int) -> int:
        """The published buckets: distances up to half the bucket size, then logarithmic up to the longest."""
        middle, size = self.bucket // 2, min(abs(distance), self.longest - 1)
        if size > middle:
            share = math.log(size / middle) / math.log((self.longest - 1) / middle)
            size = math.ceil(share * (middle - 1)) + middle
        return self.bucket - 1 + (size if distance > 0 else -size)

    def _norm(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + self.epsilon)
