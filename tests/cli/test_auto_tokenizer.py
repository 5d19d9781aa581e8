"""Ready tokenizers from text to export: the ids that are trained are those that transformers reads later."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from kielo.artifact.attempt_files import ALERTS_NAME
from kielo.artifact.token_shards import TokenShard
from kielo.checkpoint import auto_tokenizer
from kielo.cli.main import main
from tests.cli.test_instructions import SMALL
from tests.docs.toy_text import document

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
)
TEXTS = [document(number) for number in range(60)]


def llama() -> Tokenizer:
    """As Llama 2's: SentencePiece's BPE with bytes for unknown characters, spaces by the normaliser."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    of_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL + of_bytes, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][: len(SPECIAL)]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def byte_level(dropout: float | None = None) -> Tokenizer:
    """With tokens of several words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.model.dropout = dropout
    return tokenizer


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch) -> Callable[..., list[str]]:
    """Return a function that writes a recipe with such a tokenizer, and returns its flags."""
    monkeypatch.chdir(tmp_path)

    def write(tokenizer: Tokenizer, config: dict, *sets: str) -> list[str]:
        folder = tmp_path / "theirs"
        folder.mkdir()
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(ROLES | config))
        Path("text.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
        with open("chats.jsonl", "w", encoding="utf-8") as file:
            for number in range(40):
                pair = [("user", document(2 * number)), ("assistant", " " + document(2 * number + 1))]
                messages = [{"role": role, "content": text} for role, text in pair * (1 + number % 2)]
                file.write(json.dumps({"messages": messages}) + "\n")
        Path("small.toml").write_text('name = "small"\nlanguage = "fi"\nextends = "own_text"\n')
        text = '{name="text", path="text.txt", clean=false}'
        small = [one for one in SMALL.split() if not one.startswith("tokenizer")]
        values = [*small, f"corpus.sources=[{text}]", f"tokenizer.path={folder}", *sets]
        return ["small.toml", *(part for value in values for part in ("--set", value))]

    return write


CHATS = (
    'corpus.sources=[{name="text", path="text.txt", clean=false}, '
    '{name="chats", path="chats.jsonl", kind="instructions"}]'
)


def test_other_ids_are_refused_before_packing_and_before_the_first_step(prepared, capsys, monkeypatch):
    """With the first text that differs, and the fix; without transformers it is said."""
    flags = prepared(byte_level(), {"tokenizer_class": "GPT2Tokenizer"})
    assert main(["run", *flags, "--to", "pack"]) == 1
    said = capsys.readouterr().err
    assert "gives other ids than Kielo" in said and TEXTS[0][:20] in said
    assert '"tokenizer_class": "PreTrainedTokenizerFast"' in said
    assert not Path("runs/small/tokens").exists()
    with monkeypatch.context() as here:
        here.setattr(auto_tokenizer, "is_installed", lambda: False)
        assert main(["run", *flags, "--to", "pack"]) == 0
    assert "is not compared with transformers' AutoTokenizer yet" in capsys.readouterr().out
    assert main(["run", *flags, "--to", "train"]) == 1
    assert "gives other ids than Kielo" in capsys.readouterr().err
    assert not Path("runs/small/train/metrics.jsonl").exists()
    Path("theirs/tokenizer_config.json").write_text(
        json.dumps(ROLES | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    assert main(["run", *flags, "--to", "train"]) == 0
    assert "texts have the same ids in transformers" in capsys.readouterr().out


def test_a_run_that_was_not_compared_is_mended_in_its_export(prepared, monkeypatch):
    flags = prepared(byte_level(), {"tokenizer_class": "GPT2Tokenizer"})
    with monkeypatch.context() as here:
        here.setattr(auto_tokenizer, "is_installed", lambda: False)
        assert main(["run", *flags, "--to", "train"]) == 0
    alerts = Path("runs/small/train", ALERTS_NAME).read_text()
    assert "is not compared with transformers' AutoTokenizer yet" in alerts
    assert main(["run", *flags, "--to", "export"]) == 0
    theirs = AutoTokenizer.from_pretrained("runs/small/hf")
    expected = [Tokenizer.from_file("theirs/tokenizer.json").encode(text).ids for text in TEXTS]
    assert theirs(TEXTS)["input_ids"] == expected


def test_the_chat_ids_of_an_export_are_the_trained_ids(prepared):
    """transformers 5 builds a LlamaTokenizer anew and prepends no space after a mark."""
    keys = {"tokenizer_class": "LlamaTokenizer", "chat_template": TEMPLATE, "legacy": False}
    flags = prepared(llama(), keys, CHATS)
    assert main(["run", *flags, "--to", "export"]) == 0
    assert "gives other ids to conversations" in Path("runs/small/train", ALERTS_NAME).read_text()
    run, shard = Path("runs/small"), TokenShard("runs/small/tokens/chats")
    theirs = AutoTokenizer.from_pretrained(run / "hf")
    ids = (run / "tokens" / "chats.ids.txt").read_text().splitlines()
    lines = Path("chats.jsonl").read_text().splitlines()
    compared = 0
    for number, (start, end) in enumerate(zip(shard.document_offsets, shard.document_offsets[1:])):
        messages = json.loads(lines[int(ids[number].rsplit("/")[-1].rsplit(":")[-1]) - 1])["messages"]
        packed = shard.read(int(start), int(end - start)).tolist()
        assert theirs.apply_chat_template(messages, return_dict=False) == packed[:-1]
        compared += 1
    assert compared >= 20
    leading = [" algab tühikuga", "  kaks"]
    expected = [Tokenizer.from_file("theirs/tokenizer.json").encode(text).ids for text in leading]
    assert theirs(leading)["input_ids"] == expected


def test_dropout_of_merges_is_off_in_the_run_and_its_export(prepared, capsys):
    keys = {"tokenizer_class": "PreTrainedTokenizerFast"}
    flags = prepared(byte_level(dropout=0.5), keys)
    assert main(["run", *flags, "--to", "export"]) == 0
    assert json.loads(Path("runs/small/hf/tokenizer.json").read_text())["model"]["dropout"] is None
    plain = Tokenizer.from_file("theirs/tokenizer.json")
    plain.model.dropout = None
    shard = TokenShard("runs/small/tokens/heldout")
    end = int(shard.document_offsets[1])
    first = plain.decode(shard.read(0, end - 1).tolist(), skip_special_tokens=False)
    assert plain.encode(first).ids == shard.read(0, end - 1).tolist()
    theirs = AutoTokenizer.from_pretrained("runs/small/hf")
    assert theirs(TEXTS)["input_ids"] == [plain.encode(text).ids for text in TEXTS]


@pytest.mark.parametrize("is_theirs", [True, pytest.param(False, marks=pytest.mark.full)])
def test_weights_without_a_tokenizer_are_compared_by_what_they_have(prepared, is_theirs, capsys):
    """A tokenizer of the right size whose tokens are others: warned for special ids and the first loss."""
    keys = {"tokenizer_class": "PreTrainedTokenizerFast"}
    flags = prepared(byte_level(), keys, "train.learning_rate=0.05", "train.tokens=8192")
    assert main(["run", *flags, "--to", "export"]) == 0
    weights = Path("weights")
    shutil.copytree("runs/small/hf", weights)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (weights / name).unlink()
    if not is_theirs:
        content = json.loads(Path("theirs/tokenizer.json").read_text())
        names = list(content["model"]["vocab"])
        order = np.random.default_rng(0).permutation(len(names))
        content["model"]["vocab"] = {name: int(number) for name, number in zip(names, order)}
        for token in content["added_tokens"]:
            token["id"] = content["model"]["vocab"][token["content"]]
        Path("theirs/tokenizer.json").write_text(json.dumps(content))
    again = [*flags, "--set", f"model.weights=hf:{weights.resolve()}", "--set", "name=again"]
    capsys.readouterr()
    assert main(["run", *again, "--to", "train"]) == 0
    alerts = Path("runs/again/train", ALERTS_NAME)
    said = alerts.read_text() if alerts.is_file() else ""
    assert ("is perhaps not its tokenizer" in said) == (not is_theirs)
    assert ("a random guess among 400 tokens" in said and f"{math.log(400):.2f}" in said) == (not is_theirs)


def test_a_template_that_writes_the_date_is_no_reason_to_refuse(prepared, capsys):
    """Kielo gives it no date, as documented; what is written there and here is shown."""
    dated = "{{ strftime_now('%Y') if strftime_now is defined else 'no date' }}" + TEMPLATE
    keys = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": dated}
    assert main(["run", *prepared(byte_level(), keys, CHATS), "--to", "export"]) == 0
    said = Path("runs/small/train", ALERTS_NAME).read_text()
    assert "renders conversations otherwise" in said and "'no date<s>" in said
