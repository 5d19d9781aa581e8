"""`corpus/funnel.json`: what each step of the corpus stage dropped and why, and what was left."""

from typing import Any, ClassVar

from kielo.artifact.stage_json import JsonFile, JsonObject


class FunnelSource(JsonObject):
    """One source of text."""

    name: str
    """The source's name in the recipe."""
    origin: str
    """Origin of the text: a path, a package or a dataset."""
    files: int
    """Files that were read."""
    files_not_read: int = 0
    """Files beside them that were not: of another format, left out by the recipe, or about the data."""
    file_bytes: int | None = None
    """Bytes of those files on disk."""
    documents_in: int
    """Documents in the files, those that could not be read included."""
    bytes_in: int
    """UTF-8 bytes of the documents that could be read."""
    bad_records: int = 0
    """Records that could not be read."""
    damaged_file_bytes: int = 0
    """Bytes on disk of the files that broke off."""
    bad_examples: list[str] = []
    """The problem of each of the first such records."""
    documents_kept: int
    """Documents that are left after all steps."""
    bytes_kept: int
    """UTF-8 bytes of the text that is left after all steps."""


class FunnelRow(JsonObject):
    """Text that one step dropped for one reason. An unreadable record is a document without bytes."""

    name: str
    """The step."""
    reason: str
    """The reason; empty where the step dropped nothing."""
    documents: int
    """Documents dropped for this reason."""
    lines: int
    """Lines dropped for this reason."""
    bytes: int
    """UTF-8 bytes dropped for this reason."""
    documents_left: int
    """Documents left after the whole step."""
    bytes_left: int
    """UTF-8 bytes left after the whole step."""


class Funnel(JsonFile):
    """The way of the text through the steps of the corpus stage."""

    FILE_NAME: ClassVar[str] = "funnel.json"

    settings: dict[str, Any]
    """All settings that decide the outcome; the language card's values where the recipe leaves them open."""
    sources: list[FunnelSource]
    """The sources in the order of the recipe."""
    steps: list[FunnelRow]
    """One row for each reason, in the order of the steps, each step's largest reason first."""
    threshold_table: dict[str, dict[str, float]]
    """"lines" and "documents" → language threshold → share (0 to 1) of their bytes that reached it."""
