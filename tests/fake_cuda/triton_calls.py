"""The engine `triton` on the fake device, up to the start of its kernels: what waits, and what a CUDA graph meets.

python triton_calls.py prints a line of JSON each: the counts of each call, whose kernels are not started; what is said
while a graph is captured; and, with --time, the host's time of a call beside that of PyTorch's SDPA, in microseconds,
with the operations of PyTorch's and the kernels that it starts.
"""

import json
import sys
import time

import device as fake

DEVICE = fake.there()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import triton  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

import clearhead as ch  # noqa: E402
from clearhead.engines import proof  # noqa: E402
from clearhead.engines.triton import launch  # noqa: E402
from clearhead.engines.triton.engine import Triton  # noqa: E402
from clearhead.problem.problem import make_problem  # noqa: E402

START, CAPTURED, STARTED = launch.start, [False], []
torch.cuda.is_current_stream_capturing = lambda: CAPTURED[0]
torch.cuda.get_device_capability, torch.cuda.get_device_name = lambda *_: (9, 0), lambda *_: "no GPU"


class Driver:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).cuda().requires_grad_()


QUERY, KEY, VALUE = drawn(2, 8, 256, 64), drawn(2, 2, 256, 64), drawn(2, 2, 256, 64)
ONE = QUERY[:, :, :1]
LENGTHS = ch.Lengths(torch.tensor([256, 100]))
MASK = ch.Lengths(LENGTHS.valid_lens.cuda())
GAPS = ch.SlidingWindow(before=20) | ch.PrefixLM([4])
ADDITIVE = ch.Additive.from_weights(None, None, torch.ones(64)).cuda()


def trained(**options):
    output = ch.attention(QUERY, KEY, VALUE, engine="triton", **options)
    return torch.autograd.grad(output.sum(), (QUERY, KEY, VALUE))


def computed(**options):
    with torch.no_grad():
        return ch.attention(QUERY, KEY, VALUE, engine="triton", **options)


def decoded(**options):
    with torch.no_grad():
        return ch.attention(ONE, KEY, VALUE, engine="triton", align="lower_right", **options)


def reduced():
    weights = ch.weights(QUERY, KEY, mask=GAPS, engine="triton")
    found = weights.reduce(ch.reductions.Entropy(), ch.reductions.Received(), ch.reductions.TopK(3))
    return torch.autograd.grad(found[0].sum() + found[1].sum(), QUERY)


CASES = {
    "dropout": lambda: trained(dropout_p=0.1, mask=GAPS),
    "additive": lambda: trained(score=ADDITIVE, mask=LENGTHS),
    "gaussian, biases": lambda: trained(score=ch.Gaussian(), bias=ch.ALiBi(8), mask=ch.Causal()),
    "sinks": lambda: trained(sinks=torch.zeros(8, device="cuda"), score=ch.Dot(softcap=9.0)),
    "decoding": lambda: decoded(mask=LENGTHS),
    "decoding, sinks": lambda: decoded(sinks=torch.zeros(8, device="cuda"), bias=ch.ALiBi(8)),
    "statistics": reduced,
    "a mask on the device": lambda: computed(mask=MASK),
    "additive, a mask on the device": lambda: computed(score=ADDITIVE, mask=MASK),
}


def counted():
    """What waits between a call and the start of its kernels, and which kernels those are."""
    for name, case in CASES.items():
        case()
        STARTED.clear()
        before = DEVICE.counts()
        case()
        *waits, operations = (now - then for now, then in zip(DEVICE.counts(), before, strict=True))
        found = {"waits": sum(waits), "operations": operations, "kernels": STARTED}
        print(json.dumps({"case": name, **found}), flush=True)


def shapes_alone():
    """The engine of a call on tensors without values, and whether outputs, gradients and statistics have the shapes of
    those of tensors with values. A kernel that starts fails: there is no device for it."""
    global QUERY, KEY, VALUE, ONE
    real = [[t.shape for t in found] for found in (case() for case in CASES.values())]
    before, launch.start = (QUERY, KEY, VALUE, ONE, launch.start), START
    with FakeTensorMode(allow_non_fake_inputs=True):
        QUERY, KEY, VALUE = (torch.empty(t.shape, device="cuda", requires_grad=True) for t in before[:3])
        ONE = QUERY[:, :, :1]
        alone = [[t.shape for t in found] for found in (case() for case in CASES.values())]
        engine = ch.plan(QUERY, KEY, VALUE, mask=GAPS, dropout_p=0.1).engine
    QUERY, KEY, VALUE, ONE, launch.start = before
    print(json.dumps({"engine": engine, "same": alone == real}), flush=True)


def captured():
    """What is said of a device that was not proved, and of a kernel that was not compiled, before a capture; and how
    many values a mask keeps that is first seen outside of a capture, and in one."""
    CAPTURED[0] = True
    proved = dict(proof._found)
    proof._found.clear()
    declined = ch.plan(QUERY, KEY, VALUE, dropout_p=0.1)
    proof._found.update(proved)
    kept = []
    for CAPTURED[0] in (False, True):
        problem = make_problem(
            ONE, KEY, VALUE, mask=ch.Lengths(torch.full((2,), 200 - 50 * CAPTURED[0], device="cuda"))
        )
        Triton().forward(problem)
        kept.append(sum(isinstance(name, tuple) for name in problem.visible.memo))  # names of triton's own
    launch.start = START
    driver = Driver()
    driver.get_current_stream = lambda *_: 0
    triton.runtime.driver.set_active(driver)
    try:
        trained(dropout_p=0.1)
        said = "nothing"
    except ch.UnsupportedError as error:
        said = str(error)
    print(json.dumps({"engine": declined.engine, "why": str(declined), "said": said, "kept": kept}), flush=True)


def timed(rounds=300):
    """The host's time of a call without gradients: a tenth of the rounds took less. Tensors are tiny, since what the
    device's operations take on the host is counted too."""
    query, key = torch.zeros(1, 2, 16, 8).cuda(), torch.zeros(1, 1, 16, 8).cuda()
    additive = ch.Additive.from_weights(None, None, torch.ones(8)).cuda()
    calls = {
        "dot": (query, {}),
        "window": (query, {"mask": GAPS}),
        "additive": (query, {"score": additive}),
        "decoding": (query[:, :, :1], {}),
    }
    every = {"SDPA": lambda: F.scaled_dot_product_attention(query, query, query)}
    for name, (of, options) in calls.items():
        every[name] = lambda of=of, options=options: ch.attention(of, key, key, engine="triton", **options)
    with torch.no_grad():
        for name, call in every.items():
            call()
            took, before = [], DEVICE.counts().operations
            STARTED.clear()
            call()
            operations, kernels = DEVICE.counts().operations - before, len(STARTED)
            for _ in range(rounds):
                began = time.perf_counter()
                call()
                took.append(time.perf_counter() - began)
            found = {"host_us": round(1e6 * sorted(took)[rounds // 10], 1), "operations": operations}
            print(json.dumps({"case": name, **found, "kernels": kernels}), flush=True)


if __name__ == "__main__":
    launch.start = lambda kernel, programs, *_, **__: STARTED.append(kernel.fn.__name__)
    proof.differences = lambda *_: []  # as on a device where nothing differs
    proof._write = proof._read = lambda *_: None
    if sys.argv[1:] == ["--time"]:
        timed()
    else:
        counted()
        shapes_alone()
        captured()
