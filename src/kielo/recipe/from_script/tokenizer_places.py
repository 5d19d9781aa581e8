"""The tokenizer of a script: its place, and the size of its vocabulary for plans on a machine without it."""

import re
from pathlib import Path

from kielo.recipe.from_script.script_arguments import TRANSLATED, Translation

_FILES = (".model", ".json", ".txt")
_ASSUMED = 65_536
_GPT2 = 50_257


def put_tokenizer(to: Translation, given: str, size: int | None, *names: str) -> None:
    """Set tokenizer.path and model.vocab_size. given: a folder, a file or a name on the hub, or ""."""
    names = tuple(name for name in names if name)
    if not given:
        for name in names:
            to.drop(name, "it names no tokenizer; tokenizer.path does")
        to.put("tokenizer.path", "hf:tokenizer", origin="fill in: the script names no tokenizer")
    else:
        place = Path(given)
        folder = place.parent if place.suffix in _FILES and not place.is_dir() else place
        is_here = (folder / "tokenizer.json").is_file()
        if is_here:
            path = str(folder)
        elif re.fullmatch(r"[\w.-]+/[\w.-]+", given) and not place.exists() and place.suffix not in _FILES:
            path = f"hf:{given}"
        else:
            path = f"hf:{folder}"
        to.put("tokenizer.path", path, *names)
        if not is_here and path != f"hf:{given}":
            for name in names:
                if to.has(name):
                    to.say(name, TRANSLATED, "needs a tokenizer.json there")
        if is_here and size is None:
            return
    if size is None:
        size = _GPT2 if "gpt2" in given.lower() else _ASSUMED
        what = f"GPT-2's {_GPT2:,} tokens" if size == _GPT2 else f"{_ASSUMED:,} tokens are assumed"
        to.add_default(
            "--vocab-size", f"changes the model: {what}; set model.vocab_size to the tokenizer's size"
        )
        to.keys["model.vocab_size"] = (size, "assumed: the script does not say it")
    else:
        to.keys["model.vocab_size"] = (size, "the script's")
