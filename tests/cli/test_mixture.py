"""Real text of four kinds through poro_34b's own recipe at toy sizes: nothing wanted is lost on the way.

The LibreOffice help in Finnish and English comes as Debian packages, Python files from the standard library,
and pairs from both helps by page and paragraph.
"""

import gzip
import json
import re
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
import zstandard

from kielo.artifact.documents import read_documents
from kielo.artifact.token_shards import TokenShard
from kielo.cli.main import main
from kielo.corpus.download import FetchProblem, fetch_debian_package
from kielo.recipe.sections import Source
from kielo.tokenizer.load import decode, load_tokenizer

PAGES = 400
MAX_CODE_FILES = 150
PARAGRAPH = re.compile(r'<(p|h\d) id="((?:par|hd)_[^"]+)"[^>]*>(.*?)</\1>', re.DOTALL)
TAG = re.compile(r"<[^>]+>")


def _help(folder, language):
    """Downloads the help in a language; returns {(page, paragraph's id): text} of its first pages."""
    package = f"libreoffice-help-{language}"
    try:
        fetch_debian_package(Source(debian_package=package), folder / language)
    except FetchProblem as problem:
        pytest.skip(f"{package} cannot be fetched: {problem}")
    pages = sorted((folder / language).rglob("*.html"))
    paragraphs = {}
    for path in pages[:: max(1, len(pages) // PAGES)]:
        page = path.as_posix().partition("/text/")[2]
        for _, key, html in PARAGRAPH.findall(path.read_text(encoding="utf-8")):
            text = " ".join(TAG.sub("", html).replace("&nbsp;", " ").split())
            if text and "&" not in text:
                paragraphs[page, key] = text
    return paragraphs


def _write(path, lines):
    """Writes lines, packed as the ending of the file's name says, where poro_34b looks for them."""
    path.parent.mkdir(parents=True)
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}[path.suffix]
    path.write_bytes(pack("".join(line + "\n" for line in lines).encode()))


def _write_jsonl(path, field, texts):
    _write(path, [json.dumps({field: text}, ensure_ascii=False) for text in texts])


def _pages(paragraphs):
    """Pages of text of a help: paragraphs of at least 60 characters, each once in the whole help."""
    seen, pages = set(), {}
    for (page, _), text in paragraphs.items():
        if len(text) >= 60 and text not in seen:
            seen.add(text)
            pages.setdefault(page, []).append(text)
    return ["\n".join(lines) for lines in pages.values() if sum(map(len, lines)) >= 200]


def _write_sources(folder):
    """Writes the four sources of poro_34b below `folder`; returns what is wanted of each."""
    finnish, english = _help(folder / "helps", "fi"), _help(folder / "helps", "en-us")
    # Parts of the Finnish help are not translated: what is the same in both is not wanted.
    finnish = {key: text for key, text in finnish.items() if english.get(key, text) != text}
    pairs = dict.fromkeys((english[key], finnish[key]) for key in finnish)
    pairs = [pair for pair in pairs if min(map(len, pair)) >= 40]
    library = Path(sysconfig.get_paths()["stdlib"])
    code = [path.read_bytes().decode() for path in sorted(library.glob("*.py"))[:MAX_CODE_FILES]]
    wanted = {"finnish": _pages(finnish), "english": _pages(english), "code": code, "translations": pairs}
    _write_jsonl(folder / "text/finnish/a.jsonl.zst", "text", wanted["finnish"])
    _write_jsonl(folder / "text/english/a.jsonl.zst", "text", wanted["english"])
    _write_jsonl(folder / "text/code/a.jsonl.zst", "content", code)
    _write(folder / "text/translations/a.tsv.gz", ["\t".join(pair) for pair in pairs])
    return wanted


SHARES = {"finnish": 0.4, "english": 0.3, "code": 0.2, "translations": 0.1}
STEPS, SEQUENCES = 10, 100
TOY = [
    "cluster=laptop", "corpus.workers=1", "tokenizer.vocab_size=1000", "dataset.sequence_length=32",
    "model.hidden_size=16", "model.intermediate_size=64", "model.num_hidden_layers=1",
    "model.num_attention_heads=2", "model.max_position_embeddings=32", "layout.tensor=1",
    f"train.tokens={STEPS * SEQUENCES * 32}", f"train.tokens_per_step={SEQUENCES * 32}",
    "train.micro_batch_sequences=50", "train.precision=fp32", "train.warmup_share=0.1",
    "train.tensorboard=false",
    "dataset.mixture={" + ", ".join(f"{name} = {share}" for name, share in SHARES.items()) + "}",
]  # fmt: skip


@pytest.mark.full
def test_four_kinds_of_real_text_become_steps(tmp_path, monkeypatch, capsys):
    """Each source keeps at least 0.97 of what is wanted, code is byte for byte the same after its tokens are
    decoded, ten steps are trained, and their 1,000 samples are shared within one sample as the recipe says.
    """
    wanted = _write_sources(tmp_path)
    monkeypatch.chdir(tmp_path)
    sets = [part for value in TOY for part in ("--set", value)]
    assert main(["run", "poro_34b", "--to", "train", *sets]) == 0
    kept = Counter()
    for document in read_documents("runs/poro_34b/corpus/documents"):
        kept[document["source"]] += len(document["text"].encode())
        assert document["source"] != "code" or document["text"] in wanted["code"]
    assert sum(map(len, wanted["finnish"])) > 100_000 and sum(map(len, wanted["english"])) > 100_000
    wanted_bytes = {
        name: sum(len("".join(text).encode()) for text in texts) for name, texts in wanted.items()
    }
    # The layout of pairs adds text of its own: they are counted.
    funnel = json.loads(Path("runs/poro_34b/corpus/funnel.json").read_text())
    documents = {source["name"]: source["documents_kept"] for source in funnel["sources"]}
    assert documents["translations"] >= 0.97 * len(wanted["translations"])
    for name in ("finnish", "english", "code"):
        assert kept[name] >= 0.97 * wanted_bytes[name], (name, kept, wanted_bytes)

    tokens = Path("runs/poro_34b/tokens")
    shard = TokenShard(tokens / "code")
    ids = shard.read(0, shard.num_tokens)
    tokenizer = load_tokenizer("runs/poro_34b/tokenizer")
    files = decode(tokenizer, [ids])[0].split(tokenizer.end_of_text)
    names = (tokens / "code.ids.txt").read_text().splitlines()
    assert files.pop() == "" and len(files) == len(names) > 100
    assert set(files) <= set(wanted["code"])

    samples = {}
    for step in range(1, STEPS + 1):
        capsys.readouterr()
        assert main(["data", "poro_34b", *sets, "--step", str(step), "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        samples |= {row["sample"]: row["source"] for row in rows}
        assert {row["document"].partition("/")[0] for row in rows} == {row["source"] for row in rows}
    assert sorted(samples) == list(range(STEPS * SEQUENCES))
    for name, number in Counter(samples.values()).items():
        assert abs(number - SHARES[name] * STEPS * SEQUENCES) <= 1, (name, number)
