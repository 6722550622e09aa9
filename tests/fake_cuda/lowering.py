"""The kernels that PyTorch writes for the engine "flex", compiled for a GPU that is not here: a line of JSON each.

PyTorch's compiler runs as for an H100, up to the sources of its kernels; Triton makes machine code of them, and says
how much shared memory a kernel needs. None of it runs.
"""

import importlib.util
import json
import re
import sys
import tempfile
import types
from pathlib import Path

import device as fake

H100 = types.SimpleNamespace(
    **{"name": "H100", "type": "cuda", "index": 0, "multi_processor_count": 132, "major": 9, "minor": 0, "cc": 90},
    **{"total_memory": 80 << 30, "max_threads_per_multi_processor": 2048, "regs_per_multiprocessor": 65536},
    **{"warp_size": 32, "gcnArchName": "", "L2_cache_size": 50 << 20, "shared_memory_per_block": 49152},
    **{"shared_memory_per_block_optin": 232448, "shared_memory_per_multiprocessor": 233472},
    **{"max_threads_per_block": 1024, "is_integrated": 0, "is_multi_gpu_board": 0, "uuid": "0"},
)


DEVICE = fake.there(H100)  # kept: the library calls it

import torch  # noqa: E402
import torch._inductor.config as config  # noqa: E402
import triton  # noqa: E402
from torch._dynamo.device_interface import CudaInterface  # noqa: E402
from torch._inductor.fx_passes import joint_graph, post_grad  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402
from torch._inductor.runtime import triton_helpers  # noqa: E402
from torch.utils import _triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

import clearhead as ch  # noqa: E402
from clearhead.engines import proof  # noqa: E402

TARGET = GPUTarget("cuda", 90, 32)


class Driver:
    """What Triton asks of a driver before anything runs."""

    def get_current_target(self):
        return TARGET

    def get_current_device(self):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def is_active(self):
        return True


def pretend():
    """An H100, as far as PyTorch's compiler asks for one."""
    cuda, worker = torch.cuda, CudaInterface.Worker
    cuda.get_device_properties = lambda *_: H100
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.get_arch_list, cuda.get_device_name = lambda: ["sm_90"], lambda *_: H100.name
    stream = types.SimpleNamespace(cuda_stream=0, stream_id=0, device_index=0, device_type=1)
    cuda.current_stream = lambda *_: stream
    cuda._exchange_device, cuda._maybe_exchange_device = lambda *_: 0, lambda *_: 0
    torch.version.cuda = "13.0"
    worker.get_device_properties, worker.current_device = staticmethod(lambda *_: H100), staticmethod(lambda: 0)
    answers = {"is_available": True, "get_compute_capability": 90, "current_device": 0, "device_count": 1}
    answers |= {"get_raw_stream": 0, "exchange_device": -1, "maybe_exchange_device": -1, "synchronize": None}
    for name, answer in answers.items():
        setattr(CudaInterface, name, staticmethod(lambda *_, answer=answer: answer))
    _triton.has_triton.cache_clear() if hasattr(_triton.has_triton, "cache_clear") else None
    triton.runtime.driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = lambda: None
    joint_graph.lazy_init = post_grad.lazy_init = lambda *_, **__: None
    config.compile_threads, config.fx_graph_cache, config.joint_graph_constant_folding = 1, False, False


SOURCES = []


def captured(graph):
    """In the place of running the code: keep its source, and give empty results of the right shapes."""
    code = graph.codegen()[0]
    SOURCES.append(getattr(code, "value", code))
    nodes = list(graph.module.graph.nodes)[-1].args[0]
    results = [node.meta["val"] if hasattr(node, "meta") else node for node in nodes]

    def call(inputs):
        return [
            torch.empty_strided([int(n) for n in r.shape], [int(n) for n in r.stride()], dtype=r.dtype, device="cuda")
            if isinstance(r, torch.Tensor)
            else r
            for r in results
        ]

    graph.cache_key, graph.cache_linemap = "none", []
    graph.cache_path = str(Path(tempfile.gettempdir()) / "none.py")
    Path(graph.cache_path).touch()
    return types.SimpleNamespace(call=call, __file__=graph.cache_path, key="none", path=graph.cache_path)


def kernels(source, folder):
    """The templates of FlexAttention in a source, as Triton's functions with what they are compiled with."""
    for name, body in re.findall(r"async_compile\.triton\('(triton_tem\w+)', '''(.*?)'''", source, re.DOTALL):
        path = folder / f"{name}_{len(list(folder.iterdir()))}.py"
        path.write_text(body)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield name, getattr(module, name)


def machine_code(tuner):
    meta, function, chosen = tuner.triton_meta, tuner.fn, tuner.configs[0]
    constants = dict(meta.get("constants", {})) | chosen.kwargs
    signature = dict(meta["signature"]) | dict.fromkeys(constants, "constexpr")
    names = function.arg_names
    source = triton.compiler.ASTSource(
        function,
        {name: signature[name] for name in names if name in signature},
        {(names.index(name),): value for name, value in constants.items() if name in names},
        dict(meta["configs"][0]),
    )
    options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    return triton.compile(source, target=TARGET, options=options)


def drawn(length, width, dtype, heads=4, grad=False):
    return torch.zeros(1, heads, length, width, device="cuda", dtype=dtype, requires_grad=grad)


IDS, SLOPES = torch.zeros(1200, dtype=torch.int64, device="cuda"), torch.ones(4, device="cuda")
WINDOW = ch.Causal() & ch.SlidingWindow(before=100)
CASES = {
    "window": (torch.bfloat16, 64, {"mask": WINDOW}, True),
    "gaps, a residual": (
        torch.bfloat16,
        64,
        {"mask": (WINDOW | ch.PrefixLM([4])) & ch.MaskFunction(lambda b, h, i, j: j % 3 > 0)},
        False,
    ),
    "rules that read tensors": (
        torch.bfloat16,
        64,
        {
            "mask": ch.Causal() & ch.MaskFunction(lambda b, h, i, j: IDS[i] == IDS[j]),
            "bias": ch.BiasFunction(lambda b, h, i, j: SLOPES[h] * (i - j).float()),
        },
        True,
    ),
    "a bias by distance, learnt": (torch.bfloat16, 64, {"bias": "relative", "mask": WINDOW}, True),
    "a bias of every pair": (torch.bfloat16, 64, {"bias": "dense"}, True),
    "softcap, sinks, 128 wide": (torch.float16, 128, {"score": ch.Dot(softcap=20.0), "sinks": "sinks"}, True),
    "float32": (torch.float32, 64, {"mask": WINDOW}, True),
    "lengths left open": (torch.bfloat16, 64, {"bias": "relative", "mask": WINDOW}, True),
    "decoding, three heads to a key head": (torch.bfloat16, 64, {"score": ch.Dot(softcap=20.0)}, False),
    "narrow": (torch.bfloat16, 8, {"mask": WINDOW}, False),
}


def main(names):
    learnt = {"relative": ch.RelativeBias(4).cuda(), "sinks": torch.zeros(4, device="cuda", requires_grad=True)}
    pretend()
    GraphLowering.compile_to_module = captured
    proof.objections = lambda *about: []  # no kernel runs
    with tempfile.TemporaryDirectory() as folder:
        for name in names or CASES:
            dtype, width, options, grad = CASES[name]
            dense = torch.zeros(1, 4, 1000, 1000, device="cuda", dtype=dtype, requires_grad=True)
            beside = learnt | {"dense": dense}
            options = {key: beside[part] if isinstance(part, str) else part for key, part in options.items()}
            for length in (1000, 1100) if name == "lengths left open" else (1000,):
                SOURCES.clear()
                with torch.set_grad_enabled(grad):
                    inputs = [drawn(length, width, dtype, grad=grad) for _ in range(3)]
                    if name.startswith("decoding"):
                        inputs[0] = drawn(1, width, dtype, heads=12)
                    output = ch.attention(*inputs, **options, engine="flex")
                    if grad:
                        output.float().sum().backward()
            found = [
                {"kernel": kernel, "shared": made.metadata.shared}
                for source in SOURCES
                for kernel, tuner in kernels(source, Path(folder))
                for made in [machine_code(tuner)]
            ]
            print(json.dumps({"case": name, "kernels": found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
