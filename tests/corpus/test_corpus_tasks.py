"""The tasks of a corpus: the same bytes for any parts and after any kill, beside a plain script."""

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import numpy as np
import orjson
import pytest
import xxhash
import zstandard

from kielo.artifact.documents import read_documents
from kielo.artifact.manifest import hash_manifest, installed_versions
from kielo.artifact.this_place import this_place
from kielo.corpus import corpus_parts, corpus_stage, corpus_tasks, hash_buckets
from kielo.corpus.corpus_parts import Part, make_parts
from kielo.corpus.corpus_stage import plan_corpus, run_corpus
from kielo.corpus.hash_buckets import HashWriter, read_copies, write_copies
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus, Recipe, Source
from tests.corpus.texts import ENGLISH, ESTONIAN, estonian_document


def recipe_of(folder: Path, **keys) -> Recipe:
    sources = [
        {"name": "lines", "path": str(folder / "lines.txt")},
        {"name": "few", "path": str(folder / "few.jsonl"), "max_documents": 17},
        {"name": "packed", "path": str(folder / "packed.jsonl.gz")},
        {"name": "ready", "path": str(folder / "ready.jsonl"), "clean": False},
    ]
    keys = {"sources": sources, "min_document_characters": 20, "max_bad_share": 0.2, "workers": 1} | keys
    return Recipe(name="t", language="et", corpus=Corpus(**keys))


def small(folder: Path, **keys) -> Recipe:
    """A corpus of a moment."""
    (folder / "a.txt").write_text("esimene\nteine\n")
    sources = [{"name": "a", "path": str(folder / "a.txt"), "clean": False}]
    return recipe_of(folder, sources=sources, **keys)


def write_sources(folder: Path, times: int = 1) -> None:
    """Documents and lines that recur inside of a source and over sources, line ends of all kinds."""
    generator = random.Random(7)
    texts = [estonian_document(number) for number in range(40 * times)]
    ends = (b"\n", b"\r\n", b"\r\n", b"\n\n")
    lines = [generator.choice(ESTONIAN + ENGLISH[:2]) + f" {n % 50}" for n in range(150 * times)]
    content = b"".join(line.encode() + generator.choice(ends) for line in lines) + b"\xf5\n"
    (folder / "lines.txt").write_bytes(b"\xef\xbb\xbf" + content)

    def jsonl(some: list[str]) -> bytes:
        return b"".join(orjson.dumps({"text": text}) + b"\n" for text in some)

    (folder / "few.jsonl").write_bytes(jsonl(texts[:30]) + b"no JSON\n")
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(jsonl(texts[20:]), mtime=0))
    (folder / "ready.jsonl").write_bytes(jsonl([*texts[35:45], "x  y", "x  y", *lines[:5]]))


def kept_by_hand(cleaned: list[dict], own: set[str], least: int) -> list[str]:
    """The second pass as a plain script: texts of documents that stay."""
    documents, lines, left = set(), set(), []
    for document in cleaned:
        if document["text"] in documents:
            continue
        documents.add(document["text"])
        text = document["text"]
        if document["source"] in own:
            mine = []
            for line in text.split("\n"):
                if line not in lines:
                    mine.append(line)
                lines.add(line)
            text = "\n".join(mine)
            if not mine or len(text) < least:
                continue
        left.append(text)
    return left


@pytest.fixture
def parts_of(monkeypatch):
    """Sets the bytes of a part: a function of them."""

    def limit(size: int) -> None:
        monkeypatch.setattr(corpus_parts, "part_bytes", lambda total: size)

    return limit


def test_the_same_bytes_for_any_parts(tmp_path, parts_of, monkeypatch, capsys):
    """Whole files, and parts of 3,000 and 700 bytes; the text is a plain script's."""
    write_sources(tmp_path)
    said, hashes = set(), set()
    for size in (1 << 30, 3000, 700):
        parts_of(size)
        monkeypatch.setattr(corpus_tasks, "num_buckets", lambda *_, size=size: 1 if size > 3000 else 4)
        with monkeypatch.context() as kept:
            kept.setattr(corpus_stage, "remove_tasks", lambda *_, **__: None)
            folder = tmp_path / f"{size}"
            run_corpus(recipe_of(tmp_path), folder, tmp_path / "raw")
        hashes.add(hash_manifest(folder))
        said.add(capsys.readouterr().err)
        (work,) = (tmp_path / f".{size}.tasks").iterdir()
        parts = len(list((work / "clean").iterdir()))
        assert (parts == 4) if size > 3000 else (parts > 8)
        cleaned = [
            document
            for part in sorted((work / "clean").iterdir())
            for document in read_documents(part / "cleaned.jsonl.zst")
        ]
    assert len(hashes) == len(said) == 1
    documents = list(read_documents(folder / "documents"))
    expected = kept_by_hand(cleaned, {"lines", "few", "packed"}, 20)
    assert [document["text"] for document in documents] == expected and len(expected) > 60
    raw = (tmp_path / "lines.txt").read_text("utf-8", "replace").splitlines()
    mine = [document for document in documents if document["source"] == "lines"]
    for document in mine:  # lines are numbered as in the file
        assert document["id"] == f"lines/lines.txt:{document['metadata']['number']}"
        assert document["text"] == raw[document["metadata"]["number"] - 1].removeprefix("\ufeff").strip()
    assert "few: 1 files read. 17 documents in" in next(iter(said))


def test_files_end_at_a_number_of_bytes(tmp_path, parts_of, monkeypatch):
    """With the document that reaches it; each file is zstd of level 6 in one stream."""
    texts = [letter * 9 for letter in "abcdefg"]  # 10 bytes each, with the line's end
    (tmp_path / "a.txt").write_text("\n".join(texts) + "\n")
    source = {"name": "a", "path": str(tmp_path / "a.txt"), "clean": False}
    recipe = Recipe(name="t", language="et", corpus=Corpus(sources=[source], workers=1))
    for size, limit, numbers in ((1000, 30, [3, 3, 1]), (25, 30, [3, 3, 1]), (25, 35, [4, 3]), (9, 70, [7])):
        parts_of(size)
        monkeypatch.setattr(corpus_tasks, "BYTES_PER_FILE", limit)
        folder = tmp_path / f"{size} {limit}"
        run_corpus(recipe, folder, tmp_path / "raw", False)
        files = sorted((folder / "documents").iterdir())
        assert [path.name for path in files] == [f"{n:05d}.jsonl.zst" for n in range(len(numbers))]
        assert [len(list(read_documents(path))) for path in files] == numbers
        assert [one["text"] for one in read_documents(folder / "documents")] == texts
    compressor, content = zstandard.ZstdCompressor(level=6, write_checksum=True).compressobj(), b""
    with zstandard.ZstdDecompressor().stream_reader(files[0].read_bytes()) as stream:
        lines = stream.read()
    content = compressor.compress(lines) + compressor.flush()
    assert files[0].read_bytes() == content


def test_parts_of_files(tmp_path, parts_of):
    """Small files together; ranges of plain files of lines alone, at line ends."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("".join(f"rida {n}\n" for n in range(10)))
    for name in ("b.txt", "c.txt"):
        (text / name).write_text("rida\n")
    (text / "d.txt").write_text("a" * 90 + "\r" + "b\n")
    (text / "e.txt").write_bytes("rida\n".encode("utf-16") * 20)
    (text / "f.txt.gz").write_bytes(random.Random(1).randbytes(99))
    (text / "g.txt").write_bytes(b"%PDF-1.4\n" + b"x\n" * 45)
    recipe = Recipe(name="t", language="et", corpus=Corpus(sources=str(text)))
    by_default = corpus_parts.part_bytes
    parts_of(20)
    tasks, *_ = plan_corpus(recipe, tmp_path / "corpus", tmp_path / "raw", False)
    assert tasks.parts == make_parts(tasks.sources) == [
        *(Part(0, ("a.txt",), begin, begin + 21) for begin in (0, 21, 42)), Part(0, ("a.txt",), 63, 70),
        Part(0, ("b.txt", "c.txt")), Part(0, ("d.txt",), 0, 93), Part(0, ("e.txt",)), Part(0, ("f.txt.gz",)),
        Part(0, ("g.txt",)),
    ]  # fmt: skip
    assert by_default(100) == 8 << 20 and by_default(256 << 24) == 1 << 24
    assert by_default(1 << 38) == 256 << 20 and by_default(1 << 42) == 1 << 30


def test_copies_of_hashes(tmp_path, monkeypatch):
    """In runs and buckets as in a set, over parts, and of the counted positions alone."""
    monkeypatch.setattr(hash_buckets, "RUN", 5)
    generator = random.Random(3)
    parts = [[generator.randrange(12) << 60 for _ in range(size)] for size in (17, 0, 9, 5)]
    skipped = {(0, 2), (2, 0)}
    for buckets in (1, 4):
        for is_counted in (None, lambda part, at: np.array([(part, int(n)) not in skipped for n in at])):
            here = tmp_path / f"{buckets} {is_counted is None}"
            folders = [here / f"{number}" for number in range(len(parts))]
            for folder, hashes in zip(folders, parts, strict=True):
                folder.mkdir(parents=True)
                with HashWriter(folder, "x", buckets) as writer:
                    writer.add(hashes[:3])
                    writer.add(hashes[3:])
            found = [here / f"of {bucket}" for bucket in range(buckets)]
            for bucket, folder in enumerate(found):
                folder.mkdir()
                write_copies(folders, "x", bucket, folder, is_counted)
            seen = set()
            for number, hashes in enumerate(parts):
                expected = []
                for position, one in enumerate(hashes):
                    if is_counted is not None and (number, position) in skipped:
                        continue
                    expected += [position] if one in seen else []
                    seen.add(one)
                assert sorted(n for some in read_copies(found, number) for n in some.tolist()) == expected
    assert hash_buckets.num_buckets(1000) == 1 and hash_buckets.num_buckets(1 << 50) == 1 << 14
    # 4 Mi hashes of a bucket: 262 buckets of lines of 20 bytes, 892 of 17 bands of documents of 100 bytes
    assert hash_buckets.num_buckets(22 * 10**9) == 512 and hash_buckets.num_buckets(22 * 10**9, 17) == 1024
    assert xxhash.xxh3_64_intdigest(b"a") >> 62 == hash_buckets.bucket_of(
        np.array([xxhash.xxh3_64_intdigest(b"a")], np.uint64), 4
    )


def test_compressed_text_has_more_buckets(tmp_path, monkeypatch):
    """A compressed file counts as six times its size on disk; near copies count by bands."""
    pytest.importorskip("rensa")
    asked = []
    monkeypatch.setattr(corpus_tasks, "num_buckets", lambda *given: asked.append(given) or 1)
    write_sources(tmp_path)
    sizes = {path.suffix: 0 for path in tmp_path.iterdir()}
    for path in tmp_path.iterdir():
        sizes[path.suffix] += path.stat().st_size
    for near in ("none", "hplt", "fineweb2"):
        plan_corpus(recipe_of(tmp_path, near_copies=near), tmp_path / "corpus", tmp_path / "raw", False)
    total = sizes[".txt"] + sizes[".jsonl"] + 6 * sizes[".gz"]
    assert asked == [(total, 0), (total, 17), (total, 14)]


def test_finished_tasks_are_kept(tmp_path, parts_of, monkeypatch, capsys):
    """After a fault of the disk, and after a refusal that other settings lift. A task is not done twice."""
    write_sources(tmp_path)
    parts_of(3000)
    whole, folder = tmp_path / "whole", tmp_path / "corpus"
    run_corpus(recipe_of(tmp_path), whole, tmp_path / "raw", False)
    run, done = corpus_tasks.CorpusTasks.run, []

    def failing(tasks, round, number):
        if (round, number) == ("keep", 3):
            raise OSError(28, "No space left on device")
        done.append((round, number))
        run(tasks, round, number)

    with pytest.raises(KieloError, match="bad_share = 0 allows 0"):
        run_corpus(recipe_of(tmp_path, max_bad_share=0), folder, tmp_path / "raw", False)
    monkeypatch.setattr(corpus_tasks.CorpusTasks, "run", failing)
    with pytest.raises(KieloError, match=r"corpus stage was not written: No space left"):
        run_corpus(recipe_of(tmp_path), folder, tmp_path / "raw", False)
    assert "clean" not in {round for round, _ in done} and ("keep", 2) in done
    first, done[:] = set(done), []
    monkeypatch.setattr(corpus_tasks.CorpusTasks, "run", lambda *task: done.append(task[1:]) or run(*task))
    capsys.readouterr()
    run_corpus(recipe_of(tmp_path), folder, tmp_path / "raw")
    assert "tasks of an earlier attempt are kept" in capsys.readouterr().err
    assert done[0] == ("keep", 3) and not first & set(done)
    assert hash_manifest(folder) == hash_manifest(whole) and not list(tmp_path.glob(".corpus*"))


def test_parts_of_a_changed_file_are_not_planned(tmp_path, parts_of, monkeypatch):
    """A file changes after it was hashed, before it is cut into parts. Once it is restored no line is cut."""
    lines = [f"{number}: {estonian_document(number)}".replace("\n", " ") for number in range(30)]
    source, cut = tmp_path / "a.txt", corpus_tasks.make_parts
    recipe = recipe_of(tmp_path, sources=[{"name": "a", "path": str(source), "clean": False}])
    source.write_text("\n".join(lines))
    parts_of(1000)

    def cut_of_another(sources):
        source.write_text("a first line\n" + "\n".join(lines))
        return cut(sources)

    place = (tmp_path / "corpus", tmp_path / "raw", False)
    with monkeypatch.context() as patched:
        patched.setattr(corpus_tasks, "make_parts", cut_of_another)
        with pytest.raises(KieloError, match=r"a\.txt: changed while the corpus was read"):
            run_corpus(recipe, *place)
    source.write_text("\n".join(lines))
    run_corpus(recipe, *place)
    assert [one["text"] for one in read_documents(tmp_path / "corpus" / "documents")] == lines


def test_a_plan_that_is_there_is_not_written_again(tmp_path):
    """The plan of moved sources is: only then a job may replace what others read."""
    write_sources(tmp_path)
    plan = lambda: plan_corpus(recipe_of(tmp_path), tmp_path / "corpus", tmp_path / "raw", False)  # noqa: E731
    path = plan()[0].work / "plan.json"
    before = path.stat().st_ino
    os.utime(path, (1, 1))
    assert plan()[0].work == path.parent and path.stat().st_ino == before
    assert path.stat().st_mtime > 1  # the newest work
    os.utime(tmp_path / "lines.txt", (1, 1))
    assert plan()[0].work == path.parent and path.stat().st_ino != before


def test_a_removal_that_is_killed_leaves_no_task_done(tmp_path, monkeypatch):
    """And the next command ends it. Only the corpus's own work goes once the stage is finished."""
    recipe, place = small(tmp_path), (tmp_path / "corpus", tmp_path / "raw", False)
    tasks, *_ = plan_corpus(recipe, *place)

    def killed(path, **_):
        if path.parent.parent == tmp_path / ".corpus.tasks":  # a round
            raise KeyboardInterrupt
        rmtree(path, ignore_errors=True)

    rmtree = shutil.rmtree
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(corpus_tasks.shutil, "rmtree", killed)
        run_corpus(recipe, *place)
    other, *_ = plan_corpus(small(tmp_path, deduplicate_documents=False), *place)
    (left,) = set((tmp_path / ".corpus.tasks").iterdir()) - {other.work}
    assert not tasks.work.exists() and left.name.startswith(f".removed.{tasks.work.name}.")
    run_corpus(recipe, *place)
    assert list((tmp_path / ".corpus.tasks").iterdir()) == [other.work]


@pytest.mark.parametrize("place_of, is_dead, stays", [
    ("", False, True), ("", True, False), ("far", True, True), (os.uname().nodename, True, True),
])  # fmt: skip
def test_a_corpus_leaves_work_that_somebody_is_at(tmp_path, place_of, is_dead, stays):
    """On other settings: by a live process of this place, or lately of another, as a container with the name
    of this host is.
    """
    place = (tmp_path / "corpus", tmp_path / "raw", False)
    other, *_ = plan_corpus(small(tmp_path, deduplicate_documents=False), *place)
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    process = dead.pid if is_dead else os.getpid()
    aside = other.work / "clean" / f".00000.{place_of or this_place()}.{process}"
    aside.mkdir(parents=True)
    tasks, *_ = plan_corpus(small(tmp_path), *place)
    corpus_tasks.remove_tasks(tmp_path / "corpus", tasks.work, has_others=True)
    assert not tasks.work.exists() and aside.exists() == stays
    if stays:
        os.utime(aside, (1, 1))
        corpus_tasks.remove_tasks(tmp_path / "corpus", tasks.work, has_others=True)
        assert aside.exists() == (place_of == "")


@pytest.mark.parametrize("round, number, file", [
    ("count", 0, "b.jsonl"), ("clean", 0, "a.txt"), ("clean", 1, "b.jsonl"),
    ("clean", 0, "step.py"), ("clean", 1, "exam.txt"), ("clean", 0, "exams/new.txt"),
])  # fmt: skip
def test_a_task_of_changed_input_is_not_kept(tmp_path, monkeypatch, round, number, file):
    """A file changes just before a task reads it. Once it is restored the rest is done from it."""
    (tmp_path / "step.py").write_text(
        "def judge(text, metadata):\n    return 'long' if len(text) > 9 else None\n"
    )
    (tmp_path / "exams").mkdir()
    for name in ("exam.txt", "exams/old.txt"):
        (tmp_path / name).write_text("üks kaks kolm neli viis kuus seitse kaheksa\n")
    (tmp_path / "b.jsonl").write_text('{"text": "esimene"}\n{"text": "kolmas"}\n')
    recipe = small(tmp_path, decontaminate=tuple(str(tmp_path / name) for name in ("exam.txt", "exams")))
    more = [{"name": "b", "path": str(tmp_path / "b.jsonl"), "clean": False, "max_documents": 2}]
    keys = {"sources": (*recipe.corpus.sources, *map(Source.model_validate, more))}
    keys |= {"own_steps": (str(tmp_path / "step.py"),)}
    recipe = recipe.model_copy(update={"corpus": recipe.corpus.model_copy(update=keys)})
    run_corpus(recipe, tmp_path / "whole", tmp_path / "raw", False)
    path, run = tmp_path / file, corpus_tasks.CorpusTasks.run
    content = path.read_text() if path.exists() else None

    def changing(tasks, *task):
        if task == (round, number):
            path.write_text((content or "# uus").replace("esimene", "eelmine") + "\n")
        run(tasks, *task)

    place = (tmp_path / "corpus", tmp_path / "raw", False)
    with monkeypatch.context() as patched:
        patched.setattr(corpus_tasks.CorpusTasks, "run", changing)
        with pytest.raises(KieloError, match=f"{file}: changed while the corpus was read"):
            run_corpus(recipe, *place)
    path.unlink()
    if content is not None:
        path.write_text(content)
    tasks, *_ = plan_corpus(recipe, *place)
    assert number in tasks.undone(round)
    run_corpus(recipe, *place)
    assert hash_manifest(tmp_path / "corpus") == hash_manifest(tmp_path / "whole")


def test_an_upgrade_begins_the_tasks_anew(tmp_path, monkeypatch):
    """A package that makes text was upgraded; the finished stage stays."""
    write_sources(tmp_path)
    plan = lambda: plan_corpus(recipe_of(tmp_path), tmp_path / "corpus", tmp_path / "raw", False)  # noqa: E731
    tasks, *identity = plan()
    installed = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "9" if name == "regex" else installed(name))
    installed_versions.cache_clear()
    upgraded, *same = plan()
    installed_versions.cache_clear()
    assert upgraded.work != tasks.work and same == identity


def test_a_second_worker_and_a_dead_one(tmp_path, monkeypatch):
    """Two workers finish the same task: one folder stays. A dead process's folder of this place is removed,
    and none of a container with the name of this host.
    """
    write_sources(tmp_path)
    tasks, *_ = plan_corpus(recipe_of(tmp_path), tmp_path / "corpus", tmp_path / "raw", False)
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    rest = tasks.work / "count" / f".00000.{this_place()}.{dead.pid}"
    rest.mkdir(parents=True)
    other = tasks.work / "count" / f".00000.{os.uname().nodename}.{dead.pid}"
    other.mkdir()
    count, calls = corpus_tasks.count_part, []

    def beside(*part):
        calls.append(os.getpid())
        if len(calls) == 1:
            monkeypatch.setattr(os, "getpid", lambda: calls[0] + 1)
            corpus_tasks.CorpusTasks(tasks.recipe, tasks.work).run("count", 0)
            monkeypatch.undo()
        return count(*part)

    assert tasks.undone("count") == [0]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(corpus_tasks, "count_part", beside)
        tasks.run("count", 0)
    assert len(calls) == 2 and [path.name for path in rest.parent.iterdir() if path.name[0] != "."] == [
        "00000"
    ]
    assert tasks.is_finished("count") and not rest.exists() and other.exists()
    with pytest.raises(KieloError, match="borders is not finished"):
        tasks.num_tasks("write")
    (tasks.work / "plan.json").write_text(json.dumps({"kind": "other"}))
    with pytest.raises(KieloError, match="no readable plan.json"):
        corpus_tasks.CorpusTasks(tasks.recipe, tasks.work)


KILLED = """
import sys
from pathlib import Path
from kielo.corpus import corpus_parts, corpus_stage
from tests.corpus.test_corpus_tasks import recipe_of
corpus_parts.part_bytes = lambda total: 4000
corpus_stage.LEAST_BYTES_FOR_WORKERS = 0
here = Path(sys.argv[1])
corpus_stage.run_corpus(recipe_of(here, workers=2), here / "corpus", here / "raw", False)
"""


@pytest.mark.full
def test_workers_killed_at_random(tmp_path, parts_of):
    """The command or one of its workers, again and again: the corpus is that of a run that was left alone."""
    write_sources(tmp_path, 4)
    parts_of(4000)
    run_corpus(recipe_of(tmp_path), tmp_path / "whole", tmp_path / "raw", False)
    generator, killed = random.Random(11), 0
    for attempt in range(60):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, tmp_path], stderr=subprocess.DEVNULL, start_new_session=True
        ) as process:
            end = time.monotonic() + generator.uniform(1, 2 + attempt / 4)
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.01)
            if process.poll() is None:
                killed += 1
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                victims = [process.pid] if attempt % 2 or not children else [int(generator.choice(children))]
                for victim in victims:
                    with suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)
        if process.returncode == 0:
            break
    assert killed > 2 and hash_manifest(tmp_path / "corpus") == hash_manifest(tmp_path / "whole")
    assert not list(tmp_path.glob(".corpus*"))
