"""Code that runs while another thread compiles, which sets some of PyTorch's flags in every thread."""

from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch.fx.experimental.proxy_tensor import make_fx


def while_another_compiles(work):
    """`work()`, in a thread of its own, from the middle of what this thread compiles."""
    done = []
    torch._dynamo.reset()
    with ThreadPoolExecutor(1) as pool:

        def traced(x):
            done.append(pool.submit(work))
            wait(done, 60)
            return x

        def backend(graph, inputs):
            make_fx(traced)(torch.zeros(1))
            return graph

        torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(1))
    return done[0].result()
