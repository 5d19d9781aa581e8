"""All measures of an encoder: hidden tokens, pseudo-perplexity, filled masks, minimal pairs, parts of speech.

What is scored, and on which text, is decided here; the files of the measures' names have the arithmetic.
"""

from pathlib import Path
from typing import Any

import numpy as np

from kielo.artifact.masked_scores import FilledMask, MaskedScores
from kielo.evaluate.contender import Contender
from kielo.evaluate.encoder import Encoder, open_encoder
from kielo.evaluate.fill_mask import fill_heldout, fill_prompts
from kielo.evaluate.masked_tokens import score_masked_tokens
from kielo.evaluate.minimal_pairs import score_minimal_pairs
from kielo.evaluate.pseudo_likelihood import pseudo_bits_per_byte
from kielo.evaluate.texts import heldout_texts
from kielo.recipe.sections import Recipe
from kielo.resolve.resolved import Identity


def score_encoder(
    contender: Contender, name: str, recipe: Recipe, identity: Identity, run_folder: Path
) -> MaskedScores:
    """Scores the contender, which `name` names, on the held-out text of a run and on the recipe's own files.

    Raises KieloError for weights whose loss is not finite, and for a file that is missing or damaged.
    """
    evaluate = recipe.evaluate
    scores = score_masked_tokens(contender, name, identity, run_folder)
    encoder = open_encoder(contender, recipe)
    texts, _ = heldout_texts(run_folder / "tokens")
    texts = [texts[one] for one in np.random.default_rng(recipe.seed).permutation(len(texts))]
    found: dict[str, Any] = {
        "pseudo_bits_per_byte": pseudo_bits_per_byte(encoder, texts, evaluate.pseudo_tokens),
        "filled_masks": _filled_masks(encoder, recipe, texts),
    }
    if evaluate.minimal_pairs:
        found["minimal_pairs"] = score_minimal_pairs(encoder, Path(evaluate.minimal_pairs).expanduser())
    if evaluate.part_of_speech.train:
        from kielo.evaluate.part_of_speech import score_part_of_speech  # scikit-learn's seconds

        found["part_of_speech"] = score_part_of_speech(encoder, evaluate.part_of_speech)
    return scores.model_copy(update=found)


def _filled_masks(encoder: Encoder, recipe: Recipe, texts: list[str]) -> list[FilledMask]:
    if recipe.evaluate.prompts:
        return fill_prompts(encoder, recipe.evaluate.prompts)
    return fill_heldout(encoder, texts, recipe.seed)
