"""Random modules of `fuzzing/modules.py`, shared out over ranks: what every rank runs.

Each number draws a module, how it is shared out, and calls of it. The output is that of `module_oracle`, and in float64
the gradients are those of the whole module; or all ranks raise an error in words, where there is a reason for one.
"""

from __future__ import annotations

import copy
from collections import Counter
from datetime import timedelta
from typing import Any

import fuzz_modules
import torch
import torch.distributed as dist
from fuzzing import modules
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import clearhead as ch
from clearhead.nn import MultiHeadAttention, _heads

CHECKS = (modules.check_heads, modules.check_heads, modules.check_decoding)
HEADS = ("sinks", "scale", "temperature")
LIMIT = timedelta(seconds=60)


class Shared:
    """A module that is shared out over ranks, called as the whole is: each rank takes its part of what it is given."""

    def __init__(self, d: modules.Draw, module: MultiHeadAttention, rank: int) -> None:
        self.d, self.whole, self.rank, self.ranks = d, module, rank, dist.get_world_size()
        self.part: Any = None
        self.wrong = bool(d.wrong)  # before it is shared out
        self.along: str | None = None  # by which hooks the sequence is shared out beside the heads

    def prepare(self, key: Tensor, value: Tensor, *, positions: Any = None) -> Any:
        self._share(prepared=True)
        self._check_places(positions)
        return self.part.prepare(*self._inputs(key, value), positions=positions)

    def __call__(self, query: Any, key: Any, *others: Any, cache: Any = None, **given: Any) -> Tensor:
        every = (query, key, *others)
        if self.part is None:
            self._share()
        self._check_places(given.get("positions"))
        self._check_places(given.get("key_positions"))
        mine = {name: self._of_heads(name, x) for name, x in given.items()}
        tensors = self._inputs(*every)
        graded = torch.is_grad_enabled() and self.d.dtype == torch.float64 and not self.wrong and cache is None
        if graded:
            tensors = [t.detach().requires_grad_() if isinstance(t, Tensor) else t for t in tensors]
        got = self.part(*tensors, **mine, **({} if cache is None else {"cache": cache}))
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        if graded and isinstance(key, Tensor):
            self._check_gradients(got, tensors, every, given)
        if self.gathered:
            parts = [torch.empty_like(got) for _ in range(self.ranks)]
            dist.all_gather(parts, got.detach().contiguous())
            got = torch.cat(parts, -2)
        return got.detach()

    def _share(self, prepared: bool = False) -> None:
        """Share the module out, in a way that is drawn, and say what may be refused."""
        d, g = self.d, self.d.around
        module = self.part = copy.deepcopy(self.whole)
        whole_heads = lambda layer: len(layer.weight) % (self.ranks * module.head_dim) == 0
        if not all(map(whole_heads, (module.W_q, module.W_k, module.W_v))):
            d.mistake("ranks that do not divide the heads")
        joined = not d.autocast or d.dtype in (torch.float32, torch.bfloat16)  # autocast's torch.cat takes no others
        if joined and d.lengths and not any(length % self.ranks for length in d.lengths) and not d.wrong:
            self.along = g.of(None, "layers", "layers") if prepared else g.of(None, None, "layers", "module", "tensors")
        local = g.chance(0.9)
        if not local:
            d.mistake("outputs that are DTensors")
        given = {"input_layouts": Shard(-2)} if self.along == "layers" else {}
        plan: dict[str, Any] = {
            name: ColwiseParallel(use_local_output=local, **given) for name in ("W_q", "W_k", "W_v")
        }
        self.gathered = self.along is not None and g.chance(0.6)
        plan["W_o"] = RowwiseParallel(output_layouts=Shard(-2) if self.gathered else Replicate())
        if module.W_g is not None and (g.chance(0.9) or self.along is not None):
            plan["W_g"] = ColwiseParallel(use_local_output=local, **given)
        elif module.W_g is not None:
            d.mistake("a gate of all heads")
        by_head = SequenceParallel(sequence_dim=1, use_local_output=local)
        graph = torch.is_grad_enabled() or not d.lengths  # a later step may have one
        for name in ("query_norm", "key_norm"):
            norm = getattr(module, name)
            how = None if norm is None else g.of("shared", "shared", "shared", "frozen", "whole")
            if how == "shared":
                plan[name] = by_head
            elif how == "frozen":
                norm.requires_grad_(False)
            elif how == "whole" and graph:
                d.mistake(f"{name} of all heads")
        if module.score_bias is not None:
            d.mistake("a bias of all heads")
        for name in HEADS:
            number = getattr(module, name)
            if not isinstance(number, Tensor):
                continue
            if number.numel() > 1 and g.chance(0.85):
                kept = number.detach().chunk(self.ranks)[self.rank].clone()
                setattr(module, name, nn.Parameter(kept) if isinstance(number, nn.Parameter) else kept)
            elif number.numel() > 1 or (isinstance(number, nn.Parameter) and graph):
                d.mistake(f"{name} of all heads")
        mesh = init_device_mesh("cpu", (self.ranks,))
        parallelize_module(module, mesh, plan)
        if self.along in ("module", "tensors"):
            layouts = {"input_layouts": (Shard(-2),) * 3, "desired_input_layouts": (Replicate(),) * 3}
            style = PrepareModuleInput(**layouts, use_local_output=self.along == "tensors")
            parallelize_module(module, mesh, style)
        d.said.append(f"over ranks: {self.along} {self.gathered=} {local=} {sorted(plan)}")

    def _inputs(self, *inputs: Any) -> list[Any]:
        """This rank's part of the sequences."""
        if self.along is None:
            return list(inputs)
        part = lambda t: t.chunk(self.ranks, -2)[self.rank].contiguous()
        return [part(t) if isinstance(t, Tensor) else t for t in inputs]

    def _check_places(self, positions: Any) -> None:
        if positions is not None and self.along == "layers":
            self.d.mistake("positions of the whole beside a part of the sequence")

    def _of_heads(self, name: str, given: Any) -> Any:
        """This rank's part of a mask or a bias that differs between heads."""
        d = self.d
        if name not in ("mask", "bias") or given is None:
            return given
        if isinstance(given, ch.extend.Bias | ch.MaskFunction):
            d.mistake(f"a {name} by a rule of all heads")
        if isinstance(given, Tensor) and given.ndim == 4 and given.shape[1] > 1:
            if given.shape[1] % self.ranks == 0 and d.around.chance(0.85):
                return given.chunk(self.ranks, 1)[self.rank]
            d.mistake(f"a {name} of all heads")
        return given

    def _check_gradients(self, got: Tensor, tensors: list[Any], every: Any, given: dict[str, Any]) -> None:
        """Gradients of parameters and inputs beside those of the whole module."""
        inputs = [t.detach().requires_grad_() for t in every]
        want = self.whole(*inputs, **given)
        slope = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).reshape(want.shape)
        own = slope.chunk(self.ranks, -2)[self.rank] if self.gathered else slope
        trained = {name: p for name, p in self.part.named_parameters() if p.requires_grad}
        theirs = dict(self.whole.named_parameters())
        loss = torch.autograd.grad((want * slope).sum(), [*inputs, *map(theirs.get, trained)], allow_unused=True)
        found = torch.autograd.grad((got * own).sum(), [*tensors, *trained.values()], allow_unused=True)
        names = [*("query", "key", "value"), *trained]
        for name, ours, whole in zip(names, found, loss, strict=True):
            if (ours is None) != (whole is None):
                self.d.beyond.append(f"the gradient of {name}: {ours is None} where {whole is None} is right")
            if ours is None or whole is None:
                continue
            ours = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
            if name in HEADS and ours.shape != whole.shape:
                whole = whole.chunk(self.ranks)[self.rank]
            elif name in names[:3] and self.along is not None:
                whole = whole.chunk(self.ranks, -2)[self.rank]
            off = float((ours - whole).abs().max()) if ours.numel() else 0.0
            size = float(whole.abs().max()) if whole.numel() else 0.0
            if ours.shape != whole.shape or not off <= 1e-10 * max(1.0, size):
                self.d.beyond.append(f"the gradient of {name} {tuple(ours.shape)} is off by {off:.3g} of {size:.3g}")


def with_two_heads(rank: int, *given: Any) -> dict[str, Any]:
    """A planted fault: the width of a head follows from a number of heads."""
    _heads.split_heads = lambda projected, name, head_dim: projected.unflatten(-1, (2, -1)).transpose(1, 2)
    return everything(rank, *given)


def everything(rank: int, begin: int, stop: int, store: str) -> dict[str, Any]:
    """Some draws, up to one after which the group cannot go on: `next` is the number after the last.

    `store`: a file, by which ranks tell how a draw ended, since one that has raised may be waited for.
    """
    told = dist.FileStore(store, dist.get_world_size())
    told.set_timeout(LIMIT)
    modules.RANKS = dist.get_world_size()
    modules.RUN = lambda d, module: module if d.alone else Shared(d, module, rank)
    wrong: list[str] = []
    ends: Counter[str] = Counter()
    for number in range(begin, stop):
        failures, end = fuzz_modules.ended(number, checks=CHECKS)
        told.set(f"{number}-{rank}", end)
        others = []
        for other in range(dist.get_world_size()):
            try:
                others.append(told.get(f"{number}-{other}").decode())
            except dist.DistStoreError:
                others.append("nothing: it waits")
        ends[end] += 1
        wrong += failures
        if len({*others}) > 1:
            wrong.append(f"{number}: ranks end unlike each other: {others}")
        if {*others} != {end} or end == "failed":
            break  # the group may wait, or be closed
    return {"wrong": wrong, "ends": ends, "next": number + 1}
