"""A checkpoint is exported as a folder that transformers loads: exact, in blocks, resumed after a crash."""

import errno
import hashlib
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kielo.artifact.durable import marked
from kielo.artifact.manifest import read_manifest
from kielo.artifact.resumable_stage import ResumableStage
from kielo.artifact.run_format import with_version
from kielo.checkpoint import export_tensors
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.export_stage import ExportOptions
from kielo.checkpoint.hugging_face_export import export
from kielo.checkpoint.safetensors_storage import SafetensorsStream
from kielo.checkpoint.tensor_table import cut, join, read_table
from kielo.models import families
from kielo.models.llama.model import Llama
from kielo.models.llama.tables import to_hugging_face
from kielo.models.piece import Piece, by_stored_name
from kielo.recipe.errors import KieloError
from tests.checkpoint.layouts import config, model_on_ranks, values
from tests.checkpoint.test_drills import Killer
from tests.started_ranks import run_ranks

SHARD_BYTES = 9000
POINTS = 12


def plain_model(model_config, seed: int = 5) -> Llama:
    model = Llama(model_config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values(model_config, seed)(name, parameter.shape) * (1 if "norm" in name else 5))
    return model


def saved(folder: Path, tensors: dict[str, torch.Tensor], plain: dict[str, Any] | None = None) -> Path:
    checkpointer = Checkpointer(folder)
    checkpointer.save(3, {f"model/{name}": value for name, value in tensors.items()}, plain or {})
    return checkpointer.settle()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def contents(folder: Path) -> dict[str, bytes]:
    """All that two exports of one checkpoint share: the manifest has dates."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("run"), plain_model(config()).state_dict())


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = ["<|endoftext|>", *sorted(ByteLevel.alphabet())[:60]]
    tokenizer = Tokenizer(BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|endoftext|>")
    (folder / "special_tokens_map.json").write_text(json.dumps(roles))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(roles | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_an_export_is_the_same_model_in_transformers(tmp_path, tokenizer_folder, tied):
    """Logits within 1e-4 in fp32, generation works, and every file is the one that the manifest names."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = plain_model(config(tied))
    path = saved(
        tmp_path / "checkpoints", model.state_dict(), {"identity": with_version({"name": "tiny run"})}
    )
    options = ExportOptions(max_shard_bytes=SHARD_BYTES)
    folder = export(path, tmp_path / "hf", config(tied), tokenizer_folder, options)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2 and all((folder / shard).stat().st_size < 10_000 for shard in shards)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights_of(folder).values())
    digests = read_manifest(folder).counts["sha256"]
    assert set(digests) | {"manifest.json"} == {file.name for file in folder.iterdir()}
    for name, digest in digests.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest

    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert theirs.dtype == torch.float32
    tokens = torch.randint(0, 67, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = (model.head(model(tokens)) - theirs(tokens).logits).abs().max()
        generated = theirs.generate(tokens[:, :4], max_new_tokens=5, do_sample=False)
    assert difference <= 1e-4 and generated.shape[1] > 4
    assert theirs.generation_config.eos_token_id == 0
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|endoftext|>"


def test_the_dtype_is_as_asked_and_what_is_refused_leaves_nothing(tmp_path, tokenizer_folder):
    """bf16 fits one file; unknown dtypes, missing tensors, weights beyond fp16, a taken folder are named."""
    model = plain_model(config())
    with torch.no_grad():
        model.head.weight[3, 2] = -70_000.0
    path = saved(tmp_path / "checkpoints", model.state_dict())
    folder = export(path, tmp_path / "hf", config(), tokenizer_folder, ExportOptions(dtype="bf16"))
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], model.head.weight.detach().bfloat16())
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"

    def refusal(to=tmp_path / "other", layers=2, **options) -> str:
        with pytest.raises(KieloError) as caught:
            asked = config().model_copy(update={"num_hidden_layers": layers})
            export(path, to, asked, tokenizer_folder, ExportOptions(**options))
        return str(caught.value)

    assert "fp8" in refusal(dtype="fp8") and "fp32, bf16, fp16" in refusal(dtype="fp8")
    assert "training began from" in refusal(dtype="source")
    assert "lm_head.weight has a weight of magnitude 70,000, and fp16 ends" in refusal(dtype="fp16")
    assert "layers.2.attention_norm.weight" in refusal(layers=3)
    assert not list(tmp_path.glob("other*"))
    assert "exists already" in refusal(to=folder, dtype="fp32", is_replacing=False)
    assert load_file(folder / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


def test_what_is_there_already_is_not_written_again(tmp_path, checkpoint, tokenizer_folder):
    """The same call changes nothing, also with the report's README; another dtype replaces the folder."""
    arguments = (checkpoint, tmp_path / "hf", config(), tokenizer_folder)
    folder = export(*arguments)
    (folder / "README.md").write_text(marked("a model card, which is longer\n"))

    def written() -> dict[Path, tuple[int, int]]:
        """Inode and time of change of each file; the time of access may move."""
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}

    before = written()
    export(*arguments, ExportOptions(is_replacing=False))
    assert written() == before
    export(*arguments, ExportOptions(dtype="fp16"))
    assert load_file(folder / "model.safetensors")["lm_head.weight"].dtype == torch.float16
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    (folder / "README.md").write_text("a person's card")
    with pytest.raises(KieloError, match="contains README.md"):
        export(*arguments, ExportOptions(dtype="bf16"))
    assert (folder / "README.md").read_text() == "a person's card"


def test_no_block_is_larger_than_allowed_and_many_give_the_same_bytes(tmp_path, checkpoint, monkeypatch):
    """No tensor larger than a block is made or written, and blocks leave no seam.

    So memory does not grow with the model.
    """
    whole = contents(export(checkpoint, tmp_path / "whole", config(), None, ExportOptions(dtype="bf16")))
    made, written = [], []
    empty, write_rows = torch.empty, SafetensorsStream.write_rows

    def counted_empty(*size, **options):
        made.append(empty(*size, **options))
        return made[-1]

    def counted_rows(stream, rows):
        written.append(rows.nbytes)
        write_rows(stream, rows)

    monkeypatch.setattr(export_tensors, "BLOCK_BYTES", 200)  # three rows of 16 and a bit
    monkeypatch.setattr(torch, "empty", counted_empty)
    monkeypatch.setattr(SafetensorsStream, "write_rows", counted_rows)
    assert (
        contents(export(checkpoint, tmp_path / "blocks", config(), None, ExportOptions(dtype="bf16")))
        == whole
    )
    assert len(written) > 100 and max(written) <= 100
    assert max(value.nbytes for value in made if value.dtype != torch.uint8) <= 200


def save_on_ranks(folder: Path, replicate: int, shard: int, tensor: int) -> None:
    model, _ = model_on_ranks(config(), replicate, shard, values(config(), 5), tensor=tensor)
    saved(folder, dict(model.named_parameters()))


def test_the_layout_that_saved_it_does_not_show(tmp_path, monkeypatch):
    """Pieces of rows and of columns, on replicas or not, make up the same tensors as those of one process."""
    monkeypatch.setattr(export_tensors, "BLOCK_BYTES", 300)
    for sizes in ((1, 3, 1), (2, 1, 2), (1, 2, 2)):
        folder = tmp_path / "_".join(map(str, sizes))
        run_ranks(save_on_ranks, sizes[0] * sizes[1] * sizes[2], folder, *sizes)
        stored = weights_of(export(Checkpointer(folder).newest(), folder / "hf", config(), None))
        for name, piece in to_hugging_face(config()).items():
            shape = stored[piece.name].shape
            assert torch.equal(stored[piece.name], values(config(), 5)(name, shape)), (sizes, name)


HEADS, HEAD_DIM, HIDDEN = 3, 4, 12
MADE_UP = {
    "scalar": Piece("scale"),
    "q": Piece("fused", 0, HEAD_DIM, 3 * HEAD_DIM),
    "k": Piece("fused", HEAD_DIM, HEAD_DIM, 3 * HEAD_DIM),
    "v": Piece("fused", 2 * HEAD_DIM, HEAD_DIM, 3 * HEAD_DIM),
    "q_bias": Piece("fused_bias", 0, HEAD_DIM, 2 * HEAD_DIM),
    "k_bias": Piece("fused_bias", HEAD_DIM, HEAD_DIM, 2 * HEAD_DIM),
    "left": Piece("beside", 0, transposed=True),
    "right": Piece("beside", 10, transposed=True),
    "padded": Piece("wte", rows=67),
}
SHAPES = {
    **dict.fromkeys("qkv", (HEADS * HEAD_DIM, HIDDEN)),
    **dict.fromkeys(("q_bias", "k_bias"), (HEADS * HEAD_DIM,)),
    "left": (10, HIDDEN), "right": (7, HIDDEN), "padded": (128, 5), "scalar": (),
}  # fmt: skip


@pytest.mark.parametrize("block_bytes", [1, 150, 10**6])
def test_fused_transposed_and_padded_weights_lie_where_the_file_wants_them(
    tmp_path, monkeypatch, block_bytes
):
    """Blocks of any size give the joined whole tensors; cut out again they are the parameters."""
    family = SimpleNamespace(to_hugging_face=lambda _: MADE_UP)
    model = config()  # before its family becomes the made-up one
    monkeypatch.setattr(families, "module", lambda *_: family)
    monkeypatch.setattr(families, "hf_config", lambda *_, **__: {})
    monkeypatch.setattr(export_tensors, "BLOCK_BYTES", block_bytes)
    generator = torch.Generator().manual_seed(1)
    ours = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    stored = weights_of(export(saved(tmp_path / "checkpoints", ours), tmp_path / "hf", model, None))
    assert stored["fused"].shape == (3 * HEADS * HEAD_DIM, HIDDEN) and stored["wte"].shape == (67, 5)
    assert stored["beside"].shape == (HIDDEN, 17) and stored["scale"].shape == ()
    for name, pieces in by_stored_name(MADE_UP).items():
        assert torch.equal(stored[name], join(pieces, ours))
    # One element of two bytes before all others of four: every tensor must begin where its dtype can be read.
    mixed = {"source_tensors": dict.fromkeys(stored, "F32") | {"scale": "BF16"}}
    folder = export(saved(tmp_path / "mixed", ours, mixed), tmp_path / "mixed_hf", model, None)
    table = read_table(folder / "model.safetensors")
    for name, value in weights_of(folder).items():
        assert torch.equal(value, stored[name].to(value.dtype)) and table[name].begin % value.itemsize == 0
    ours["padded"][67:] = 0
    for name, piece in MADE_UP.items():
        assert torch.equal(cut(stored[piece.name], piece, SHAPES[name]), ours[name]), name


def test_names_and_dtypes_of_the_source_come_back(tmp_path, monkeypatch):
    """A mixed record is followed tensor by tensor: no base model's prefix, a tied head that was stored."""
    names = families.module("llama", "tables")
    monkeypatch.setattr(names, "BASE_MODEL_PREFIX", "model.", raising=False)
    model = plain_model(config(tied=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    pieces = to_hugging_face(config(tied=True))
    dtypes = ["BF16", "F32", "F16"]
    record = {
        piece.name.removeprefix("model."): dtypes[number % 3] for number, piece in enumerate(pieces.values())
    }
    path = saved(tmp_path / "bare", model.state_dict(), {"source_tensors": record})
    stored = weights_of(export(path, tmp_path / "bare_hf", config(tied=True), None))
    known = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    assert {name: value.dtype for name, value in stored.items()} == {n: known[d] for n, d in record.items()}
    for ours, piece in pieces.items():
        value = stored[piece.name.removeprefix("model.")]
        assert torch.equal(value, model.state_dict()[ours].to(value.dtype)), ours

    headed = {piece.name: "BF16" for piece in pieces.values()} | {"lm_head.weight": "BF16"}
    path = saved(tmp_path / "headed", model.state_dict(), {"source_tensors": headed})
    stored = weights_of(export(path, tmp_path / "headed_hf", config(tied=True), None))
    assert set(stored) == set(headed)
    assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    plain = weights_of(
        export(path, tmp_path / "headed_hf", config(tied=True), None, ExportOptions(dtype="fp32"))
    )
    assert set(plain) == {piece.name for piece in pieces.values()}

    path = saved(tmp_path / "other", model.state_dict(), {"source_tensors": {"model.norm.weight": "BF16"}})
    with pytest.raises(KieloError, match="model.embed_tokens.weight.*--dtype fp32"):
        export(path, tmp_path / "other_hf", config(tied=True), None)


def export_and_die(checkpoint: Path, to: Path, at: int | None) -> int:
    """Exports and is killed at call number `at` that changes the disk; returns all calls if it survives."""
    killer = Killer(at)
    export_tensors.BLOCK_BYTES = 2000
    export(checkpoint, to, config(), None, ExportOptions(max_shard_bytes=SHARD_BYTES))
    return killer.calls


def killed(checkpoint: Path, to: Path, at: int) -> None:
    with pytest.raises(RuntimeError, match="ended without a word .killed"):
        run_ranks(export_and_die, 1, checkpoint, to, at, timeout_seconds=60)


@pytest.mark.parametrize("is_replacing", [pytest.param(False, marks=pytest.mark.full), True])
def test_killed_at_any_moment_it_goes_on_and_rewrites_nothing(tmp_path, checkpoint, is_replacing):
    """A kill leaves the older folder, none or the whole new one; the same call then completes it.

    It ends with the bytes of an undisturbed one and does not write finished shards again. Where one is
    replaced: killed at each of the last calls.
    """
    expected = contents(
        export(checkpoint, tmp_path / "whole", config(), None, ExportOptions(max_shard_bytes=SHARD_BYTES))
    )
    older = export(checkpoint, tmp_path / "older", config(), None, ExportOptions(dtype="bf16"))

    def place(name: str) -> Path:
        if is_replacing:
            shutil.copytree(older, tmp_path / name)
        return tmp_path / name

    calls = run_ranks(export_and_die, 1, checkpoint, place("counted"), None)[0]
    points = range(calls - POINTS, calls) if is_replacing else range(0, calls, calls // POINTS)
    assert points[0] >= 0
    kept = 0
    for at in points:
        to = place(f"killed_{at}")
        aside = tmp_path / f".{to.name}.kielo"
        killed(checkpoint, to, at)
        if to.exists():
            assert contents(to) in (expected, contents(older)), "never a part under the final name"
        finished = {}
        if (aside / "journal.jsonl").exists() and (aside / "new").exists():
            lines = [json.loads(line) for line in (aside / "journal.jsonl").read_text().splitlines()]
            finished = {
                line["file"]: (aside / "new" / line["file"]).stat() for line in lines if "file" in line
            }
        export(checkpoint, to, config(), None, ExportOptions(max_shard_bytes=SHARD_BYTES))
        assert contents(to) == expected
        for name, before in finished.items():
            after = (to / name).stat()
            assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        kept += len(finished)
        assert not aside.exists()
    assert is_replacing or kept > POINTS // 2


def add_and_die(checkpoint: Path, to: Path) -> None:
    """Killed when the journal has one more line than it began with."""
    add = ResumableStage.add

    def add_once(stage, name, record):
        add(stage, name, record)
        os.kill(os.getpid(), signal.SIGKILL)

    ResumableStage.add = add_once
    export(checkpoint, to, config(), None, ExportOptions(max_shard_bytes=SHARD_BYTES))


def test_a_partial_folder_is_trusted_as_far_as_it_can_be(tmp_path, checkpoint):
    """A cut shard, a torn journal line or another dtype is written again; a second process is refused."""
    arguments = (checkpoint, tmp_path / "hf", config(), None)
    whole = {
        dtype: contents(
            export(
                checkpoint,
                tmp_path / dtype,
                config(),
                None,
                ExportOptions(dtype=dtype, max_shard_bytes=SHARD_BYTES),
            )
        )
        for dtype in ("fp32", "bf16")
    }
    options = {"max_shard_bytes": SHARD_BYTES}
    partial, journal = tmp_path / ".hf.kielo" / "new", tmp_path / ".hf.kielo" / "journal.jsonl"
    calls = run_ranks(export_and_die, 1, checkpoint, tmp_path / "counted", None)[0]

    def cut_short() -> None:
        """Killed with at least one shard finished, whatever was there before."""
        killed(checkpoint, tmp_path / "hf", calls // 2)
        assert b"-of-00003" in journal.read_bytes()

    cut_short()
    with open(min(partial.glob("*.safetensors")), "r+b") as file:
        file.truncate(100)
    assert contents(export(*arguments, ExportOptions(**options))) == whole["fp32"]
    shutil.rmtree(tmp_path / "hf")

    cut_short()
    for torn in (journal.read_bytes()[:-1], journal.read_bytes() + b'{"file": "model-00003'):
        journal.write_bytes(torn)
        with pytest.raises(RuntimeError, match="ended without a word .killed"):
            run_ranks(add_and_die, 1, checkpoint, tmp_path / "hf")
        assert all(json.loads(line) for line in journal.read_text().splitlines()), "what was torn is gone"
    assert contents(export(*arguments, ExportOptions(**options))) == whole["fp32"]
    shutil.rmtree(tmp_path / "hf")

    cut_short()
    assert contents(export(*arguments, ExportOptions(dtype="bf16", **options))) == whole["bf16"]
    shutil.rmtree(tmp_path / "hf")

    other = ResumableStage(tmp_path / "hf", "export", 0, {}, {})
    other.begin()
    with pytest.raises(KieloError, match="another process is writing"):
        export(*arguments, ExportOptions(**options))
    assert partial.is_dir()
    other.close()
    assert contents(export(*arguments, ExportOptions(**options))) == whole["fp32"]


def test_a_full_disk_is_told_and_what_is_finished_stays(tmp_path, checkpoint, monkeypatch):
    """A full disk, foreseen or met: bytes needed and free, the place of finished shards, how to go on."""
    arguments = (checkpoint, tmp_path / "hf", config(), None)
    options = {"max_shard_bytes": SHARD_BYTES}
    write_rows = SafetensorsStream.write_rows

    def full(stream, rows):
        if stream.path.name.startswith("model-00002"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_rows(stream, rows)

    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsStream, "write_rows", full)
        with pytest.raises(
            KieloError, match=r"disk full: .* more bytes.* free.* 1 finished files stay in .*\.hf\.kielo/new"
        ):
            export(*arguments, ExportOptions(**options))
    assert [path.name for path in tmp_path.iterdir()] == [".hf.kielo"]
    assert [path.name[:11] for path in (tmp_path / ".hf.kielo" / "new").glob("*.safetensors")] == [
        "model-00001"
    ]
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)._replace(free=100)
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(KieloError, match="more bytes are needed, 100 are free"):
            export(*arguments, ExportOptions(**options))
    first = next((tmp_path / ".hf.kielo" / "new").glob("*.safetensors"))
    before = first.stat().st_ino
    assert (export(*arguments, ExportOptions(**options)) / first.name).stat().st_ino == before
