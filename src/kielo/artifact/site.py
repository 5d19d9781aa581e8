"""`site.json` in the folder of a site: the image and the environment that site.sh made there."""

from typing import ClassVar

from kielo.artifact.stage_json import JsonFile


class MadeSite(JsonFile):
    """The container image and the environment of Kielo that site.sh made on a cluster, for its jobs."""

    FILE_NAME: ClassVar[str] = "site.json"

    cluster: str
    """Name of the cluster's card."""
    image: str
    """The container image in which ranks start; empty: none."""
    venv: str
    """The virtual environment with Kielo, as ranks see it."""
    squash: str
    """The file that the container mounts there; empty: the environment is a folder."""
    python: str
    """Version of its Python."""
    torch: str
    """Version of its torch."""
    made_at: str
    """Time in UTC."""
