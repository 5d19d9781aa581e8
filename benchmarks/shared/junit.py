"""Reads pytest's JUnit file: counts of the cases, and the names of those that failed."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree


def outcome(report: Path) -> dict[str, Any]:
    """Returns {"passed", "skipped", "failed"}: two numbers and names."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed, skipped = _named(cases, "failure", "error"), _named(cases, "skipped")
    return {"passed": len(cases) - len(failed) - len(skipped), "skipped": len(skipped), "failed": failed}


def _named(cases: list[ElementTree.Element], *kinds: str) -> list[str]:
    """Returns the names of the cases that ended in one of these ways."""
    return sorted(
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if any(case.find(kind) is not None for kind in kinds)
    )


def properties(report: Path) -> dict[str, dict[str, str]]:
    """Returns the properties that each passed case noted, by pytest's id of the case."""
    passed = (
        case
        for case in ElementTree.parse(report).iter("testcase")
        if not any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
    )
    return {
        f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}": {
            found.get("name"): found.get("value") for found in case.iter("property")
        }
        for case in passed
    }


def seconds_of_files(report: Path) -> dict[str, int]:
    """Returns the seconds of all cases of each file of tests."""
    found: dict[str, float] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = f"{(case.get('classname') or '').replace('.', '/')}.py"
        found[file] = found.get(file, 0) + float(case.get("time") or 0)
    return {file: round(seconds) for file, seconds in found.items()}
