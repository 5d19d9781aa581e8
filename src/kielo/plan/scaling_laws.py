"""Expected loss of a model trained from scratch: parameters, tokens and different tokens → nats a token.

Two fitted laws. Chinchilla's, for text that is read once: L = E + A/N^α + B/D^β (Hoffmann et al. 2022,
arXiv:2203.15556), with the constants of Besiroglu et al. 2024 (arXiv:2404.10102), who fitted it again. And
that of Muennighoff et al. 2023 (arXiv:2305.16264), in which repeated text, and parameters beyond what the
different text can teach, count less and less; constants of the authors' code (huggingface/datablations).
Both were fitted to English web text. No torch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from kielo.resolve.mixture_table import WORTH_OF_REPEATS

FLOPS_PER_PARAMETER_AND_TOKEN = 6  # forward and backward (Kaplan et al. 2020, arXiv:2001.08361)
# Readings after which repetition brings next to nothing (Muennighoff et al. 2023, section 6).
USEFUL_EPOCHS = 16
_WORTH_OF_EXCESS = 5.309743  # R_N*: as WORTH_OF_REPEATS, of parameters
_SMALLEST = 1e4  # parameters that an optimum may have
_GRID = 400  # sizes among which the bracket of an optimum is looked for


@dataclass(frozen=True)
class Law:
    """Constants of L = floor + a/N^alpha + b/D^beta."""

    floor: float
    a: float
    alpha: float
    b: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return self.floor + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def optimum(self, flops: float) -> "Choice":
        """Returns the parameters and different tokens with the least loss for a compute budget."""
        product = flops / FLOPS_PER_PARAMETER_AND_TOKEN
        parameters = self._ratio * product ** (self.beta / (self.alpha + self.beta))
        tokens = product / parameters
        return Choice(parameters, tokens, tokens, self.loss(parameters, tokens))

    def parameters_of(self, tokens: float) -> float:
        """Returns the parameters that are the best for so many different tokens."""
        return (tokens * self._ratio) ** (self.beta / self.alpha) * self._ratio

    @property
    def _ratio(self) -> float:
        return (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))


CHINCHILLA = Law(1.8172, 482.01, 0.3478, 2085.43, 0.3658)
REPETITION = Law(math.exp(0.6254804), math.exp(6.255414), 0.3526596, math.exp(7.3049974), 0.3526596)


@dataclass(frozen=True)
class Choice:
    """A size and a length of training, with the loss that a law expects of it.

    unique_tokens: different ones of the `tokens`.
    """

    parameters: float
    tokens: float
    unique_tokens: float
    loss: float

    @property
    def epochs(self) -> float:
        return self.tokens / self.unique_tokens

    @property
    def flops(self) -> float:
        return FLOPS_PER_PARAMETER_AND_TOKEN * self.parameters * self.tokens


def repeated_loss(parameters: float, tokens: float, unique_tokens: float) -> float:
    """Returns the loss after `tokens` of a text of `unique_tokens` (Muennighoff et al. 2023, equation 6)."""
    unique = min(unique_tokens, tokens)
    fitting = min(parameters, REPETITION.parameters_of(unique))
    return REPETITION.loss(
        _worth(fitting, parameters, _WORTH_OF_EXCESS), _worth(unique, tokens, WORTH_OF_REPEATS)
    )


def repeated(parameters: float, tokens: float, unique_tokens: float) -> Choice:
    """Returns the choice with its expected loss; unique_tokens: of the whole text."""
    unique = min(unique_tokens, tokens)
    return Choice(parameters, tokens, unique, repeated_loss(parameters, tokens, unique))


def of_size(flops: float, parameters: float, unique_tokens: float) -> Choice:
    """Returns the training of a model of this size that takes the whole compute budget."""
    return repeated(parameters, flops / FLOPS_PER_PARAMETER_AND_TOKEN / parameters, unique_tokens)


def best_repeated(flops: float, unique_tokens: float) -> Choice:
    """Returns the size with the least expected loss for a compute budget and a text."""

    def loss(log_parameters: float) -> float:
        return of_size(flops, math.exp(log_parameters), unique_tokens).loss

    high = math.log(flops / FLOPS_PER_PARAMETER_AND_TOKEN)
    return of_size(flops, math.exp(_argmin(loss, math.log(_SMALLEST), high)), unique_tokens)


def _worth(unique: float, whole: float, worth_of_repeats: float) -> float:
    """Returns how many different ones are worth as much as `whole`, of which `unique` differ."""
    repeats = max(0.0, whole / unique - 1)
    return unique * (1 + worth_of_repeats * (1 - math.exp(-repeats / worth_of_repeats)))


def _argmin(function: Callable[[float], float], low: float, high: float) -> float:
    """Returns where `function` is least: the best of a grid, refined by golden sections around it."""
    width = (high - low) / _GRID
    best = min((low + width * place for place in range(_GRID + 1)), key=function)
    low, high, golden = best - width, best + width, (math.sqrt(5) - 1) / 2
    while high - low > 1e-9:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if function(left) < function(right) else (left, high)
    return (low + high) / 2
