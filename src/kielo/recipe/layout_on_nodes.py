"""The layout of a recipe on a number of nodes: `[layout]`, or the entry of `[[layouts]]` that names them."""

from kielo.recipe.cards import cluster
from kielo.recipe.sections import Layout, LayoutOnNodes, Recipe


def in_layout(recipe: Recipe, layout: Layout, micro_batch: int | None) -> Recipe:
    """Return `recipe` with this layout on every number of nodes. micro_batch: None for the recipe's own."""
    size = {} if micro_batch is None else {"micro_batch_sequences": micro_batch}
    phases = tuple(phase.model_copy(update=size) for phase in recipe.phases)
    train = recipe.train.model_copy(update=size)
    return recipe.model_copy(update={"layout": layout, "layouts": (), "train": train, "phases": phases})


def entry_of(recipe: Recipe, nodes: float) -> LayoutOnNodes | None:
    """Return the entry of [[layouts]] for this number of nodes of the recipe's cluster."""
    entries = (entry for entry in recipe.layouts if entry.cluster == recipe.cluster)
    return next((entry for entry in entries if nodes in entry.nodes), None)


def on_nodes(recipe: Recipe, nodes: float) -> Recipe:
    """Return `recipe` with its layout on this number of nodes of its cluster."""
    if (entry := entry_of(recipe, nodes)) is not None:
        return in_layout(recipe, entry.layout, entry.micro_batch_sequences)
    return recipe.model_copy(update={"layouts": ()}) if recipe.layouts else recipe


def on_devices(recipe: Recipe, devices: int) -> Recipe:
    """Return `recipe` with its layout on this number of devices of its cluster."""
    return on_nodes(recipe, _nodes_of(recipe, devices)) if recipe.layouts else recipe


def named_entry(recipe: Recipe, devices: int, message: str) -> str:
    """Return a message on the layout on this number of devices, with its entry of `[[layouts]]` if any."""
    if "layout." not in message or not recipe.layouts:
        return message
    nodes = _nodes_of(recipe, devices)
    if entry_of(recipe, nodes) is None:
        return message
    return f"layouts, {nodes:g} nodes of {recipe.cluster}: {message}"


def _nodes_of(recipe: Recipe, devices: int) -> float:
    return devices / cluster(recipe.cluster).devices_per_node
