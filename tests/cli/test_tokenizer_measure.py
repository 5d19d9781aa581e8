"""`kielo tokenizer measure`: its table, its JSON, and what it refuses."""

import json

import pytest

from kielo.cli.main import main
from kielo.recipe.sections import Recipe
from kielo.tokenizer.learn_vocabulary import extend
from kielo.tokenizer.load import load_tokenizer
from kielo.tokenizer.train import save, train_on

ESTONIAN = ["Õpetaja selgitas reeglit, õpilased kirjutasid.", "Keele sõnad on 12 ja 34."]
ENGLISH = ["The teacher explained the rule, pupils wrote.", "Words of a language are 1 and 2."]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with an English tokenizer, it extended, an Estonian one, and parallel text."""
    monkeypatch.chdir(tmp_path)
    settings = {"name": "t", "language": "et", "corpus": {"sources": ["a.txt"]}}
    for name, texts in (("english", ENGLISH), ("estonian", ESTONIAN)):
        read = Recipe(**settings, tokenizer={"vocab_size": 280})
        save(train_on(texts * 5, read), tmp_path / name)
    save(extend(load_tokenizer("english"), ESTONIAN * 5, 300), tmp_path / "extended")
    for name, lines in (
        ("et.txt", ESTONIAN),
        ("en.txt", ENGLISH),
        ("one.txt", ENGLISH[:1]),
        ("no.txt", ["", " "]),
    ):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    return tmp_path


def asked(capsys, *arguments):
    assert main(["tokenizer", "measure", *arguments]) == 0
    return capsys.readouterr().out


def test_figures_parity_and_costs_of_three_vocabularies(here, capsys):
    """Tokens are those of the tokenizers alone; the Estonian vocabulary makes Estonian cheaper."""
    names = ("english", "extended", "estonian")
    flags = ("--parallel", "et.txt", "en.txt", "--model", "own_text", "--bytes", "1GB")
    said = json.loads(asked(capsys, *names, *flags, "--json"))
    for name in names:
        encode = load_tokenizer(name).whole.encode
        et, en = (sum(len(encode(line).ids) for line in lines) for lines in (ESTONIAN, ENGLISH))
        figures = said["tokenizers"][name]
        assert (figures["tokens"], figures["parallel_tokens"], figures["english_tokens"]) == (et, et, en)
        assert figures["parity"] == et / en and figures["words"] == 11
    parities = [said["tokenizers"][name]["parity"] for name in names]
    assert parities[0] > parities[1] > parities[2]
    assert [one["kind"] for one in said["choices"]] == ["keep", "extend", "replace"]
    assert said["choices"][1]["new_rows"] == 20 and said["choices"][0]["relearn_tokens"] == 0
    assert said["advice"][0].startswith(("Extend to extended: ", "Replace by estonian: "))
    table = asked(capsys, *names, *flags)
    assert (
        "parity with English\t" in table and "\nreplace\testonian\t" in table and said["advice"][0] in table
    )


def test_a_model_alone_gives_the_share_of_its_embedding(here, capsys):
    """A folder with config.json: 300 rows of 8, twice, of all parameters counted by hand."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "vocab_size": 300,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    }  # fmt: skip
    (here / "hf").mkdir()
    (here / "hf" / "config.json").write_text(json.dumps(config))
    said = json.loads(asked(capsys, "extended", "--text", "et.txt", "--model", "hf", "--json"))
    layer = 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8
    assert said["tokenizers"]["extended"]["embedding_share"] == 4800 / (4800 + layer + 8)
    assert said["choices"] == []
    assert "the training text: --bytes 40GB" in asked(
        capsys, "english", "estonian", "--text", "et.txt", "--model", "hf"
    )


TEXT = ["--text", "et.txt"]
REFUSED = {
    "no text": ([], "Fix: --text FILE, --heldout RUN or --parallel FILE ENGLISH"),
    "two texts": ([*TEXT, "--heldout", "run"], "Fix: one of them"),
    "lines that differ": (["--parallel", "et.txt", "one.txt"], "et.txt has 2 lines and one.txt 1"),
    "an empty side": (["--parallel", "et.txt", "no.txt"], "no.txt: no text in it"),
    "an empty text": (["--text", "no.txt"], "no.txt: no text in it"),
    "no file": (["--parallel", "et.txt", "gone.txt"], "gone.txt: no such file"),
    "bytes": (["--text", "bytes.txt"], "bytes.txt: byte 0 is not UTF-8"),
    "a folder without a run": (["--heldout", "english"], "english"),
    "a flag of a model": ([*TEXT, "--bytes", "1GB"], "Fix: --model MODEL too"),
    "no amount": ([*TEXT, "--model", "own_text", "--bytes", "much"], "--bytes 'much' is not an amount"),
    "no nodes": ([*TEXT, "--model", "poro_34b", "--nodes", "0"], "--nodes 0"),
    "nodes not given": ([*TEXT, "--model", "poro_34b", "--cluster", "lumi_g"], "how many? Fix: --nodes 16"),
    "no model": ([*TEXT, "--model", "gone"], "gone"),
    "no cluster": ([*TEXT, "--model", "own_text", "--bytes", "1G", "--cluster", "gone"], "kielo clusters"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(here, capsys, what):
    """One message that names the file or flag, and the fix."""
    arguments, named = REFUSED[what]
    assert main(["tokenizer", "measure", "english", "estonian", *arguments]) == 1
    message = capsys.readouterr().err
    assert message.startswith("kielo: ") and named in message, message


def test_the_first_tokenizer_must_be_the_models(here, capsys):
    """More tokens than the model has rows: both numbers are named."""
    arguments = ["--text", "et.txt", "--model", "estonian_llama31_70b"]
    content = json.loads((here / "english" / "tokenizer.json").read_text())
    content["model"]["vocab"]["abcabc"] = 200_000
    (here / "english" / "tokenizer.json").write_text(json.dumps(content))
    assert main(["tokenizer", "measure", "english", "estonian", *arguments]) == 1
    assert "200,001 tokens, and the model has 128,256" in capsys.readouterr().err
