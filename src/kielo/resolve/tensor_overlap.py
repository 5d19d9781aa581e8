"""How collectives of tensor ranks are cut to run beside products (`layout.tensor_overlap`); torch-free."""

from kielo.recipe.sections import Layout

# of a rank's part of the sequence. More would hide more of a collective, but by the planner's formulas the
# smaller products cost more than that (docs/planning.md).
CHUNKS = 2


def chunks_of(layout: Layout) -> int:
    """Returns the chunks into which a rank's part of the sequence is cut; 1: collectives run at once."""
    return CHUNKS if layout.tensor_overlap == "chunked" and layout.tensor > 1 else 1
