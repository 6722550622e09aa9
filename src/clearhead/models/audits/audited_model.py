"""A model and a batch, run again and again with some of the inputs changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.torch_state.torch_private import parts_of, uncompiled
from clearhead.models.audits.arguments import validate_input
from clearhead.models.audits.batches import DECODER_INPUTS, find_inputs
from clearhead.models.audits.movement import measure_distance, measure_size
from clearhead.models.model_calls import call_model

SPECIAL = ["pad", "bos", "eos", "sep", "cls", "mask", "image", "video", "audio", "decoder_start", "boi", "eoi"]
DROPOUT = "dropout is on: call model.eval()"
LOUD = 3.0  # changed vectors are so many times as long as others of the batch: a short one may vanish in rounding


class AuditedModel:
    """A model with a batch of inputs, and the outputs by position that it computes from them.

    `model`: a module, or any callable of the batch. `batch`: a mapping of keywords, a tuple of arguments, or one
    tensor. `name`: the input that is changed, a key of the mapping. `output`: picks the tensor (B, L, ...) from what
    the model returns; None takes the first one of that shape. `seed`: of the random numbers of each forward pass.
    `advance`: called with how many forward passes have been run since its last call. `forwards`: how many were run.
    """

    def __init__(
        self,
        model: Any,
        batch: Any,
        name: str,
        output: Callable[[Any], Tensor] | None,
        seed: int,
        advance: Callable[[int], Any],
    ) -> None:
        self.model, self.batch, self.name, self.seed = model, batch, name, seed
        self._output, self._advance, self.forwards = output, advance, 0.0
        self._recorded: Any = None  # what a run with another seed returned
        validate_input(self.inputs)

    @property
    def objection(self) -> str:
        """Why the inputs can't be changed by position, such as the pixels of images; "" where they can."""
        inputs = self.inputs
        if inputs.ndim == (3 if inputs.is_floating_point() else 2):
            return ""
        return f"the input has shape {tuple(inputs.shape)}; expected ids (B, L) or vectors (B, L, C)"

    @property
    def inputs(self) -> Tensor:
        """The tensor that is changed: ids (B, L), or vectors (B, L, C)."""
        batch = self.batch
        found: Tensor = batch[self.name] if isinstance(batch, Mapping) else batch
        return found[0] if isinstance(batch, tuple) and batch else found

    @property
    def shape(self) -> tuple[int, int]:
        """(B, L)."""
        return self.inputs.shape[0], self.inputs.shape[1]

    @property
    def output_shape(self) -> tuple[int, int]:
        """(B, L) of the outputs: of a decoder, where the changed input is an encoder's."""
        last = find_inputs(self.batch, self.name)[-1]
        inputs = self.batch[last] if last in DECODER_INPUTS else self.inputs
        return inputs.shape[0], inputs.shape[1]

    @property
    def reads_encoder(self) -> bool:
        """Whether the changed input is an encoder's, and the outputs are a decoder's."""
        return self.name not in DECODER_INPUTS and find_inputs(self.batch, self.name)[-1] in DECODER_INPUTS

    @property
    def picks_output(self) -> bool:
        """Whether the caller says which tensor the outputs are."""
        return self._output is not None

    @property
    def has_ids(self) -> bool:
        return not self.inputs.is_floating_point()

    def run(self, inputs: Tensor | None = None, seed: int | None = None) -> Tensor:
        """The outputs, (B, L, C), for other inputs of the same shape, or for those of the batch."""
        batch = self.batch
        if inputs is not None and isinstance(batch, Mapping):
            batch = {**batch, self.name: inputs}
        elif inputs is not None:
            batch = (inputs, *batch[1:]) if isinstance(batch, tuple) else inputs
        return self._pick_outputs(self._call(batch, self.seed if seed is None else seed))

    def _pick_outputs(self, result: Any) -> Tensor:
        return find_output(result if self._output is None else self._output(result), self.output_shape)

    @cached_property
    def outputs(self) -> Tensor:
        """The outputs of the batch as it is, (B, L, C)."""
        with torch.no_grad():
            return self.run()

    @cached_property
    def randomness(self) -> float:
        """How far two runs of the batch with other seeds differ, as a part of the size of the outputs."""
        if self._recorded is not None and torch.equal(self._pick_outputs(self._recorded), self.outputs):
            return 0.0
        with torch.no_grad():
            largest = float(measure_distance(self.outputs, self.run(seed=self.seed + 1))[0].max())
        return largest and largest / measure_size(self.outputs)

    @property
    def has_dropout(self) -> bool:
        """Whether the model is in train mode, and random there."""
        return isinstance(self.model, nn.Module) and self.model.training and self.randomness > 0

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The parameters of the model's forward, by name."""
        model = unwrap_model(self.model)
        return inspect.signature(model.forward).parameters if isinstance(model, nn.Module) else {}

    def run_plain(self, model: nn.Module) -> None:
        """Run a model, such as the one that was compiled, on the batch with another seed, and record it meanwhile."""
        self._recorded = self._call(self.batch, self.seed + 1, model)

    def count(self, passes: float = 1.0) -> None:
        """Count forward passes, or the parts of one that a run of a block is."""
        before = int(self.forwards)
        self.forwards += passes
        self._advance(int(self.forwards) - before)

    def _call(self, batch: Any, seed: int, model: Any = None) -> Any:
        self.count()
        with repeatable(self.model, seed):
            return call_model(self.model if model is None else model, batch, copies_tensors=True)

    def run_from_leaf(self) -> tuple[Tensor, Tensor]:
        """A leaf that requires grad, (B, L, C), the embeddings of ids or the input itself; and the outputs."""
        leaves: list[Tensor] = []

        def make_leaf(vectors: Tensor) -> Tensor:
            leaves.append(vectors.detach().clone().requires_grad_())
            return leaves[0]

        if not self.has_ids:
            result = self.run(make_leaf(self.inputs))
        else:
            with self.embeddings_replaced(make_leaf):
                result = self.run()
        return leaves[0], result

    def find_special(self) -> Tensor:
        """The inputs that are special ids, bool (B, L): they may decide more than a word does, such as where a document
        begins, so they stay."""
        found = torch.zeros(self.shape, dtype=torch.bool, device="cpu")
        if self.has_ids:
            for number in _special_ids(self.model):
                found |= (self.inputs == number).cpu()
        return found

    def replace_ids(self, changed: Tensor) -> Tensor:
        """Other ids at these positions, bool (B, L), from the ids that occur in the batch and are not special."""
        ids, generator = self.inputs, torch.Generator().manual_seed(self.seed)
        occurring = torch.tensor(sorted(set(ids.flatten().tolist()) - _special_ids(self.model)), device="cpu")
        if len(occurring) < 2:
            raise ClearheadError("audit: the batch has fewer than two ids to exchange. Use a text with more words.")
        drawn = torch.randint(len(occurring), ids.shape, generator=generator, device="cpu")
        same = occurring[drawn] == ids.cpu()
        other = occurring[torch.where(same, (drawn + 1) % len(occurring), drawn)]
        return torch.where(changed.to(ids.device), other.to(ids), ids)

    def replace_vectors(self, vectors: Tensor, changed: Tensor) -> Tensor:
        """Other vectors at these positions: those of other positions, `LOUD` times, and noise."""
        return replace_vectors(vectors, changed, self.seed)

    @contextmanager
    def embeddings_replaced(self, replace: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Put `replace(vectors)` in place of the embeddings (B, L, C) of the ids. Raises where none reads the ids."""
        done: list[nn.Module] = []

        def hook(module: nn.Module, args: tuple[Any, ...], result: Tensor) -> Tensor | None:
            read = args[0] if args else None
            if done or not isinstance(read, Tensor) or read.shape != self.inputs.shape:
                return None
            if not torch.equal(read, self.inputs):
                return None
            done.append(module)
            return replace(result)

        modules = self.model.modules() if isinstance(self.model, nn.Module) else ()
        parts = [part for part in modules if isinstance(part, nn.Embedding)]
        handles = [part.register_forward_hook(hook) for part in parts]
        is_compiled = isinstance(self.model, nn.Module) and uncompiled(self.model) is not self.model
        try:  # the compiler would trace the hook, and raise an error where it may not break the graph
            with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()
        if not done:
            raise ClearheadError("audit: no nn.Embedding was seen to read the ids.")


@contextmanager
def repeatable(model: Any, seed: int) -> Iterator[None]:
    """A run with random numbers of this seed. They and the model's buffers, such as running means, are put back.

    Integers are left out, but for counters: quantized weights are buffers too.
    """
    parts = model.modules() if isinstance(model, nn.Module) else ()
    kept = [
        (buffers, name, buffer, buffer.clone())
        for _, buffers, _ in map(parts_of, parts)
        for name, buffer in buffers.items()
        if buffer is not None and (buffer.is_floating_point() or not buffer.ndim)
    ]
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        with torch.inference_mode():
            for buffers, name, buffer, before in kept:
                buffer.data.copy_(before)  # as a write, it would be an error in the backward pass
                buffers[name] = buffer


def replace_vectors(vectors: Tensor, changed: Tensor, seed: int) -> Tensor:
    """Other vectors (B, L, C) at these positions, bool (B, L): those of other positions, `LOUD` times, and noise.

    Where several positions change, one feature is large in all of them: a norm or a scale that is shared by the whole
    tensor would not notice vectors of the usual size.
    """
    generator = torch.Generator().manual_seed(seed)
    flat = vectors.flatten(0, 1)
    size = float(flat.float().std()) or 1.0
    order = torch.randperm(len(flat), generator=generator, device="cpu")
    order = torch.where(order == torch.arange(len(flat), device="cpu"), (order + 1) % len(flat), order).to(flat.device)
    noise = torch.randn(flat.shape, generator=generator, dtype=torch.float32, device="cpu") * (0.1 * size)
    other = flat[order] * LOUD + noise.to(flat)
    if int(changed.sum()) > len(vectors):
        other[:, int(torch.randint(flat.shape[1], (), generator=generator, device="cpu"))] += 10 * size
    return torch.where(changed.to(flat.device)[..., None], other.view_as(vectors), vectors)


def find_tensors(result: Any) -> Iterator[Tensor]:
    """All tensors in the result of a model, outer ones first."""
    if isinstance(result, Tensor):
        yield result
    else:
        values = vars(result) if is_dataclass(result) and not isinstance(result, Mapping | type) else result
        for value in (
            values.values() if isinstance(values, Mapping) else values if isinstance(values, list | tuple) else ()
        ):
            yield from find_tensors(value)


def find_output(result: Any, shape: tuple[int, int]) -> Tensor:
    """The first floating tensor of shape (B, L, ...) in the result of a model, as (B, L, C)."""
    found = list(find_tensors(result))
    for least in (3, 2):
        for tensor in found:
            if tensor.ndim >= least and tensor.shape[:2] == shape and tensor.is_floating_point():
                return tensor.reshape(*shape, -1)
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in found) or "no tensor"
    raise ShapeError(
        f"audit: the model returned {shapes}; expected an output by position, (B, L, ...) = {(*shape, '...')}.\n"
        "Pick it: output=lambda result: result.last_hidden_state."
    )


def unwrap_model(model: Any) -> Any:
    """The model that `DistributedDataParallel` or `torch.compile` has wrapped."""
    model = uncompiled(model) if isinstance(model, nn.Module) else model
    return model.module if isinstance(model, DistributedDataParallel) else model


def _special_ids(model: Any) -> set[int]:
    """The ids that the model's configuration gives a meaning of their own."""
    config = getattr(unwrap_model(model), "config", None)
    found = set()
    for part in (config, getattr(config, "text_config", None)):
        for name in SPECIAL:
            value = getattr(part, f"{name}_token_id", None)
            found |= {
                number for number in (value if isinstance(value, list | tuple) else [value]) if isinstance(number, int)
            }
    return found
