"""monitor(): entropy, largest logit and sink share of every head while a model trains."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol, Self
from weakref import WeakMethod

from torch import Tensor, nn

from clearhead.base.errors import ClearheadError
from clearhead.base.managers import Delayed, caller
from clearhead.base.numbers import check_count
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.torch_private import compiler_here
from clearhead.explanation.diagnosis.checks import entropy_collapse
from clearhead.explanation.diagnosis.diagnosis import Diagnosis
from clearhead.inspection.deviation import Deviation
from clearhead.models.interception.choice import Layers, check_layers, checked_layers
from clearhead.models.interception.compiled import CompiledCalls
from clearhead.models.interception.intercept import intercept
from clearhead.models.interception.layers import LayerName, Site
from clearhead.models.interception.patch import replacing
from clearhead.models.interception.refused import (
    is_compiled,
    prepare_compiler,
    refuse_compiled_code,
    uncompiled,
    validate_model,
)
from clearhead.models.monitoring.head_figures import COLUMNS, KEEP, compute_figures, make_rows
from clearhead.models.recorder import missed
from clearhead.models.recorder.asked import Asked
from clearhead.models.recorder.recorder import Recorder
from clearhead.models.table import Table

Callback = Callable[[int, list[dict[str, Any]]], object]


class Writer(Protocol):
    """The part of a SummaryWriter of TensorBoard that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


def monitor(
    model: nn.Module, every: int = 20, callback: Callback | Writer | None = None, *, layers: Layers = None
) -> Monitor:
    """Watch the attention of a model that trains: entropy, largest logit and sink share of every head.

    >>> import torch, clearhead as ch
    >>> block, x = ch.nn.DotProductAttention().train(), torch.zeros(1, 1, 2, 8)
    >>> with ch.models.monitor(block, every=2) as seen:
    ...     for step in range(4):
    ...         output = block(x, x, x, mask=ch.Causal())
    >>> for row in seen.table():
    ...     print(row["step"], row["layer"], row["head"], round(row["entropy"], 4), row["sink_share"])
    0 0 0 0.3466 0.75
    2 0 0 0.3466 0.75

    A step is a call of `model` in training mode (`model.train()`); the first step has the number 0. The first of every
    `every` steps is monitored. Calls in evaluation mode, and layers that a checkpoint computes again, are neither
    counted nor monitored.
    `model`: as for `watch`. `callback`: a function that is called after each monitored call of the model with the
    step's number and its rows; or TensorBoard's `SummaryWriter`, or an object with the same `add_scalar`, which is
    given each number under a tag such as "entropy/layers.0.self_attn/3", where 3 is the head. `layers`: as for `watch`.
    Returns a `Monitor`, which ends with the `with`, or by its `remove()`. With a callback it stays on the model until
    then. Without a callback it ends when it is no longer referenced.

    The numbers of each head are over the queries of all sequences that see a key and are no padding:
    entropy: the mean of H_i = −Σ_j w_ij log w_ij, in nats (`Entropy`).
    max_logit: the largest score s_ij, as the softmax meets it (`MaxScore`).
    sink_share: the mean of w_if + 1 − Σ_j w_ij, the weight on f, the sequence's first key, and on the head's own sink,
    if it has one (`SinkShare`). The first query of a causal model has no other key; it is included.
    The weights are those before dropout. Outputs and gradients of training are the same to the bit as without a
    monitor.

    Compile the model after the monitor was made. Then calls of transformers' attention interface, and of the attention
    modules of `clearhead.nn`, are seen inside compiled code, with fullgraph too. Other attention in compiled code is
    not seen; calls of `clearhead.attention` itself, nested tensors and scores that are functions are left out there.
    Without `layers`, it warns once of modules that computed a softmax in their own code, which are not monitored. A
    softmax by hand, as exp() divided by its sum, goes unnoticed.
    Calls that cannot be read, as for `watch`, and a step in which no attention is seen, do not end the training: a
    warning names the layers once. So does a warning of a layer that a function of another project computes otherwise.
    Raises a `ClearheadError` for a compiled model, for a model whose classes the compiler already has code for, and at
    the end of a `with` without a step, or without a call by one of `layers`.
    Cost: a monitored step has one more pass over the allowed pairs of each call, with O(Lq + Lk) memory, and 24 bytes
    are kept for each head. Any other step runs two hooks, and with transformers one function for each call. After the
    monitor is removed there is no cost.
    Sources: Zhai et al. 2023, "Stabilizing Transformer Training by Preventing Attention Entropy Collapse"; Dehghani et
    al. 2023, "Scaling Vision Transformers to 22 Billion Parameters" (logits); Gu et al. 2025, "When Attention Sink
    Emerges in Language Models" (first key).
    """
    validate_model(model, "monitor")
    check_count(every, 1, "every")
    what = Asked(KEEP, 1, checked_layers(layers, "monitor"), None, None, who="monitor")
    call = _as_function(callback)
    refuse_compiled_code(model)
    return Monitor(model, every, call, what)


def _as_function(callback: Any) -> Callback | None:
    write = getattr(callback, "add_scalar", None)
    if write is not None:
        return lambda step, rows: [
            write(f"{column}/{row['module']}/{row['head']}", row[column], step) for row in rows for column in COLUMNS
        ]
    if callback is not None and not callable(callback):
        raise ClearheadError(f"monitor: callback is a {type(callback).__name__}; expected a function or SummaryWriter.")
    found: Callback | None = callback
    return found


class Monitor:
    """The monitor that `clearhead.models.monitor` returns.

    `table()`: the rows of all monitored steps. `diagnose()`: heads whose entropy collapses. `steps`: the number of
    steps. `remove()`: end the monitor. It can be read at any time. A `with` removes it at its end.
    """

    def __init__(self, model: nn.Module, every: int, callback: Callback | None, asked: Asked) -> None:
        self.every, self.steps = every, 0
        self._callback, self._asked = callback, asked
        self._found: list[tuple[int, dict[str, Tensor]]] = []
        self._layers: dict[str, LayerName] = {}  # by module
        self._sites: dict[Site, None] = {}  # the layers that made calls in any step
        self._lock, self._here = threading.Lock(), _Here()
        self._open, self._removed = 0, True  # monitored passes that run, in any thread; whether the monitor was removed
        self._line = caller()
        self._told = False  # whether it has warned of modules that are not monitored, or of a step without attention
        self._missing: dict[Site, str] = {}  # the layers whose calls could not be read, in any step
        self._deviations: dict[Site, Deviation | None] = {}  # of the first calls that functions of others computed
        self._compiled_calls, self._installed = CompiledCalls(model), ExitStack()
        try:
            with Delayed(), ExitStack() as stack:
                stack.enter_context(self._compiled_calls.installed())
                begin, end = self._begin, self._end
                if callback is None:  # else the model keeps the monitor until it is removed
                    begin, end = _weak(begin, self._installed), _weak(end, self._installed)
                stack.callback(model.register_forward_pre_hook(_Hook(begin), with_kwargs=True).remove)
                stack.callback(model.register_forward_hook(_Hook(end), always_call=True).remove)
                self._installed.enter_context(stack.pop_all())
                self._removed = False
        except BaseException:
            self.remove()
            raise

    def table(self) -> Table:
        """A row for each monitored step, module and head, as `pandas.DataFrame` takes them.

        Its columns: step, layer, module, head, entropy, max_logit, sink_share.
        """
        return Table(row for step, found in self._found for row in make_rows(step, found, self._layers))

    def diagnose(self) -> Diagnosis:
        """Heads whose entropy collapses over the monitored steps: see `clearhead.diagnose`."""
        return Diagnosis(entropy_collapse.collapsed(self.table()), ["masks", "outputs"])

    def remove(self) -> None:
        """End the monitor; its rows stay. Compiled code that contains it is compiled anew when it next runs.

        A monitored pass that still runs in another thread is monitored to its end.
        """
        with Delayed():
            with self._lock:
                self._removed = True
            self._close()

    def __enter__(self) -> Self:
        if self._removed:
            raise ClearheadError("this monitor has ended: write `with ch.models.monitor(...):` each time.")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.remove()
        if kind is None and not self.steps:
            raise ClearheadError(
                "monitor: the model was not called in training mode. Call model.train() before, then the model itself."
            )
        if kind is None and self._sites:
            check_layers(self._asked.layers, self._sites, "monitor")

    def __del__(self) -> None:
        if getattr(self, "_removed", True) or sys.is_finalizing():
            return
        if not replacing():  # else this runs inside a pass, and the model's next call removes the hooks
            self._installed.close()

    def __repr__(self) -> str:
        return f"Monitor({self.steps} steps, {len(self._found)} of them monitored)"

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool) -> None:
        self._here.passing = False
        if self._here.step is not None:  # the record of a pass that was interrupted
            self._close()
        if self._removed or not module.training or get_mode().backward:
            return
        with self._lock:
            step, self.steps = self.steps, self.steps + 1
        here = self._here
        here.passing = True
        if step % self.every:
            return
        one = _Step(self, module, step, compiled or any(map(is_compiled, module.modules())))
        with Delayed(), ExitStack() as stack:
            if not one.compiled:  # compiled code would pause at a function mode
                stack.enter_context(intercept(one, backends=False))
            stack.enter_context(self._compiled_calls.recording(one, one.compiled))
            stack.enter_context(one.stack.running(module, args, kwargs))
            here.step = one
            with self._lock:
                self._open += 1
            here.open = stack.pop_all()

    def _end(self, module: nn.Module, args: Any, output: Any, compiled: bool) -> None:
        step = self._here.step
        self._here.passing = False
        if step is None:  # the pass was not monitored
            return
        self._close()
        if output is None:  # it failed
            return
        unread = bool(step.unread) and self._asked.layers is None
        if (unread or not step.sites) and not self._told:
            self._told = True
            said = step.told_of_unread("monitored", "monitor(model, layers=…)") if step.sites else _nothing_seen(step)
            self._line.warn(said)
        if not step.sites:
            return
        self._note_layers(step)
        if not step.reduced:  # none of the chosen layers: training may leave some out
            return
        found = compute_figures(step.reduced)
        with self._lock:
            self._found.append((step.number, found))
            for call in step.reduced:
                self._layers.setdefault(call.name, call.layer)
        if self._callback is not None:
            self._callback(step.number, make_rows(step.number, found, self._layers))

    def _note_layers(self, step: _Step) -> None:
        """Note the layers of a step. Warn once of each that is not monitored, or that computes something else."""
        with self._lock:
            self._sites |= step.sites
            missing = {site: reason for site, reason in step.missing.items() if site not in self._missing}
            deviations = {site: one for site, one in step.deviations.items() if site not in self._deviations}
            self._missing |= missing
            self._deviations |= deviations
        if missing:
            self._line.warn(missed.left_out(missing, "monitored"))
        for said in missed.describe_deviations(deviations, "rows"):
            self._line.warn(said)

    def _close(self) -> None:
        here = self._here
        here.passing = False
        with Delayed():
            monitored, opened, here.open, here.step = here.step is not None, here.open, ExitStack(), None
            opened.close()
            with self._lock:
                self._open -= monitored
                last = self._removed and not self._open
            if last:
                self._installed.close()


def _weak(method: Callable[..., None], installed: ExitStack) -> Callable[..., None]:
    """The method, without a reference to its Monitor. Once that is gone, the model's next call removes the hooks."""
    found = WeakMethod(method)

    def run(*args: Any, **kwargs: Any) -> None:
        of_monitor = found()
        if of_monitor is None:
            installed.close()
        else:
            of_monitor(*args, **kwargs)

    return run


class _Here(threading.local):
    """The pass that runs in this thread."""

    def __init__(self) -> None:
        self.passing = False  # a pass of the model, monitored or not
        self.step: _Step | None = None
        self.open = ExitStack()  # closes the record of the step


class _Step(Recorder):
    """Records one pass, and nothing of other passes that run in other threads meanwhile."""

    def __init__(self, monitor: Monitor, model: nn.Module, number: int, compiled: bool) -> None:
        super().__init__(model, monitor._asked)
        self.monitor, self._here = monitor, monitor._here  # the monitor stays until the pass has ended
        self.number, self.compiled, self.deviations = number, compiled, dict(monitor._deviations)

    @property
    def idle(self) -> bool:
        another = self._here.passing and self._here.step is not self
        return another or super().idle


class _Hook:
    """A hook on the monitored model. Copies of the model, and saved models, get a hook that does nothing."""

    def __init__(self, run: Callable[..., None] | None = None) -> None:
        prepare_compiler(type(self).__call__)  # else the compiler would compile this method too
        reason = "monitor() begins and ends a step in eager code; compile with fullgraph=False, or the model itself"
        self.run = None if run is None else uncompiled(run, reason)

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if self.run is not None:
            self.run(module, *args, compiled=get_mode().compiled or compiler_here() is not None)

    def __reduce__(self) -> Any:
        return _Hook, ()


def _nothing_seen(step: _Step) -> str:
    if not step.compiled:
        return f"monitor: {missed.nothing_seen(step.stack.model, ())}"
    return (
        f"monitor: no attention was seen in a step of {type(step.stack.model).__name__}. In compiled code the calls of "
        "transformers' attention interface and of ch.nn alone can be seen, and only where it was compiled after the "
        "monitor was made. Otherwise call torch.compiler.reset() first, or train without compiling."
    )
