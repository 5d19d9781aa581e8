"""Log-likelihoods of token sequences after their contexts, by a `Contender`.

Rows are padded on the right, and the batches follow from the pairs alone. So all ranks of a contender that
computes on several make the same calls.
"""

from collections.abc import Iterator, Sequence

import torch

from kielo.evaluate.contender import MOST_LOGITS_PER_FORWARD, MOST_TOKENS_PER_FORWARD, Contender
from kielo.recipe.errors import KieloError

Ids = Sequence[int]


@torch.inference_mode()
def sequence_log_likelihoods(
    contender: Contender, pairs: Sequence[tuple[Ids, Ids]]
) -> list[tuple[float, bool]]:
    """Return for each (context, continuation) the nats of the continuation, and if it is the likeliest text.

    The likeliest: each of its tokens has the largest logit. Contexts lose their beginning if both are longer
    than a sequence and a token. Raise KieloError for a continuation that is empty or longer than a sequence.
    """
    length = contender.sequence_length
    rows: dict[tuple[int, ...], list[int]] = {}  # pairs with the same input are computed once
    for number, (context, continuation) in enumerate(pairs):
        if not context or not 1 <= len(continuation) <= length:
            raise KieloError(
                f"{contender.name}: {len(continuation):,} tokens follow {len(context):,} tokens of context. "
                f"Fix: one token or more of context, and 1 to {length:,} tokens after it"
            )
        rows.setdefault((*context, *continuation)[-length - 1 : -1], []).append(number)
    found: dict[int, tuple[float, bool]] = {}
    for inputs, logits in _logits(contender, sorted(rows, key=lambda row: (-len(row), row))):
        for number in rows[inputs]:
            labels = torch.tensor(pairs[number][1], device=logits.device)
            own = logits[-len(labels) :].float()
            nats = own.log_softmax(-1).gather(1, labels[:, None]).double().sum()
            found[number] = float(nats), bool((own.argmax(-1) == labels).all())
    return [found[number] for number in range(len(pairs))]


def shortened(contender: Contender, pairs: Sequence[tuple[Ids, Ids]]) -> int:
    """Count the pairs whose context loses its beginning."""
    return sum(len(context) + len(rest) > contender.sequence_length + 1 for context, rest in pairs)


def _logits(
    contender: Contender, rows: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield each row with its logits [s, vocab]. rows: longest first."""
    start, most = 0, 1  # until the number of logits is known
    while start < len(rows):
        longest = len(rows[start])
        batch = rows[start : start + max(1, most // longest)]
        padded = [[*row, *[contender.end_of_text_id] * (longest - len(row))] for row in batch]
        tokens_bs = torch.tensor(padded, device=contender.device)
        logits_bsv = contender.logits(tokens_bs, contender.documents(tokens_bs))
        for row, logits in zip(batch, logits_bsv, strict=True):
            yield row, logits[: len(row)]
        start += len(batch)
        most = min(MOST_TOKENS_PER_FORWARD, MOST_LOGITS_PER_FORWARD // logits_bsv.shape[-1])
