"""Export of a checkpoint to a GGUF file, which llama.cpp, Ollama and LM Studio read.

The gguf package of the llama.cpp project writes the file and names the tensors. Their changes of shape follow
its converter (convert_hf_to_gguf.py): rotated pairs side by side in a Llama, norms with their 1 in a Gemma,
and queries, keys and values one after the other.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from tqdm import tqdm

from kielo.artifact.checkpoint_folder import run_around
from kielo.artifact.durable import DurableFile, bring_to_disk
from kielo.artifact.manifest import (
    MANIFEST_NAME,
    FileRecord,
    finished_manifest,
    hash_file,
    write_json_atomically,
)
from kielo.artifact.resumable_stage import FinishedFile, ResumableStage
from kielo.checkpoint import llama_cpp
from kielo.checkpoint.auto_tokenizer import ODD_TEXTS, json_bytes
from kielo.checkpoint.export_stage import IdsProof, WantedExport, published
from kielo.checkpoint.export_tensors import (
    CheckpointRows,
    FileTensor,
    NotFiniteError,
    file_tensors,
    row_blocks,
    row_boxes,
)
from kielo.checkpoint.gguf_vocabulary import Vocabulary, compare_ids, read_vocabulary
from kielo.checkpoint.read_checkpoint import verify
from kielo.dataset.query import packed_sample
from kielo.models import families
from kielo.models.family_tables import layer_types
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import CompleteModel
from kielo.tokenizer.load import TextTokenizer, load_tokenizer

_F32 = gguf.LlamaFileType.ALL_F32
# Value of --dtype → the kind of matrices, and the file's. Vectors, norms and position tables are fp32.
FILE_KINDS = {
    "fp32": (Kind.F32, _F32),
    "fp16": (Kind.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (Kind.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (Kind.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
# Kind → the dtype of its numbers or scales, steps of a scale, the value of --dtype for larger numbers.
_ENDS = {
    Kind.F16: (torch.float16, 1, "bf16"),
    Kind.Q8_0: (torch.float16, 127, "bf16"),
    Kind.BF16: (torch.bfloat16, 1, "fp32"),
}
_KINDS = (".weight", ".bias")
# Tokens of the window that llama.cpp gives every second layer of a gemma2, if the file names none.
_GEMMA2_WINDOW = 4096
CERTIFICATE, MODELFILE = "gguf.json", "Modelfile"


class _Family(NamedTuple):
    """architecture: llama.cpp's. change: (name, tensor, model) → the tensor as llama.cpp has it.

    full_every: with windows, each n-th layer has none; 0: no layer has one.
    """

    architecture: str
    change: Callable[[str, Tensor, CompleteModel], Tensor] = lambda name, tensor, model: tensor
    full_every: int = 0
    has_bias: tuple[bool, ...] = (False,)  # values of attention_bias that it can have
    activations: tuple[str, ...] = ("silu",)
    is_tied: bool | None = None  # None: both
    is_by_row: bool = False  # the change of a row needs no other row


def _pairs_together(name: str, tensor: Tensor, model: CompleteModel) -> Tensor:
    """Put the two numbers that RoPE rotates side by side, in queries and keys."""
    heads = {"q_proj": model.num_attention_heads, "k_proj": model.num_key_value_heads}.get(
        name.split(".")[-2]
    )
    if heads is None:
        return tensor
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _unfused(name: str, tensor: Tensor, model: CompleteModel) -> Tensor:
    """Put all queries before all keys and values, which are stored head by head."""
    if not name.endswith(("query_key_value.weight", "query_key_value.bias")):
        return tensor
    return (
        tensor.view(model.num_attention_heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)
    )


def _plus_one(name: str, tensor: Tensor, model: CompleteModel) -> Tensor:
    return tensor + 1 if name.endswith("norm.weight") else tensor


def _untransposed(name: str, tensor: Tensor, model: CompleteModel) -> Tensor:
    is_conv = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return tensor.mT.contiguous() if is_conv else tensor


_LLAMA = _Family("llama", _pairs_together, has_bias=(False, True))
_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_GEMMA = _Family("gemma3", _plus_one, full_every=6, activations=_TANH, is_by_row=True)
_FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _Family("qwen2", has_bias=(True,), is_by_row=True),
    "qwen3": _Family("qwen3", is_by_row=True),
    "olmo2": _Family("olmo2", is_by_row=True),
    "olmo3": _Family("olmo2", full_every=4, is_by_row=True),
    "gemma2": _GEMMA._replace(architecture="gemma2", full_every=2, is_tied=True),
    "gemma3_text": _GEMMA,
    "gpt2": _Family("gpt2", _untransposed, has_bias=(True,), activations=_TANH),
    "gpt_neox": _Family("gptneox", _unfused, has_bias=(True,), activations=_TANH, is_tied=False),
    "bloom": _Family("bloom", _unfused, has_bias=(True,), activations=_TANH),
}


def export_gguf(wanted: WantedExport) -> IdsProof | None:
    """Write the model of a checkpoint as a folder with a GGUF file, whole or not at all.

    The folder has a Modelfile for Ollama, and gguf.json, which says how ids were compared. Return that
    comparison, or None if the folder is this export already, with a comparison. Raise KieloError for a model
    or a tokenizer that llama.cpp does not have, for other ids than Kielo's, and for a full disk.
    """
    refuse_model(wanted.model)
    if wanted.tokenizer_folder is None:
        raise KieloError("export: a GGUF file needs a tokenizer. Fix: --tokenizer DIR")
    tokenizer = load_tokenizer(wanted.tokenizer_folder)
    vocabulary = read_vocabulary(tokenizer, wanted.model.vocab_size)
    proof: list[IdsProof] = []

    def write_files(stage: ResumableStage) -> None:
        stage.begin()
        name = f"{stage.folder.name}.{FILE_KINDS[wanted.dtype][0].name}.gguf"
        tensors, size = _write_file(stage, name, wanted, vocabulary)
        proof.append(_proven(stage.new / name, wanted, tokenizer))
        stage.add(name, _hashed(stage.new / name))
        stage.write(MODELFILE, _modelfile(name, vocabulary, wanted.model).encode())
        stage.write(CERTIFICATE, _certificate(vocabulary, proof[0]))
        stage.finish({"tensors": tensors, "tensor_bytes": size, "step": wanted.index.step})

    def write(stage: ResumableStage) -> None:
        try:
            write_files(stage)
        except KieloError:
            stage.discard()
            raise

    if wanted.stage.is_done() and _lacks_proof(wanted.stage.folder):
        (file,) = wanted.stage.folder.glob("*.gguf")
        proof.append(_proven(file, wanted, tokenizer))
        _replace_certificate(wanted.stage.folder, _certificate(vocabulary, proof[0]))
    published(wanted, write)
    return proof[0] if proof else None


def _proven(file: Path, wanted: WantedExport, tokenizer: TextTokenizer) -> IdsProof:
    run = run_around(wanted.checkpoint)
    texts = [(one.place, one.text) for one in ([] if run is None else packed_sample(run)) if not one.messages]
    proof = compare_ids(file, tokenizer, texts + [(repr(text), text) for text in ODD_TEXTS])
    if proof.difference:
        raise KieloError(
            f"{wanted.tokenizer_folder}: llama.cpp gives other ids than the model is trained on: "
            f"{proof.difference}. Do not use {file.name}. Fix: export without --format gguf"
        )
    return proof


def _certificate(vocabulary: Vocabulary, proof: IdsProof) -> bytes:
    return json_bytes({"split": vocabulary.split, "ids": proof._asdict()})


def _lacks_proof(folder: Path) -> bool:
    """Return True if llama.cpp is here now, and was not when the finished export was written."""
    before = json.loads((folder / CERTIFICATE).read_bytes())
    return before["ids"]["program"] is None and llama_cpp.program() is not None


def _replace_certificate(folder: Path, content: bytes) -> None:
    manifest = finished_manifest(folder)
    with DurableFile(folder / CERTIFICATE) as file:
        file.write(content)
    record = _hashed(folder / CERTIFICATE)
    sha256 = manifest.counts["sha256"] | {CERTIFICATE: record.sha256}
    files = {**manifest.files, CERTIFICATE: FileRecord(bytes=record.bytes, xxh3_128=record.xxh3_128)}
    changed = manifest.model_copy(update={"files": files, "counts": manifest.counts | {"sha256": sha256}})
    write_json_atomically(folder / MANIFEST_NAME, changed.content())


def refuse_model(model: CompleteModel) -> None:
    """Raise KieloError for a model that llama.cpp computes differently, or does not have."""
    family = _FAMILIES.get(model.model_type)
    if family is None:
        raise KieloError(
            f"--format gguf: llama.cpp has no decoder {model.model_type}. It has {', '.join(_FAMILIES)}. "
            "Fix: export without --format gguf"
        )
    scaling = (model.rope_scaling or {}).get("rope_type", "default")
    kinds = layer_types(model)
    window = model.sliding_window if "sliding_attention" in kinds else None
    width = model.query_pre_attn_scalar or model.head_dim
    is_gemma = "gemma" in family.architecture
    complaints = {
        f"sliding_window = {window}": bool(
            window and window < model.max_position_embeddings and not family.full_every
        ),
        # Versions of 2025 do not read the order from the file, and none computes a model of windows alone.
        "this order of layer_types": bool(window and family.full_every)
        and (
            "full_attention" not in kinds
            or any(
                (kind == "full_attention") != (number % family.full_every == 0)
                for number, kind in enumerate(kinds, start=1)
            )
        ),
        f"attention_bias = {str(model.attention_bias).lower()}": model.attention_bias not in family.has_bias,
        f"hidden_act = {model.hidden_act}": model.hidden_act not in family.activations,
        f"tie_word_embeddings = {str(model.tie_word_embeddings).lower()}": family.is_tied
        == (not model.tie_word_embeddings),
        f"rope_scaling of type {scaling}": scaling not in _SCALINGS
        or (scaling == "llama3" and family.architecture != "llama"),
        f"query_pre_attn_scalar = {width:g}": is_gemma and width != _gemma_scale(family.architecture, model),
        "no attn_logit_softcapping": model.model_type == "gemma2" and model.attn_logit_softcapping is None,
        "no final_logit_softcapping": model.model_type == "gemma2" and model.final_logit_softcapping is None,
        f"max_position_embeddings = {model.max_position_embeddings}": model.model_type == "gemma2"
        and window is None
        and model.max_position_embeddings > _GEMMA2_WINDOW,
        f"head_dim = {model.head_dim}": family.architecture in ("olmo2", "qwen2")
        and model.head_dim * model.num_attention_heads != model.hidden_size,
    }
    for what, is_so in complaints.items():
        if is_so:
            raise KieloError(
                f"--format gguf: llama.cpp's {family.architecture} does not compute {model.model_type} with "
                f"{what}. Fix: export without --format gguf"
            )


def _gemma_scale(architecture: str, model: CompleteModel) -> int:
    """Return the number whose root divides the scores in llama.cpp: of the 27B it is not a head's width."""
    is_27b = model.num_hidden_layers == {"gemma2": 46, "gemma3": 62}[architecture]
    return model.hidden_size // model.num_attention_heads if is_27b else model.head_dim


def _write_file(
    stage: ResumableStage, name: str, wanted: WantedExport, vocabulary: Vocabulary
) -> tuple[int, int]:
    model, index = wanted.model, wanted.index
    family = _FAMILIES[model.model_type]
    names = families.module(model.model_type, "tables")
    verify(wanted.checkpoint, index, [f"model/{ours}" for ours in names.to_hugging_face(model)])
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    theirs = gguf.get_tensor_name_map(architecture, model.num_hidden_layers)
    writer = gguf.GGUFWriter(stage.new / name, family.architecture)
    _add_settings(writer, model, family, wanted.options.about)
    writer.add_file_type(FILE_KINDS[wanted.dtype][1])
    _add_vocabulary(writer, vocabulary)
    rows, entries = CheckpointRows(wanted.checkpoint, index), list[tuple[str, FileTensor | Tensor]]()
    for tensor in file_tensors(index, model, "fp32"):
        # Names of BLOOM's published files have no prefix.
        known = [
            theirs.get_name(one, _KINDS) for one in (tensor.name, tensor.name.removeprefix("transformer."))
        ]
        found = next(filter(None, known), None)
        if found is None:
            raise KieloError(f"--format gguf: llama.cpp has no name for {tensor.name}")
        entries.append((found, tensor))
    if family.architecture == "olmo2" and model.tie_word_embeddings:  # llama.cpp's has no tied head
        entries.append(("output.weight", next(of for name, of in entries if name == "token_embd.weight")))
    if (factors := _llama3_factors(model)) is not None:
        entries.append(("rope_freqs.weight", factors))
    kinds = [_kind(name, _shape(of, family, model), FILE_KINDS[wanted.dtype][0]) for name, of in entries]
    total = 0
    for (entry, of), kind in zip(entries, kinds, strict=True):
        shape = _shape(of, family, model)
        stored = (
            gguf.quant_shape_to_byte_shape(shape, kind)
            if kind is not Kind.F32 and kind is not Kind.F16
            else shape
        )
        dtype = {Kind.F32: np.float32, Kind.F16: np.float16}.get(kind, np.uint8)
        size = math.prod(stored) * np.dtype(dtype).itemsize
        writer.add_tensor_info(entry, stored, np.dtype(dtype), size, raw_dtype=kind)
        total += size
    stage.expect(total)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        with tqdm(total=total, desc="exporting", unit="B", unit_scale=True, disable=None) as bar:
            for (entry, of), kind in zip(entries, kinds, strict=True):
                blocks = [_quantized(entry, block, kind) for block in _blocks(rows, of, family, model)]
                values = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
                writer.write_tensor_data(values)
                bar.update(values.nbytes)
        writer.close()
    except BaseException:
        writer.close()
        (stage.new / name).unlink(missing_ok=True)
        raise
    return len(entries), total


def _blocks(
    rows: CheckpointRows, of: FileTensor | Tensor, family: _Family, model: CompleteModel
) -> Iterator[Tensor]:
    """Yield a tensor as llama.cpp has it, by blocks of rows. If rows change places, read all."""
    if isinstance(of, FileTensor) and family.is_by_row:
        for part in row_blocks(of):
            yield family.change(of.name, rows.read(of, part), model)
        return
    whole = of
    if isinstance(whole, FileTensor):
        whole = family.change(whole.name, rows.read(whole, slice(0, whole.shape[0])), model)
    for box in row_boxes(whole.shape):
        yield whole[box].contiguous()


def _quantized(entry: str, block: Tensor, kind: Kind) -> np.ndarray:
    """Return a block's bytes in a GGUF file. Raise NotFiniteError if a number would become infinite."""
    if kind in _ENDS:
        dtype, steps, fix = _ENDS[kind]
        if (largest := block.abs().max() / steps).to(dtype).isinf():
            raise NotFiniteError(
                f"{entry} has a weight of magnitude {largest.item() * steps:,.0f}, and {kind.name} ends at "
                f"{torch.finfo(dtype).max * steps:,.0f}. Fix: --dtype {fix}"
            )
    if kind is Kind.BF16:  # gguf's own takes twelve bytes for each number
        return block.bfloat16().view(torch.uint8).numpy()
    return gguf.quants.quantize(block.numpy(), kind)


def _shape(of: FileTensor | Tensor, family: _Family, model: CompleteModel) -> tuple[int, ...]:
    if isinstance(of, Tensor):
        return tuple(of.shape)
    return tuple(family.change(of.name, torch.empty(of.shape, device="meta"), model).shape)


def _kind(name: str, shape: tuple[int, ...], asked: Kind) -> Kind:
    """Return the kind of a tensor by llama.cpp's own rules. Blocks of Q8_0 have 32 numbers of a row."""
    if len(shape) < 2 or name.endswith("_norm.weight") or name == "position_embd.weight":
        return Kind.F32
    return Kind.F16 if asked is Kind.Q8_0 and shape[-1] % 32 else asked


_SCALINGS = {
    "default": gguf.RopeScalingType.NONE,
    "linear": gguf.RopeScalingType.LINEAR,
    "llama3": gguf.RopeScalingType.NONE,  # as a tensor of factors
}


def _add_settings(
    writer: gguf.GGUFWriter, model: CompleteModel, family: _Family, about: Mapping[str, Any]
) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(about["name"])
    if about.get("license"):
        writer.add_license(about["license"])
    if about.get("languages"):
        writer.add_languages(about["languages"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(model.num_hidden_layers)
    writer.add_context_length(model.max_position_embeddings)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_attention_heads)
    writer.add_head_count_kv(model.num_key_value_heads)
    writer.add_vocab_size(model.vocab_size)
    writer.add_layer_norm_eps(model.layer_norm_epsilon)
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    parts = families.module(model.model_type, "tables").layer_parts(model)
    if parts.is_rotary:
        writer.add_key_length(model.head_dim)
        writer.add_value_length(model.head_dim)
        writer.add_rope_dimension_count(int(model.head_dim * model.rotary_pct))
        writer.add_rope_freq_base(model.rope_theta)
        if scaling := model.rope_scaling:
            writer.add_rope_scaling_type(_SCALINGS[scaling["rope_type"]])
            if scaling["rope_type"] == "linear":
                writer.add_rope_scaling_factor(scaling["factor"])
    kinds = layer_types(model)
    if family.full_every and model.sliding_window and "sliding_attention" in kinds:
        writer.add_sliding_window(model.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
        if model.model_type == "gemma3_text":
            writer.add_rope_freq_base_swa(model.rope_local_base_freq)
    if family.architecture == "gptneox":
        writer.add_parallel_residual(model.use_parallel_residual)
    if model.attn_logit_softcapping:
        writer.add_attn_logit_softcapping(model.attn_logit_softcapping)
    if model.final_logit_softcapping:
        writer.add_final_logit_softcapping(model.final_logit_softcapping)


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")  # llama.cpp's word for byte-level BPE
    writer.add_tokenizer_pre(vocabulary.split)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    writer.add_token_merges(vocabulary.merges)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(False)
    for role, number in vocabulary.roles.items():
        getattr(writer, f"add_{role}_token_id")(number)
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)


def _llama3_factors(model: CompleteModel) -> Tensor | None:
    """Return llama.cpp's divisor of each frequency of Llama 3.1's RoPE: [head_dim / 2], fp32."""
    scaling = model.rope_scaling or {}
    if scaling.get("rope_type") != "llama3":
        return None
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim
    lengths = 2 * math.pi * model.rope_theta**exponents
    trained, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = ((trained / lengths - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _modelfile(name: str, vocabulary: Vocabulary, model: CompleteModel) -> str:
    lines = [f"# ollama create {Path(name).stem.lower()} -f {MODELFILE}", f"FROM ./{name}"]
    if vocabulary.chat_template is None:  # a model that continues text, without turns
        lines.append("TEMPLATE {{ .Prompt }}")
    stops = [vocabulary.tokens[number] for role, number in vocabulary.roles.items() if role in ("eos", "eot")]
    lines += [f'PARAMETER stop "{stop}"' for stop in dict.fromkeys(stops)]
    return "\n".join([*lines, f"PARAMETER num_ctx {model.max_position_embeddings}", ""])


def _hashed(path: Path) -> FinishedFile:
    bring_to_disk(path)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return FinishedFile(bytes=path.stat().st_size, xxh3_128=hash_file(path), sha256=sha256)
