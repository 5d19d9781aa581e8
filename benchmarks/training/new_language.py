"""A new language in an old model: what a new vocabulary, its first rows and a frozen body bring.

    python benchmarks/training/new_language.py  # the whole; two processes, a core each
    python benchmarks/training/new_language.py --toy  # seconds a run, to try the script; writes no result
    python benchmarks/training/new_language.py --seconds-limit 500  # the same command goes on
    python benchmarks/training/new_language.py --show  # the table of what has been measured so far

A small model learns the English LibreOffice help (the shipped demo_english); then it goes on with the
Estonian help, in several ways (`ARMS`), all on the same bytes of text, read once. After each tenth both
languages are scored on the same held-out documents, in bits per byte, which compare vocabularies. What is
measured is Kielo's own training, `kielo run`, for each arm and seed in a folder under --folder: a run that is
finished is not made again, one that was stopped goes on from its checkpoint. Where apt is missing: --english
and --estonian take folders of help pages.

To benchmarks/results/new_language.json, and from it the table of new_language.md beside it and
docs/pictures/new_language.svg.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib import import_module
from multiprocessing import Process, get_context
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

from kielo.artifact.documents import read_documents
from kielo.artifact.manifest import installed_versions, read_manifest, write_json_atomically
from kielo.artifact.metrics import METRICS_NAME, HeldOutLoss, TrainingStep, of_kind, read_metrics
from kielo.cli.main import REQUEUE
from kielo.cli.main import main as run_kielo
from kielo.recipe.read import read_recipe
from kielo.recipe.toml_text import toml_table
from kielo.tokenizer.stage_inputs import is_heldout, place_by_hash

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from machine import processor
from page_tables import put_tables

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "new_language.json"
PAGE = RESULT.with_suffix(".md")
PICTURE = ROOT / "docs" / "pictures" / "new_language.svg"
SEEDS = (1, 2, 3)
TENTHS = 10
LANGUAGES = ("estonian", "english")
REPLAY_SHARE = 0.25  # of the tokens, of English (Ibrahim et al. 2024, arXiv:2403.08763)
HELDOUT_SHARE = 0.01  # of the documents, in each run
FROZEN_TENTHS = 1  # of the tokens, with the body frozen
GRACE_SECONDS = 60  # to save in, after a run is asked to stop


@dataclass(frozen=True)
class Size:
    """How much is trained. text_bytes: of Estonian, read once; heldout_bytes: of each language, scored."""

    english_tokens: int
    text_bytes: int
    heldout_bytes: int
    english_tokens_per_step: int = 1024
    vocab_size: int = 4096
    sequence_length: int = 128
    tokens_per_step: int = 384  # three sequences; a fourth one of English is the replay


WHOLE = Size(english_tokens=400_384, text_bytes=120_000, heldout_bytes=6_000)
TOY = Size(8192, 20_000, 1_500, english_tokens_per_step=2048, vocab_size=400)
LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Arm:
    """One way to go on. tokenizer: old, new or extended; rows: `model.transplant`, None for the old ones."""

    letter: str
    what: str
    tokenizer: str
    rows: str | None = "mean"
    is_frozen_first: bool = False
    has_replay: bool = False


ARMS = (
    Arm("a", "old tokenizer", "old", rows=None),
    Arm("b", "new tokenizer, random rows", "new", rows="random"),
    Arm("c", "new tokenizer, mean rows", "new"),
    Arm("d", "as c, the body frozen first", "new", is_frozen_first=True),
    Arm("e", "extended tokenizer, mean rows", "extended"),
    Arm("r", "as c, with English replay", "new", has_replay=True),
)


@dataclass(frozen=True)
class Place:
    """The folders of the experiment."""

    folder: Path
    size: Size

    @property
    def weights(self) -> Path:
        return self.folder / "english" / "hf"

    def tokenizer(self, name: str) -> Path:
        """Of `Arm.tokenizer`; each is learned once, for all arms that have it."""
        return self.folder / {"old": "english"}.get(name, name) / "tokenizer"

    def text(self, name: str) -> Path:
        return self.folder / "text" / f"{name}.jsonl"

    def run(self, arm: Arm, seed: int) -> Path:
        return self.folder / f"{arm.letter}{seed}"


class Stopped(Exception):
    """The time is over, or a person stopped it; the same command goes on."""


class Runner:
    """Runs tasks in forked processes, which need not import torch again, and stops them in time."""

    def __init__(self, processes: int, seconds: float):
        self._processes, self._until = processes, time.monotonic() + seconds
        import_module("kielo.train.run")  # before the first fork

    def stop(self) -> None:
        self._until = min(self._until, time.monotonic())

    def __call__(self, *tasks: Callable[[], None]) -> None:
        """Runs the tasks, `processes` at a time. Raises Stopped, and RuntimeError where one fails."""
        waiting, running = deque(tasks), []
        while running or (waiting and not self._is_over()):
            while waiting and len(running) < self._processes and not self._is_over():
                process = get_context("fork").Process(target=_in_child, args=(waiting.popleft(),))
                process.start()
                running.append(process)
            if self._is_over():
                self._end(running)
            codes = [process.exitcode for process in running]
            if any(code not in (None, 0, REQUEUE, -signal.SIGTERM) for code in codes):
                self._end(running)
                raise RuntimeError("a run failed; its log beside its folder says why")
            if any(codes):
                self._end(running)
                raise Stopped
            running = [process for process in running if process.exitcode is None]
            time.sleep(0.2)
        if waiting:
            raise Stopped

    def _is_over(self) -> bool:
        return time.monotonic() > self._until

    @staticmethod
    def _end(running: list[Process]) -> None:
        """Asks the processes to save and end, and waits for them."""
        for process in running:
            process.terminate()
        until = time.monotonic() + GRACE_SECONDS
        for process in running:
            process.join(max(0.0, until - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()


def _in_child(task: Callable[[], None]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent asks by SIGTERM
    torch.set_num_threads(1)
    task()


def kielo(log: Path, *arguments: str) -> None:
    """Runs `kielo` in this process; where it does not end well, its exit code is the process's."""
    with open(log, "a", encoding="utf-8") as output, redirect_stdout(output), redirect_stderr(output):
        code = run_kielo(list(arguments))
    if code:
        sys.exit(code)


def main() -> int:
    options = _options()
    place, code = Place(options.folder.resolve(), TOY if options.toy else WHOLE), 0
    if not options.show:
        runner = Runner(options.processes, options.seconds_limit)
        signal.signal(signal.SIGTERM, lambda *_: runner.stop())
        signal.signal(signal.SIGINT, lambda *_: runner.stop())
        runs = [(arm, seed) for seed in SEEDS for arm in ARMS]
        try:
            make_base(place, options, runner)
            runner(*[partial(train_arm, place, *run) for run in runs if not is_done(place, *run)])
        except Stopped:
            print("stopped before the end; the same command goes on", flush=True)
            code = REQUEUE
    document = measured(place)
    if not document["arms"]["a"]["seeds"]:
        return code
    print("\n".join(table(document)))
    if not options.toy and not options.show:
        write_json_atomically(RESULT, document)
        PICTURE.write_text(picture(document), encoding="utf-8")
        put_tables(PAGE, {"results": "\n".join(table(document))})
    return code


def make_base(place: Place, options: argparse.Namespace, runner: Runner) -> None:
    """Trains the English model, cleans the Estonian text, and writes the texts that all arms share."""
    place.folder.mkdir(parents=True, exist_ok=True)
    runner(partial(make_english, place, options.english), partial(clean_estonian, place, options.estonian))
    if not place.text("english_heldout").is_file():  # the last one
        write_texts(place)
    runner(partial(learn_tokenizer, place, "new"), partial(learn_tokenizer, place, "extended"))


def make_english(place: Place, pages: Path | None) -> None:
    """Trains and exports the English model; nothing of it is made again."""
    size, log = place.size, place.folder / "english.log"
    sets = [
        f"folder={place.folder / 'english'}", f"train.tokens={size.english_tokens}",
        f"train.tokens_per_step={size.english_tokens_per_step}", f"tokenizer.vocab_size={size.vocab_size}",
    ]  # fmt: skip
    words = ["run", "demo_english", *_sets(sets, pages)]
    kielo(log, *words, "--to", "train")
    kielo(log, *words, "--only", "export")


def clean_estonian(place: Place, pages: Path | None) -> None:
    sets = [f"folder={place.folder / 'estonian'}"]
    kielo(place.folder / "estonian.log", "run", "demo_estonian", *_sets(sets, pages), "--only", "corpus")


def _sets(sets: list[str], pages: Path | None) -> list[str]:
    given = [*sets, f"corpus.sources={pages.resolve()}"] if pages else sets
    return [word for one in given for word in ("--set", one)]


def learn_tokenizer(place: Place, name: str) -> None:
    """Learns the tokenizer `name` from all the Estonian text that is not held out."""
    vocab_size = place.size.vocab_size
    learnt = {
        "new": {"vocab_size": vocab_size},
        "extended": {"extend": str(place.tokenizer("old")), "vocab_size": 2 * vocab_size},
    }[name]
    folder = place.tokenizer(name).parent
    source = {"name": "estonian", "path": str(place.text("estonian_whole")), "clean": False}
    content = {
        "name": name, "language": "et", "folder": str(folder), "tokenizer": learnt,
        "corpus": {"sources": [source], "workers": 1, "deduplicate_lines": False},
        "dataset": {"heldout_share": HELDOUT_SHARE},
    }  # fmt: skip
    path = folder.with_suffix(".toml")
    path.write_text(toml_table("", content), encoding="utf-8")
    kielo(folder.with_suffix(".log"), "run", str(path), "--to", "tokenizer")


def _heldout_names() -> list[str]:
    return [f"{language}_heldout" for language in LANGUAGES]


def write_texts(place: Place) -> None:
    """Writes what is trained on and what is scored, of clean documents in the order of their hash.

    Of each language: all that is not held out, of which tokenizers are learned; `text_bytes` of it to train
    on, English for the replay; and others to score, which the first model did not train on either.
    """
    place.text("estonian").parent.mkdir(exist_ok=True)
    share = read_recipe("demo_english").recipe.dataset.heldout_share
    for language in LANGUAGES:
        texts = sorted({one["text"] for one in _documents(place, language)}, key=place_by_hash)
        held = [text for text in texts if is_heldout(text, share)]
        trained = [text for text in texts if not is_heldout(text, share)]
        # A run holds text of its own out: the first held document, the only one below its share.
        trained = [*held[:1], *trained]
        _write(place.text(f"{language}_whole"), trained, sys.maxsize)
        _write(place.text(language), trained, place.size.text_bytes)
        _write(place.text(f"{language}_heldout"), held, place.size.heldout_bytes)


def _documents(place: Place, language: str) -> Iterator[dict[str, Any]]:
    for path in sorted((place.folder / language / "corpus" / "documents").glob("*.jsonl.zst")):
        yield from read_documents(path)


def _write(path: Path, texts: list[str], most_bytes: int) -> None:
    """Writes documents up to the one that reaches `most_bytes`."""
    lines, written = [], 0
    for text in texts:
        if written >= most_bytes:
            break
        lines.append(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        written += len(text.encode())
    path.write_text("".join(lines), encoding="utf-8")


def train_arm(place: Place, arm: Arm, seed: int) -> None:
    """Trains one arm: packs its text, which says how many steps it has, and trains once over it."""
    folder = place.run(arm, seed)
    path, log = folder.with_suffix(".toml"), folder.with_suffix(".log")
    path.write_text(toml_table("", recipe(place, arm, seed, TENTHS)), encoding="utf-8")
    kielo(log, "run", str(path), "--to", "pack")
    steps = steps_of(place, folder)
    path.write_text(toml_table("", recipe(place, arm, seed, steps)), encoding="utf-8")
    begun = time.process_time()
    kielo(log, "run", str(path), "--to", "train")
    print(f"{arm.letter}{seed}: {steps} steps, {time.process_time() - begun:.0f} s of a core", flush=True)


def is_done(place: Place, arm: Arm, seed: int) -> bool:
    return read_manifest(place.run(arm, seed) / "train") is not None


def steps_of(place: Place, folder: Path) -> int:
    """Returns the steps that read the packed Estonian text once, a multiple of ten."""
    tokens = read_manifest(folder / "tokens").counts["sources"]["estonian"]["tokens"]
    return TENTHS * max(1, round(tokens / place.size.tokens_per_step / TENTHS))


def recipe(place: Place, arm: Arm, seed: int, steps: int) -> dict[str, Any]:
    """Returns the recipe of an arm as tables; with replay, steps are longer by the English that they read."""
    size, per_step = place.size, place.size.tokens_per_step
    sources = [{"name": "estonian", "path": str(place.text("estonian")), "clean": False}]
    if arm.has_replay:
        per_step = round(per_step / (1 - REPLAY_SHARE))
        sources.append(
            {"name": "english", "path": str(place.text("english")), "clean": False, "language": "en"}
        )
    shares = {"estonian": float(size.tokens_per_step), "english": float(per_step - size.tokens_per_step)}
    content = {
        "name": f"{arm.letter}{seed}", "language": "et", "seed": seed, "folder": str(place.run(arm, seed)),
        "corpus": {"sources": sources, "workers": 1, "deduplicate_lines": False},
        "tokenizer": {"path": str(place.tokenizer(arm.tokenizer))},
        "dataset": {
            "sequence_length": size.sequence_length, "heldout_share": HELDOUT_SHARE, "max_epochs": 2,
            "mixture": {source["name"]: shares[source["name"]] for source in sources},
        },
        "model": {"weights": f"hf:{place.weights}", "transplant": arm.rows},
        "train": {
            "tokens": steps * per_step, "tokens_per_step": per_step, "micro_batch_sequences": 8,
            "learning_rate": LEARNING_RATE, "final_learning_rate_ratio": 0.02, "schedule": "wsd",
            "warmup_share": 0.05, "decay_share": 0.2, "adam_beta2": 0.98, "precision": "fp32",
            "heldout_every_steps": steps // TENTHS, "heldout_sequences": 10_000, "tensorboard": False,
        },
        "checkpoint": {"every_steps": max(50, steps // 4)},
        "evaluate": {
            "texts": [
                {"name": name, "path": str(place.text(name)), "language": code}
                for name, code in zip(_heldout_names(), ("et", "en"))
            ]
        },
    }  # fmt: skip
    if arm.is_frozen_first:
        content["phases"] = _frozen_first(content["train"], steps, per_step)
        del content["train"]["tokens"]
    return content


def _frozen_first(train: dict[str, Any], steps: int, per_step: int) -> list[dict[str, Any]]:
    """Returns the two phases, with the rates that the arms without phases have at the same steps."""
    first = steps * FROZEN_TENTHS // TENTHS
    rate, share = train["learning_rate"], steps / (steps - first)
    return [
        {
            "tokens": first * per_step, "trainable": ["embed", "head"], "learning_rate": rate,
            "warmup_share": train["warmup_share"] * steps / first, "decay_share": 0.0,
        },
        {
            "tokens": (steps - first) * per_step, "learning_rate": rate, "warmup_share": 0.0,
            "decay_share": train["decay_share"] * share,
        },
    ]  # fmt: skip


def measured(place: Place) -> dict[str, Any]:
    """Returns what was measured with the seeds of which every arm is done, for the result's file."""
    whole = [seed for seed in SEEDS if all(is_done(place, arm, seed) for arm in ARMS)]
    arms = {
        arm.letter: {
            "what": arm.what,
            "seeds": {str(seed): _of_run(place, place.run(arm, seed)) for seed in whole},
        }
        for arm in ARMS
    }
    return {
        "date": date.today().isoformat(), "versions": installed_versions(),
        "machine": f"{os.cpu_count()} cores of {processor()}",
        "size": vars(place.size), "learning_rate": LEARNING_RATE, "replay_share": REPLAY_SHARE,
        "frozen_tenths": FROZEN_TENTHS, "base": _base(place), "arms": arms,
    }  # fmt: skip


def _of_run(place: Place, folder: Path) -> dict[str, Any]:
    rows = read_metrics(folder / "train" / METRICS_NAME)
    counts = read_manifest(folder / "tokens").counts["sources"]["estonian"]
    scored = {row.step: row.heldout_sets for row in of_kind(rows, HeldOutLoss)}
    points = [
        {"step": step} | {one: round(scored[step][f"{one}_heldout"].bits_per_byte, 4) for one in LANGUAGES}
        for step in (max(scored) * tenth // TENTHS for tenth in range(1, TENTHS + 1))
    ]
    speeds = [row.tokens_per_second for row in of_kind(rows, TrainingStep)]
    return {
        "estonian_bytes": counts["bytes"], "estonian_tokens": counts["tokens"],
        "bytes_per_token": round(counts["bytes"] / counts["tokens"], 3), "steps": points[-1]["step"],
        "tokens_per_second": round(statistics.median(speeds)), "points": points,
    }  # fmt: skip


def _base(place: Place) -> dict[str, Any]:
    row = of_kind(read_metrics(place.folder / "english" / "train" / METRICS_NAME), HeldOutLoss)[-1]
    counts = read_manifest(place.folder / "english" / "tokens").counts["sources"]
    (source,) = counts.values()
    return {
        "tokens": row.tokens, "bytes": source["bytes"], "heldout_bits_per_byte": row.heldout_bits_per_byte
    }  # fmt: skip


def table(document: dict[str, Any]) -> list[str]:
    """Returns the Markdown lines: bits per byte of each arm, mean of the seeds and half of their range."""
    shown, arms = (1, 2, 3, 5, 7, 10), document["arms"]
    seeds = list(arms["a"]["seeds"].values())
    text = f"{seeds[0]['estonian_bytes'] / 1000:.0f} kB, read once"
    base = f"{document['base']['tokens']:,} tokens"
    lines = [f"English model: {base}. Estonian: {text}. Seeds: {len(seeds)}.", ""]
    for language in LANGUAGES:
        titles = [f"held-out {language.title()}, after tenth", *map(str, shown), "Estonian tokens"]
        lines += [f"| {' | '.join(titles)} |", f"|---|{'--:|' * (len(shown) + 1)}"]
        for letter, arm in arms.items():
            seeds = list(arm["seeds"].values())
            cells = [_cell([run["points"][tenth - 1][language] for run in seeds]) for tenth in shown]
            tokens = f"{statistics.mean(run['estonian_tokens'] for run in seeds):,.0f}"
            lines.append(f"| {letter}: {arm['what']} | {' | '.join(cells)} | {tokens} |")
        lines.append("")
    return lines[:-1]


def _cell(values: list[float]) -> str:
    spread = f" ± {(max(values) - min(values)) / 2:.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def picture(document: dict[str, Any]) -> str:
    """Draws both languages side by side as SVG: lines are means of the seeds, bands from least to most."""
    style = {"svg.fonttype": "none", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style | {"svg.hashsalt": "new_language"}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        tenths = range(1, TENTHS + 1)
        for axes, language in zip(figure.subplots(1, 2), LANGUAGES):
            for letter, arm in document["arms"].items():
                runs = [[point[language] for point in run["points"]] for run in arm["seeds"].values()]
                columns = list(zip(*runs))
                (line,) = axes.plot(tenths, [statistics.mean(column) for column in columns], label=letter)
                axes.fill_between(
                    tenths,
                    list(map(min, columns)),
                    list(map(max, columns)),
                    alpha=0.2,
                    color=line.get_color(),
                )
            axes.set_title(f"held-out {language.title()}")
            axes.set_xlabel("tenths of the Estonian text")
        figure.axes[0].set_ylabel("bits per byte")
        names = [f"{letter}: {arm['what']}" for letter, arm in document["arms"].items()]
        figure.legend(figure.axes[0].lines, names, loc="outside lower center", ncols=3, frameon=False)
        return _svg(figure)


def _svg(figure: Figure) -> str:
    import io

    file = io.BytesIO()
    figure.savefig(file, format="svg", facecolor="white", metadata={"Date": None})
    return file.getvalue().decode()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs") / "new_language")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, each with one thread")
    parser.add_argument("--english", type=Path, help="folder of help pages, where apt is missing")
    parser.add_argument("--estonian", type=Path, help="folder of help pages, where apt is missing")
    parser.add_argument(
        "--toy", action="store_true", help="tiny sizes, in another --folder; writes no result"
    )
    parser.add_argument("--show", action="store_true", help="train nothing; print what is there")
    parser.add_argument("--seconds-limit", type=float, default=float("inf"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
