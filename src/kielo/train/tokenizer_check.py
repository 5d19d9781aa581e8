"""Before the first step: transformers' AutoTokenizer gives the packed ids, and the weights fit them.

What a run trains on is read by other programs later, by AutoTokenizer. A difference in texts ends the attempt
before a step is taken; what an export mends, and what may be wrong with the weights' tokenizer, is said.
"""

import math
from collections.abc import Callable
from pathlib import Path

from kielo.artifact.manifest import read_manifest
from kielo.artifact.metrics import Row, TrainingStep
from kielo.artifact.weights_folder import resolve_weights
from kielo.checkpoint.auto_tokenizer import NOT_COMPARED, compare_folder
from kielo.dataset.packed_documents import packed_sample
from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import Identity, Resolved
from kielo.tokenizer.load import TOKENIZER_FILE, load_tokenizer
from kielo.tokenizer.trial import doubts_about_weights
from kielo.train.token_check import refuse_altered


def check_tokenizer(resolved: Resolved) -> list[str]:
    """Return what is to be said of the run's tokenizer, in sentences.

    Raise KieloError, with the first text that differs, if AutoTokenizer gives other ids than were packed.
    """
    placement, folder = resolved.placement, Path(resolved.placement.tokenizer_folder)
    packed = read_manifest(placement.tokens_folder)
    is_ours = packed is not None and "tokenizer" in packed.inputs and (folder / TOKENIZER_FILE).is_file()
    if not is_ours:  # packed by another program
        return []
    if _is_made_here(folder):
        return _doubts(resolved.identity, folder)
    sample = packed_sample(Path(placement.tokens_folder).parent)
    try:
        said, warnings = compare_folder(folder, resolved.identity.model.model_type, sample)
    except KieloError:
        refuse_altered(Path(placement.tokens_folder), packed)  # other ids may be those of a damaged file
        raise
    if said == NOT_COMPARED:
        warnings.append(said)
    else:
        print(f"tokenizer: {said}", flush=True)
    return warnings + _doubts(resolved.identity, folder)


def _is_made_here(folder: Path) -> bool:
    """Returns True for a tokenizer that Kielo trained, and whose files nobody wrote but Kielo.

    They say nothing by which AutoTokenizer could differ, and the export compares them all the same: here that
    would cost the import of transformers at each start.
    """
    made = read_manifest(folder)
    return made is not None and not (made.section.get("path") or made.section.get("extend"))


def _doubts(identity: Identity, folder: Path) -> list[str]:
    weights = identity.model.weights
    if weights is None or identity.model.transplant is not None:
        return []
    return doubts_about_weights(load_tokenizer(folder), resolve_weights(weights))


class FirstLoss:
    """A sink of the log that warns if weights know no more of the first step's text than a random guess."""

    def __init__(self, identity: Identity, alert: Callable[[int, str], None]):
        self._model, self._alert = identity.model, alert
        self._is_watching = False

    def start(self, step: int) -> None:
        self._is_watching = step == 0

    def write(self, row: Row) -> None:
        if not self._is_watching or not isinstance(row, TrainingStep):
            return
        self._is_watching = False
        guess = math.log(self._model.vocab_size)
        if row.loss is not None and not row.loss < guess:
            self._alert(
                row.step,
                f"the first loss of {self._model.weights} is {row.loss:.2f}, and that of a guess among "
                f"{self._model.vocab_size:,} tokens is {guess:.2f}: the tokenizer is probably not that of "
                "these weights. Fix: tokenizer.path = the one that they were trained with",
            )

    def close(self) -> None:
        pass
