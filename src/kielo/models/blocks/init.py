"""First values that depend on nothing but a seed, a parameter's name and an element's index.

A counter-based generator gives each element 32 bits of its own (Philox-4x64-10, Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3"). So a rank draws its own part of a parameter and nothing else, and a
model starts with the same numbers in every layout.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from numpy.random import Philox
from torch import Tensor

from kielo.models.piece import Box
from kielo.recipe.sections import CompleteModel

_NUMBERS_OF_COUNTER = 8  # four words of 64 bits
_PART = 2**20  # numbers that a thread draws at a time
_CHUNK = 2**15  # numbers, so that a chunk and its temporaries stay in a core's cache
# erfinv(x) = x × polynomial, lowest power first, in w - 2.5 for w = -log(1 - x²) below 5 and in √w - 3 above:
# Giles 2012, "Approximating the erfinv function", GPU Computing Gems, single precision.
_CENTRE = """
    1.50140941 0.246640727 -0.00417768164 -0.00125372503 0.00021858087 -4.39150654e-06 -3.5233877e-06
    3.43273939e-07 2.81022636e-08
"""
_TAIL = """
    2.83297682 1.00167406 0.00943887047 -0.0076224613 0.00573950773 -0.00367342844 0.00134934322
    0.000100950558 -0.000200214257
"""
_TAIL_BEGINS = 5.0


class Normal(NamedTuple):
    """First values: normal numbers within `cutoff` standard deviations (None: all), `norm` in norms."""

    deviation: float
    cutoff: float | None = None
    norm: float = 1.0


def by_rule(rule: Callable[[str, CompleteModel], Normal]) -> Callable[..., Tensor]:
    """Make a family's first values of its `rule(name, config)`: fp32 on the CPU, 0 in biases and padding."""

    def initial_value(
        name: str, shape: Sequence[int], config: CompleteModel, seed: int, box: Box | None = None
    ) -> Tensor:
        deviation, cutoff, norm = rule(name, config)
        if name.endswith(".bias"):
            return constant(0.0, shape, box)
        if name.endswith("norm.weight"):
            return constant(norm, shape, box)
        rows = config.vocab_size if name in ("embed.weight", "head.weight") else None
        return seeded_normal(name, shape, deviation, seed, rows, cutoff, box)

    return initial_value


def depth_scaled(name: str, config: CompleteModel, *others: str) -> float:
    """Return `initializer_range`, divided by √(2 × layers) for matrices that write to the residual stream."""
    is_scaled = name.endswith((".attention.o.weight", ".mlp.down.weight", *others))
    return config.initializer_range / (math.sqrt(2 * config.num_hidden_layers) if is_scaled else 1)


def constant(value: float, shape: Sequence[int], box: Box | None = None) -> Tensor:
    return torch.full(_sizes(_whole(shape) if box is None else box), value, dtype=torch.float32, device="cpu")


def seeded_normal(
    name: str,
    shape: Sequence[int],
    standard_deviation: float,
    seed: int,
    rows: int | None = None,
    cutoff: float | None = None,
    box: Box | None = None,
) -> Tensor:
    """Return normal numbers around 0 for a box of the parameter `name` of this whole shape.

    Only the first `rows` have numbers (None: all). Later rows are padding, 0. `cutoff` is `Normal`'s. A `box`
    of None is the whole. Each contiguous run draws at most 14 numbers more than its elements.
    """
    box = _whole(shape) if box is None else box
    values = np.zeros(_sizes(box), dtype=np.float32)
    if rows is not None:
        box = (slice(min(box[0].start, rows), min(box[0].stop, rows)), *box[1:])
    drawn = values.reshape(-1)[: math.prod(_sizes(box))]
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    key = int.from_bytes(digest, "little")
    edge = 1.0 if cutoff is None else math.erf(cutoff / math.sqrt(2))

    def draw(part: tuple[np.ndarray, list[tuple[int, int]]]) -> None:
        numbers, runs = part
        _draw_bits(numbers.view(np.uint32), key, runs)
        for begin in range(0, len(numbers), _CHUNK):
            chunk = numbers[begin : begin + _CHUNK]
            chunk[:] = _erfinv(chunk.view(np.int32), edge)
            chunk *= math.sqrt(2) * standard_deviation

    parts = _parts(drawn, _runs(shape, box))
    threads = torch.get_num_threads()  # a rank's share of the node's cores
    if threads == 1 or len(drawn) <= _PART:
        for part in parts:
            draw(part)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(draw, parts))
    return torch.from_numpy(values)


def _parts(
    drawn: np.ndarray, runs: Iterable[tuple[int, int]]
) -> Iterator[tuple[np.ndarray, list[tuple[int, int]]]]:
    """Cut `drawn` at ends of runs into parts of at least `_PART` numbers. Yield each with its runs."""
    begin, size, held = 0, 0, []
    for run in runs:
        held.append(run)
        size += run[1]
        if size >= _PART:
            yield drawn[begin : begin + size], held
            begin, size, held = begin + size, 0, []
    if held:
        yield drawn[begin:], held


def _draw_bits(bits: np.ndarray, key: int, runs: Iterable[tuple[int, int]]) -> None:
    """Fill `bits` (uint32 [elements of the runs]): element i of the parameter has the i-th of the stream."""
    generator, counter, done = Philox(key=key), 0, 0
    for first, length in runs:
        wanted, skipped = divmod(first, _NUMBERS_OF_COUNTER)
        generator.advance(wanted - counter)
        words = -(-(skipped + length) // 2)
        drawn = generator.random_raw(words).view(np.uint32)
        bits[done : done + length] = drawn[skipped : skipped + length]
        counter, done = wanted + -(-words // 4), done + length


def _runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """Yield (flat index, length) of the box's contiguous runs, at most a chunk long, in order."""
    if not math.prod(_sizes(box)):
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = len(shape) - 1  # the dims after it are whole
    while inner > 0 and _sizes(box)[inner] == shape[inner]:
        inner -= 1
    length = _sizes(box)[inner] * strides[inner]
    for outer in product(*(range(part.start, part.stop) for part in box[:inner])):
        first = sum(
            index * stride for index, stride in zip((*outer, box[inner].start), strides, strict=False)
        )
        for begin in range(0, length, _CHUNK):
            yield first + begin, min(_CHUNK, length - begin)


def _erfinv(bits: np.ndarray, edge: float) -> np.ndarray:
    """Return erfinv of uniform numbers within ±edge, made of random bits (int32): normal, variance ½.

    Each step but the logarithm rounds alike on every processor and in every place of an array.
    """
    rest = _scaled(2**31 - 1 - (bits ^ (bits >> 31)), edge)  # from an integer, so that it is exact far out
    rest += 1 - edge  # 1 - |x|
    w = 2 - rest
    w *= rest
    np.log(w, out=w)
    np.negative(w, out=w)
    far = np.flatnonzero(w >= _TAIL_BEGINS)
    far_w = np.sqrt(w[far]) - 3
    w -= 2.5
    factor = _polynomial(_CENTRE, w)
    factor[far] = _polynomial(_TAIL, far_w)
    factor *= _scaled(bits, edge)
    return factor


def _scaled(integers: np.ndarray, edge: float) -> np.ndarray:
    scaled = integers.astype(np.float32)
    scaled += 0.5
    scaled *= edge * 2.0**-31
    return scaled


def _polynomial(coefficients: str, x: np.ndarray) -> np.ndarray:
    highest, *others = map(float, reversed(coefficients.split()))
    value = np.full_like(x, highest)
    for coefficient in others:
        value *= x
        value += coefficient
    return value


def _whole(shape: Sequence[int]) -> Box:
    return tuple(slice(0, size) for size in shape)


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)
