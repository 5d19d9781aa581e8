"""Count what Inductor writes for a compiled layer on a GPU that is not here: kernels, launches, bytes.

    make gpu-code                                     # installs Triton in .triton/, compares with the table
    python benchmarks/training/gpu_code.py --write    # writes results/gpu_code.json in place of comparing
    python benchmarks/training/gpu_code.py --case llama_8b-bf16-h200 --code FOLDER   # the code itself

A case is a layer of a model at its real sizes, a precision and a device. The layer is traced on tensors
without data. Its two graphs are lowered for a device that this process pretends to have. Nothing runs there.

Of each graph are counted: launches of matrix products, of attention and of other kernels; the bytes that the
other kernels read and write, by Inductor's own count; the bytes of inputs and outputs of the products.
Triton's back end then translates each of its kernels to machine code (cubin, or hsaco of gfx90a). What it
refuses, or what needs more shared memory than the device has, would fail on the device too. How long a kernel
takes and which registers spill, only a device shows.

Ends with exit code 1 if a case differs from the committed table: so a change that adds launches is seen.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import types
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from kielo.models.blocks.attention import Mask
from kielo.models.families import build_model, complete
from kielo.parallel.fp8 import float8_config, import_float8
from kielo.parallel.projection import apply_projection
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Fp8

RESULT = Path(__file__).parents[1] / "results" / "gpu_code.json"


class Device(NamedTuple):
    """A device to pretend: what Inductor and Triton ask for. capability: of CUDA. architecture: of AMD."""

    name: str
    capability: tuple[int, int]
    architecture: str
    processors: int
    warp: int
    shared_bytes: int
    backend: str


# NVIDIA H200 (compute capability 9.0) and one die of AMD's MI250X: the vendors' data sheets.
DEVICES = {
    "h200": Device("NVIDIA H200", (9, 0), "", 132, 32, 232_448, "cuda"),
    "mi250x": Device("AMD Instinct MI250X", (9, 0), "gfx90a", 110, 64, 65_536, "hip"),
}
# Recipe of the sizes, tokens of a micro-batch.
LAYERS = {
    "llama_8b": ("estonian_llama31_8b", 8192),
    "llmjp_172b": ("llmjp_172b", 4096),
    "poro_34b": ("poro_34b", 2048),
}
_ALONE = {"num_hidden_layers": 1, "vocab_size": 128}  # a layer is counted, and no embedding
CASES = [
    "llama_8b-bf16-h200",
    "llama_8b-fp8-h200",
    "llmjp_172b-bf16-h200",
    "llmjp_172b-fp8-h200",
    "llama_8b-bf16-mi250x",
    "poro_34b-bf16-mi250x",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, help="one case, printed as JSON")
    parser.add_argument("--code", type=Path, metavar="FOLDER", help="with --case: where its code is written")
    parser.add_argument("--write", action="store_true", help="write the table in place of comparing with it")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(count(options.case, options.code)))
        return
    found = {case: _in_process(case) for case in CASES}
    for case, graphs in found.items():
        for name, of in graphs.items():
            print(f"{case:24} {name:8} {of['launches']:3} launches, {of['other_gb']:6.2f} GB beside products")
    if options.write:
        table = {
            "date": date.today().isoformat(),
            "torch": version("torch"),
            "triton": version("triton"),
            "cases": found,
        }
        RESULT.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        return
    table = json.loads(RESULT.read_text(encoding="utf-8"))
    if (table["torch"], table["triton"]) != (version("torch"), version("triton")):
        sys.exit(
            f"{RESULT} is of torch {table['torch']} and Triton {table['triton']}. Fix: those, or --write"
        )
    expected = table["cases"]
    different = [case for case in CASES if found[case] != expected.get(case)]
    for case in different:
        print(f"{case}: {json.dumps(found[case])}\n  in {RESULT.name}: {json.dumps(expected.get(case))}")
    sys.exit(
        f"{len(different)} cases differ from {RESULT}. Fix: --write, if the change is wanted"
        if different
        else 0
    )


def _in_process(case: str) -> dict[str, Any]:
    """Count a case in a process of its own: what is pretended cannot be taken back."""
    command = [sys.executable, __file__, "--case", case]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if ended.returncode:
        sys.exit(f"{case}: {ended.stderr[-3000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def count(case: str, code_folder: Path | None) -> dict[str, Any]:
    """Return graph ("forward", "backward") → its counts."""
    shape, precision, device = case.split("-")
    graphs = _traced(shape, precision)
    pretend(DEVICES[device])
    found = {}
    for name, graph, inputs, mode in graphs:
        products = Counter(_product_bytes(graph))
        code = _lowered(name, graph, inputs, mode)
        if code_folder is not None:
            code_folder.mkdir(parents=True, exist_ok=True)
            (code_folder / f"{case}_{name}.py").write_text(code, encoding="utf-8")
        found[name] = _counts(code) | {
            "product_gb": round(sum(products.values()) / 1e9, 3),
            "assembled": _assembled(code, DEVICES[device]),
        }
    return found


def _counts(code: str) -> dict[str, Any]:
    """Return launches by kind, and the bytes of kernels that are no products, from Inductor's code."""
    body = code[code.index("def call(") :]
    called = re.findall(r"(triton_\w+?)\.run\(|extern_kernels\.(\w+)\(|torch\.ops\.([\w.]+)\(", body)
    launches = Counter(_kind(*names) for names in called)
    gigabytes = dict(re.findall(r"async_compile\.triton\('(\w+)'.*?'kernel_num_gb': ([\d.e-]+)", code, re.S))
    moved = sum(float(gigabytes.get(names[0], 0)) for names in called if names[0])
    return {"launches": sum(launches.values()), **dict(sorted(launches.items())), "other_gb": round(moved, 3)}


def _kind(triton: str, extern: str, operator: str) -> str:
    name = triton or extern or operator
    if "attention" in name or "flex" in name:
        return "attention"
    return "products" if re.search(r"\b_?(scaled_)?(add|b)?mm\b", name) else "other"


def _product_bytes(graph: torch.fx.GraphModule) -> dict[str, int]:
    """Return node → bytes of the inputs and the output of each matrix product."""
    found = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and re.search(r"aten\._?(scaled_)?(add|b)?mm\.", str(node.target)):
            values = [node.meta["val"], *(one.meta["val"] for one in node.all_input_nodes)]
            found[node.name] = sum(value.nbytes for value in values if isinstance(value, Tensor))
    return found


def _traced(shape: str, precision: str) -> list[tuple[str, torch.fx.GraphModule, list[Any], Any]]:
    """Return the graphs of a layer's forward and backward, as Kielo compiles it, on tensors without data."""
    from torch._functorch import config as functorch
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import _recursive_joint_graph_passes
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    functorch.enable_autograd_cache = False
    name, length = LAYERS[shape]
    config = complete(read_recipe(name).recipe.model.model_copy(update=_ALONE), length)
    with torch.device("meta"):
        model = build_model(config).to(torch.bfloat16)
    if precision == "fp8":
        import_float8().convert_to_float8_training(model.layers, config=float8_config(Fp8()))
    apply_projection(model)
    layer = next(iter(model.layers.values()))
    graphs: list[Any] = []
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def keep(kind: str) -> Any:
        def kept(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            sizes = [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in inputs]
            graphs.append((kind, graph, sizes, mode))
            return make_boxed_func(graph.forward)

        return kept

    def split(joint: torch.fx.GraphModule, inputs: Any, **others: Any) -> Any:
        _recursive_joint_graph_passes(joint)
        taken = {
            key: others[key] for key in ("num_fwd_outputs", "static_lifetime_input_nodes") if key in others
        }
        return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **taken)

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return aot_module_simplified(
            graph,
            inputs,
            fw_compiler=keep("forward"),
            bw_compiler=keep("backward"),
            decompositions=select_decomp_table(),
            partition_fn=split,
        )

    with mode:
        layer.to_empty(device="cpu")
        x = torch.empty(1, length, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        cos, sin = (torch.empty(length, config.head_dim, dtype=torch.bfloat16) for _ in range(2))
        rope = (cos, sin) if model.rope is not None else (None, None)
        masks = model.make_masks.in_blocks(None, length, torch.device("cpu"))
        mask: Mask = masks[next(iter(masks))]
        _as_on_a_gpu()
        out = torch.compile(layer.forward, dynamic=False, backend=backend)(x, *rope, mask, None)
        out.backward(torch.empty_like(out))
    return graphs


def _as_on_a_gpu() -> None:
    """Trace the attention kernel of a GPU, though the tensors say that they are on the CPU."""
    from torch.nn.attention import flex_attention

    from kielo.models.blocks import attention

    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **_: Any) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)[0]

    attention.F.scaled_dot_product_attention = kernel
    flex_attention._validate_device = lambda *_: None


def _lowered(kind: str, graph: torch.fx.GraphModule, sizes: list[Any], mode: Any) -> str:
    """Return the code that Inductor writes of a graph for the pretended device."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx
    from torch._inductor import config as inductor
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    inductor.fx_graph_cache = False
    inductor.compile_threads = 1
    inductor.use_static_triton_launcher = False
    inductor.profile_bandwidth = True  # which writes the bytes of each kernel beside it
    written = []

    class Written(Exception):
        """Ends the compilation once the code is there: nothing may be loaded."""

    def stop(self: GraphLowering) -> None:
        code, _ = self.codegen()
        written.append(getattr(code, "value", code))
        raise Written

    GraphLowering.compile_to_module = stop
    graphs = [
        part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)
    ]  # scores have their own
    for part in graphs:
        for node in part.graph.nodes:
            node.kwargs = {key: _moved(value) for key, value in node.kwargs.items()}
            if part is not graph and isinstance(value := node.meta.get("val"), Tensor):
                with mode:
                    node.meta["val"] = torch.empty_strided(
                        value.shape, value.stride(), dtype=value.dtype, device="cuda"
                    )
        part.recompile()
    with mode:
        inputs = [
            torch.empty_strided(one[0], one[1], dtype=one[2], device="cuda")
            if isinstance(one, tuple)
            else one
            for one in sizes
        ]
    options = {
        "static_input_idxs": [],
        "graph_id": 0,
        "inputs_to_check": [],
        "is_backward": kind == "backward",
    }
    with tracing(TracingContext(mode)), DebugContext(), V.set_fake_mode(mode), contextlib.suppress(Written):
        compile_fx.fx_codegen_and_compile(graph, inputs, cudagraphs=BoxedBool(False), **options)
    return written[0]


def _moved(value: Any) -> Any:
    return torch.device("cuda", 0) if isinstance(value, torch.device) and value.type == "cpu" else value


def _assembled(code: str, device: Device) -> int:
    """Return the number of Triton kernels of the code that the device's back end translated, each once."""
    from torch._inductor.codecache import PyCodeCache

    number = 0
    for source in re.findall(r"async_compile\.triton\('\w+', '''(.*?)'''", code, re.S):
        kernel = next(
            one
            for one in vars(PyCodeCache.load(source)).values()
            if hasattr(one, "configs") and hasattr(one, "fn")
        )
        made = kernel._precompile_config(kernel.configs[0]).kernel
        if not {"cubin", "hsaco"} & set(made.asm) or made.metadata.shared > device.shared_bytes:
            raise RuntimeError(
                f"{kernel.fn}: {list(made.asm)}, {made.metadata.shared} bytes of shared memory"
            )
        number += 1
    return number


def pretend(device: Device) -> None:
    """Make torch and Triton answer as on a machine with this device. Nothing can run on it."""
    from torch._dynamo import device_interface
    from torch._inductor import scheduler
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses import fake_tensor
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    properties = types.SimpleNamespace(
        name=device.name,
        major=device.capability[0],
        minor=device.capability[1],
        gcnArchName=device.architecture,
        total_memory=64 * 2**30,
        multi_processor_count=device.processors,
        warp_size=device.warp,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65_536,
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=device.shared_bytes,
        shared_memory_per_multiprocessor=device.shared_bytes,
        L2_cache_size=8 * 2**20,
        is_integrated=0,
        is_multi_gpu_board=0,
        uuid="",
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
    )
    zero, properties_of, nothing = (lambda *_: 0), (lambda *_: properties), (lambda *_, **__: None)
    if device.backend == "hip":
        torch.version.hip = "6.4"
    stream = types.SimpleNamespace(
        stream_id=0, device_index=0, device_type=1, cuda_stream=0, device=torch.device("cuda", 0)
    )
    state = torch.zeros(16, dtype=torch.uint8)
    answers = {
        torch.cuda: {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": zero,
            "get_device_properties": properties_of,
            "_get_device_properties": properties_of,
            "get_device_capability": lambda *_: device.capability,
            "get_device_name": lambda *_: device.name,
            "_lazy_init": nothing,
            "_lazy_call": nothing,
            "is_initialized": lambda: True,
            "synchronize": nothing,
            "set_device": nothing,
            "is_bf16_supported": lambda *_, **__: True,
            "current_stream": lambda *_: stream,
            "get_rng_state": lambda *_, **__: state,
            "set_rng_state": nothing,
            "_exchange_device": zero,
            "_maybe_exchange_device": zero,
        },
        torch.cuda.random: {"get_rng_state": lambda *_, **__: state, "set_rng_state": nothing},
        torch.accelerator: {"current_device_index": zero, "current_stream": lambda *_: stream},
        torch._C: {
            "_cuda_getDevice": zero,
            "_cuda_getCurrentRawStream": zero,
            "_accelerator_getDeviceIndex": zero,
        },
        fake_tensor: {"init_gpu_context": nothing},
        triton_helpers: {"set_driver_to_gpu": nothing},
        scheduler: {"has_triton": lambda: True},
        _triton: {"has_triton": lambda: True},
        device_interface.CudaInterface.Worker: {
            "get_device_properties": staticmethod(properties_of),
            "current_device": staticmethod(zero),
        },
        device_interface.CudaInterface: {
            "get_compute_capability": staticmethod(
                lambda *_: device.architecture or device.capability[0] * 10 + device.capability[1]
            ),
            "is_available": staticmethod(lambda: True),
            "current_device": staticmethod(zero),
            "device_count": staticmethod(lambda: 1),
            "get_raw_stream": staticmethod(zero),
            "get_device_properties": staticmethod(properties_of),
        },
    }
    # FlexAttention's shape rule copies, which a torch without CUDA refuses; only strides are asked for.
    shapes = sys.modules[
        "torch._higher_order_ops.flex_attention"
    ]  # whose name in its package is the operator
    strides_of = shapes._permute_strides

    def permuted(out: Tensor, strides: Any) -> Tensor:
        like = strides_of(torch.empty(out.shape, device="meta"), strides)
        return out.new_empty_strided(out.shape, like.stride())

    shapes._permute_strides = permuted
    for owner, values in answers.items():
        for name, value in values.items():
            setattr(owner, name, value)
    target = GPUTarget(device.backend, device.architecture or 90, device.warp)

    class Driver:
        utils = types.SimpleNamespace(
            get_device_properties=lambda _: {
                "max_shared_mem": device.shared_bytes,
                "multiprocessor_count": device.processors,
                "warpSize": device.warp,
                "max_num_regs": 65_536,
            }
        )

        def get_current_target(self) -> GPUTarget:
            return target

        def get_current_device(self) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_device_interface(self) -> Any:
            return torch.cuda

    driver.set_active(Driver())


if __name__ == "__main__":
    main()
