"""Writes the table of docs/from_other_engines.md on published runs, by `python docs/script_differences.py`.

In: the scripts of tests/recipe/scripts, with the arguments of published runs, and the shipped recipes of the
same runs. Out: each key whose value differs, with the reason from docs/script_differences.toml. A difference
without a reason is an error, and so is a reason without a difference.
"""

import fnmatch
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from kielo.recipe.from_script.megatron_rules import read_megatron
from kielo.recipe.from_script.recipe_writer import script_recipe
from kielo.recipe.from_script.trainer_rules import read_trainer
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Recipe

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "from_other_engines.md"
REASONS = ROOT / "docs" / "script_differences.toml"
SCRIPTS = ROOT / "tests" / "recipe" / "scripts"
BEGIN = "<!-- differences: written by docs/script_differences.py; do not edit by hand -->\n"
END = "<!-- /differences -->"
# Script → the shipped recipe of the same run.
RUNS = {
    "llmjp_172b.sh": "llmjp_172b", "bloom_176b.slurm": "bluumi_176b", "poro_34b.sh": "poro_34b",
    "viking_7b.sh": "viking_7b", "lumi_140b.sh": "lumi_140b_scaling",
    "estonian_70b.sh": "estonian_llama31_70b",
    "llammas_7b.sh": "llammas_7b", "smugri_7b.sh": "smugri_7b",
}  # fmt: skip
_OF_THE_PLACE = (
    "name",
    "language",
    "description",
    "folder",
    "cluster",
    "nodes",
    "layouts",
    "corpus.*",
    "report.*",
)


def recipe_of(script: str, path: Path | None = None) -> Recipe:
    """Returns the recipe that `kielo init` makes of a script."""
    path = path or SCRIPTS / script
    read = read_trainer if script in ("llammas_7b.sh", "smugri_7b.sh") else read_megatron
    text = script_recipe("", {"name": "run", "language": "fi"}, read(path, {}))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(text, encoding="utf-8")
        return read_recipe(file).recipe


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and key not in ("dataset.mixture", "model.rope_scaling", "train.batch_ramp"):
        return {
            k: v for name, entry in value.items() for k, v in _flat(entry, f"{key}.{name}".strip(".")).items()
        }
    return {key: value}


def differences(script: str) -> dict[str, tuple[Any, Any]]:
    """Returns key → (value of the script, value of the shipped recipe), of keys that either gives."""
    ours, theirs = recipe_of(script), read_recipe(RUNS[script]).recipe
    given = {*_flat(ours.model_dump(exclude_unset=True)), *_flat(theirs.model_dump(exclude_unset=True))}
    one, other = _flat(ours.model_dump()), _flat(theirs.model_dump())
    return {
        key: (one.get(key), other.get(key))
        for key in sorted(given)
        if one.get(key) != other.get(key)
        and not any(fnmatch.fnmatchcase(key, sign) for sign in _OF_THE_PLACE)
    }


def _reason(reasons: dict[str, dict[str, str]], script: str, key: str) -> str | None:
    for table in (reasons.get(script, {}), reasons["all"]):
        for sign, why in table.items():
            if fnmatch.fnmatchcase(key, sign):
                return why
    return None


def _cell(value: Any) -> str:
    if value is None or value in ((), ""):
        return "–"
    if isinstance(value, tuple | list) and len(value) and isinstance(value[0], dict):
        return f"{len(value)} phases"
    if isinstance(value, tuple | list) and len(value) > 3:
        return f"{len(value)} values"
    if isinstance(value, dict):
        return ", ".join(f"{name} {entry:g}" for name, entry in value.items()) or "–"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def table() -> str:
    """Returns the table: a row for each reason. Raises ValueError for a difference without a reason."""
    reasons = tomllib.loads(REASONS.read_text(encoding="utf-8"))
    rows: dict[tuple[str, str], list[str]] = {}
    unexplained = []
    for script in RUNS:
        for key, (one, other) in differences(script).items():
            why = _reason(reasons, script, key)
            if why is None:
                unexplained.append(f"{script}: {key}: {one} and {other}")
            else:
                rows.setdefault((script, why), []).append(f"`{key}` {_cell(one)} / {_cell(other)}")
    idle = {why for entries in reasons.values() for why in entries.values()} - {why for _, why in rows}
    if unexplained or idle:
        raise ValueError("\n".join(["without a reason:", *unexplained, "without a difference:", *idle]))
    lines = [
        f"| `{script}`, `{RUNS[script]}` | {'<br>'.join(keys)} | {why} |"
        for (script, why), keys in rows.items()
    ]
    return "\n".join(["| script, recipe | key: script / shipped | why |", "|---|---|---|", *lines]) + "\n"


def page(text: str) -> str:
    """Returns the text of the page with the table in it."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
