"""Real models edited while they run, and their attention's gradients, over the same model alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

import clearhead as ch
from benchmarks.measure import interleaved
from benchmarks.result import Result, times
from benchmarks.watching import llama

LENGTH = 2048


def edit() -> Result:
    model, ids = llama(), torch.randint(0, 1000, (1, LENGTH))

    def edited() -> None:
        with ch.edit(model, ch.edits.Knockout("layers.1.*", 3, keys=5)):
            model(ids)

    seconds = interleaved({"plain": lambda: model(ids), "edited": edited}, 11, 2)
    ratio = seconds["edited"] / seconds["plain"]
    what = f"Llama on {LENGTH} tokens, one head of one layer without a key, over the plain forward"
    return Result(what, ratio, "×", "≤ 1.2", ratio <= 1.2, times(seconds))


@torch.enable_grad()  # type: ignore[untyped-decorator]
def relevance() -> Result:
    model = llama().requires_grad_(False)
    given = model.get_input_embeddings()(torch.randint(0, 1000, (1, LENGTH))).requires_grad_()

    def plain() -> None:
        model(inputs_embeds=given).last_hidden_state[:, -1].sum().backward()

    def relevant() -> None:
        with ch.watch(model, gradients=True) as seen:
            loss = model(inputs_embeds=given).last_hidden_state[:, -1].sum()
        loss.backward()
        for call in seen.calls:
            call.gradients.by_key(positive=True)

    def eager() -> None:
        model.set_attn_implementation("eager")
        output = model(inputs_embeds=given, output_attentions=True)
        torch.autograd.grad(output.last_hidden_state[:, -1].sum(), output.attentions)
        model.set_attn_implementation("sdpa")

    seconds = interleaved({"plain": plain, "relevance": relevant, "eager": eager}, 7, 1)
    ratio = seconds["relevance"] / seconds["plain"]
    what = f"Llama on {LENGTH} tokens, (A ∘ ∂A)⁺ by key of every layer, over the plain forward and backward"
    return Result(what, ratio, "×", "≤ 1.3", ratio <= 1.3, times(seconds))


CASES: dict[str, Callable[[], Result]] = {"edit-2048": edit, "relevance-2048": relevance}
