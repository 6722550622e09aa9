"""circuits(): what each head of a model reads and writes, by its weights alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from clearhead.base.arrays import accumulated
from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.output.text import brief, with_outline
from clearhead.base.selected import numbers_of
from clearhead.explanation.modules.projection import Linear
from clearhead.inspection.low_rank import LowRank
from clearhead.models.model_calls import call_without_grad
from clearhead.models.origins.chain import Places
from clearhead.models.origins.find import SIDES, find
from clearhead.models.origins.ran import check_unwritten, is_plain, layer_of
from clearhead.models.recording import Recording
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.calls import labels, one_call
from clearhead.models.table import Table
from clearhead.models.watch import watch_own
from clearhead.nn.multi_head_attention import MultiHeadAttention

Composed = Literal["query", "key", "value"]


def circuits(model: nn.Module | Recording, inputs: object = None) -> Circuits:
    """The projections of every head of a model, and the products of them that say what the head does.

    >>> import torch, clearhead as ch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=64, n_layer=2, n_head=8, n_positions=32)).eval()
    >>> found = ch.models.circuits(model, {"input_ids": torch.arange(10)[None]})
    >>> found
    Circuits(16 heads of 2 layers)
    >>> found.projections(1, 3).query.weight.shape                 # E × d_model
    torch.Size([8, 64])
    >>> found.qk(1, 3), found.ov(1, 3)
    (LowRank(64 × 64, of rank 8), LowRank(64 × 64, of rank 8))
    >>> print(found.composition("key")[0])                          # the pair that composes most
    {'layer': 1, 'head': ..., 'with layer': 0, 'with head': ..., 'composition': ...}

    Formulas: QK = W_Qᵀ W_K, so that a score is x_qᵀ · QK · x_k · scale for the layer's inputs x; OV = W_O W_V, so that
    the head adds Σ_j w_ij · OV · x_j to its layer's output. Biases are beside the weights in `projections`.
    `model`: any model that `watch` recognises. `inputs`: as for `audit`; any short input of the model serves,
    for it says only which layers made and read which numbers. The model runs once on it, without gradients. Or `model`
    is a `Recording` of `watch(model, values=True)`, without `inputs`, while the model still has the weights that it
    had. The layers are found by the numbers that they gave, not by their names, as `explain` finds them. Gives
    `Circuits`. A head whose layers are not found raises an `UnsupportedError` that says which numbers no layer gave,
    when it is asked for. Raises a `ClearheadError` for a recording without values, and for one from a file.
    The layer's input is the result of the norm before it, where there is one. Weights are the model's own: a norm's
    factor is not multiplied into them. Layers with adapters, hooks or quantised weights are read by a call, as
    for `AttentionCall.output_projection`. Where a model multiplies a projection's result by one number before it calls
    attention, as OPT its queries by 1/√E, whose calls have scale 1, the number is in the weight and the bias.
    Cost: one run of the model under `watch(values=True)`; each product is of the size of a projection.
    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
    """
    if isinstance(model, Recording) and inputs is None:
        if model.calls and all(call.origin is None for call in model.calls):
            raise ClearheadError("circuits: the recording has no layers around its calls. Pass circuits(model, inputs)")
        return Circuits(model, {})
    if not isinstance(model, nn.Module) or inputs is None:
        got = type(model).__name__ + ("" if inputs is None else f" and inputs, a {type(inputs).__name__}")
        raise ClearheadError(f"circuits takes a model and inputs, or a recording alone, circuits(seen); got a {got}.")
    with watch_own(model, values=True) as seen:
        call_without_grad(model, inputs)
    return Circuits(seen, {**dict(model.named_modules()), type(model).__name__: model})


class Circuits:
    """The projections and the circuits of every head of a model. `circuits` gives it.

    A layer is chosen as in `Recording.explain`: by its number in the model, negative ones from the last; by its name,
    such as "decoder 1, cross", where the model has several stacks; or by the name of its module. Heads by their number.
    """

    def __init__(self, seen: Recording, modules: Mapping[str, nn.Module]) -> None:
        self._sides: dict[str, Sides] = {}
        first: dict[Any, AttentionCall] = {}
        for call in seen.calls:
            if (call.layer, call.name) not in first:
                first[call.layer, call.name] = call
                label = str(labels([call])[0])
                self._sides[label] = Sides(call, modules.get(call.name))

    @property
    def layers(self) -> list[str]:
        """The names of the layers, such as "L3", in their order."""
        return list(self._sides)

    def __repr__(self) -> str:
        heads = sum(sides.heads for sides in self._sides.values())
        return f"Circuits({heads} heads of {len(self._sides)} layers)"

    def projections(self, layer: int | str, head: int) -> Projections:
        """The four projections of a head: `query`, `key`, `value`, `output`, each with `weight` and `bias`."""
        sides = self._of(layer)
        return sides.projections(sides.number(head))

    def qk(self, layer: int | str, head: int) -> LowRank:
        """W_Qᵀ W_K, (d_model, d_model): which inputs of queries match which inputs of keys, before the scale.

        Norms and rotations between the projections and the scores are left out: `projections(…).between` names them.
        """
        sides = self._of(layer)
        query, key = (_exact(sides.side(name, sides.number(head)).weight) for name in ("query", "key"))
        return LowRank(query.mT, key)

    def ov(self, layer: int | str, head: int) -> LowRank:
        """W_O W_V, (d_model, d_model): what the head writes for each input that it attends to."""
        sides = self._of(layer)
        value, output = sides.side("value", sides.number(head)), sides.output(sides.number(head))
        return LowRank(_exact(output.weight), _exact(value.weight))

    def composition(self, through: Composed = "key") -> Table:
        """How much each head reads what an earlier head writes, the largest first: a row for each pair of heads.

        Formula, with OV of the earlier head: ‖QKᵀ · OV‖ / (‖QK‖ ‖OV‖) for `through="query"`, ‖QK · OV‖ / (‖QK‖ ‖OV‖)
        for "key", ‖OV' · OV‖ / (‖OV'‖ ‖OV‖) for "value"; Frobenius norms, so each is between 0 and 1. Two random heads
        compose by about 1/√d_model, as far as their rank is small beside it.
        Pairs are of self attentions of one stack, the earlier layer first. Raises an `UnsupportedError` where a layer's
        projections are not found, or do not read the residual stream. Cost: O(H² r² d_model) for H heads of width r.
        Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
        """
        if through not in get_args(Composed):
            raise ClearheadError(f"composition: through is {through!r:.60}; expected one of {get_args(Composed)}.")
        sides = [one for one in self._sides.values() if one.call.kind == "self"]
        writes = [_factors(one, "value") for one in sides]
        reads = writes if through == "value" else [_factors(one, through) for one in sides]
        rows = Table()
        for later, (left, right) in zip(sides, reads, strict=True):
            for earlier, (out, into) in zip(sides, writes, strict=True):
                mine, other = later.call.layer, earlier.call.layer
                if mine.stack != other.stack or mine.number <= other.number:
                    continue
                if right.shape[-1] != out.shape[-2]:
                    raise UnsupportedError(
                        f"composition: heads of {other} write {out.shape[-2]} numbers, and those of {mine} read their "
                        f"{through} from {right.shape[-1]}, which are not the residual stream."
                    )
                found = _composed(left, right, out, into)
                for head, numbers in enumerate(found.tolist()):
                    row = {"layer": mine.column, "head": head, "with layer": other.column}
                    rows += Table.of(row, {"with head": range(len(numbers)), "composition": numbers})
        return Table(sorted(rows, key=lambda row: -row["composition"]))

    def _of(self, layer: Any) -> Sides:
        every = list(self._sides.values())
        return every[one_call([one.call for one in every], layer, None, "circuits")]


def _exact(weight: Tensor) -> Tensor:
    return weight.to(accumulated(weight.dtype))


def _factors(sides: Sides, through: str) -> tuple[Tensor, Tensor]:
    """The two factors of every head's matrix that reads an earlier head: (H, m, r) and (H, r, d_model)."""
    every = range(sides.heads)
    if through == "value":
        pairs = [(sides.output(h).weight, sides.side("value", h).weight) for h in every]
    else:
        other = "key" if through == "query" else "query"
        pairs = [(sides.side(other, h).weight.mT, sides.side(through, h).weight) for h in every]
    left, right = (torch.stack([_exact(pair[n]) for pair in pairs]) for n in range(2))
    return left, right


def _composed(left: Tensor, right: Tensor, out: Tensor, into: Tensor) -> Tensor:
    """‖left · right · out · into‖ / (‖left · right‖ ‖out · into‖) for each pair of heads, (H, G).

    Each factor stands for its triangle of a QR decomposition, so no matrix of d_model × d_model is made.
    """
    above, below = torch.linalg.qr(left).R, torch.linalg.qr(into.mT).R  # (H, r, r), (G, s, s)
    inner = torch.einsum("hrd,gds->hgrs", right, out)
    whole = torch.linalg.matrix_norm(above[:, None] @ inner @ below.mT[None])
    mine = torch.linalg.matrix_norm(above @ torch.linalg.qr(right.mT).R.mT)
    other = torch.linalg.matrix_norm(torch.linalg.qr(out).R @ below.mT)
    found: Tensor = whole / (mine[:, None] * other[None]).clamp_min(torch.finfo(whole.dtype).tiny)
    return found


@with_outline
class Projections(NamedTuple):
    """The projections of one head. Each has a `weight` (out, in) and a `bias` (out,), or None, as `nn.Linear` has them.

    `query`, `key`: weight (E, d_model). `value`: (Ev, d_model). `output`: (d_model, Ev), and its bias is the whole
    layer's, which all heads share. Query heads that share a key head have the same `key` and `value`. A number by which
    the model multiplies a projection's result before attention, as OPT its queries, is in the weight and the bias.
    `between`: what the model computes between these layers and the attention scores, such as a rotation: products of
    the weights alone leave it out.
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    between: tuple[str, ...] = ()


@with_outline
class Made(NamedTuple):
    """A linear layer and its `rows` (heads, width) that make one side of each head, times a factor."""

    layer: Linear
    rows: Tensor
    factor: float = 1.0
    between: tuple[str, ...] = ()


class Sides:
    """The layers of one call of a module: those that make query, key and value, and the one that writes the heads."""

    def __init__(self, call: AttentionCall, module: nn.Module | None) -> None:
        self.call, self.module = call, module
        self.heads, self.key_heads = call.query.shape[1], call.key.shape[1]
        self._known: dict[str, Made | None] = {}

    def made(self, side: str) -> Made:
        """The layer that makes a side of all heads. Raises an `UnsupportedError` where none is found."""
        if side not in self._known:
            self._known[side] = self._declared(side) or self._found(side)
        made = self._known[side]
        if made is None:
            self._check_layers()
            raise UnsupportedError(
                f"{self.call.name}: no linear layer that ran in the module gives its {side}, with a norm, a rotation "
                "and a factor: it computes something else, as latent attention does, or its tensors are gone."
            )
        return made

    def _check_layers(self) -> None:
        """Raise for a layer before the call whose numbers cannot be read, which may be the one that is looked for."""
        origin = self.call.unedited.origin
        for one in () if origin is None else origin.ran[: origin.before]:
            if one.kind is Linear:
                check_unwritten(one.versions, f"{self.call.name}: the weights or the input of {one.name}")
                _ = one.layer

    def _declared(self, side: str) -> Made | None:
        """The layer of a module of clearhead's or PyTorch's own, whose weights lie as its documentation says."""
        module, count = self.module, self.heads if side == "query" else self.key_heads
        if isinstance(module, MultiHeadAttention):
            own = f"W_{side[0]}"
            ran = () if self.call.origin is None else self.call.origin.ran
            found = next((one.layer for one in ran if one.name == own and one.stands), layer_of(getattr(module, own)))
            turned = _between(module, side)
        elif isinstance(module, nn.MultiheadAttention):
            weight, bias = projection_of(module, side)
            if not is_plain(weight):  # the run had another, which is looked for by its numbers
                return None
            found, turned = Linear(weight.detach(), None if bias is None else bias.detach()), ()
        else:
            return None
        if not isinstance(found, Linear) or found.weight.shape[0] % count:
            return None
        return Made(found, torch.arange(found.weight.shape[0], device="cpu").view(count, -1), between=turned)

    def _found(self, side: str) -> Made | None:
        call = self.call.unedited
        tensor = getattr(call, side)
        if call.origin is None or tensor is None:
            return None
        count = self.heads if side == "query" else self.key_heads
        chain = find(side, tensor, call.origin, Places([0], list(range(count)), []), (self.heads, self.key_heads))
        if chain is None:
            return None
        between = [f"{side}: the norm {chain.norm[0]}"] if chain.norm is not None else []
        between += [f"{side}: a rotation by positions"] if chain.turn is not None else []
        return Made(chain.layer, chain.rows, chain.factor, tuple(between))

    def side(self, name: str, head: int) -> Linear:
        """The rows of a layer that make one side of a head, times the model's factor."""
        made = self.made(name)
        layer = made.layer.rows(made.rows[head if name == "query" else head * self.key_heads // self.heads])
        if made.factor == 1.0:
            return layer
        return Linear(layer.weight * made.factor, None if layer.bias is None else layer.bias * made.factor)

    def output(self, head: int) -> Linear:
        """The columns of the last layer that read a head."""
        layer = self.call.output_projection
        width = layer.weight.shape[1] // self.heads
        return Linear(layer.weight[:, head * width : (head + 1) * width], layer.bias)

    def projections(self, head: int) -> Projections:
        between = (*self.made("query").between, *self.made("key").between)
        query, key, value = (self.side(name, head) for name in ("query", "key", "value"))
        return Projections(query, key, value, self.output(head), between)

    def number(self, head: Any) -> int:
        """A head's number, checked; negative numbers count from the last."""
        found = numbers_of(head, self.heads, "circuits: head", f"{self.call.name} has {self.heads} heads")
        if len(found) > 1:
            raise ClearheadError(f"circuits: head is {brief(head)}, which means {len(found)} heads; pass one of them.")
        return found[0]


def _between(module: MultiHeadAttention, side: str) -> tuple[str, ...]:
    """What a module of clearhead's computes between a projection and the scores."""
    if side == "value":
        return ()
    norm = module.query_norm if side == "query" else module.key_norm
    scaled = side == "query" and (module.scale is not None or module.temperature is not None)
    parts = {
        f"the norm {type(norm).__name__}": norm is not None,
        "a rotation by positions": module.rotary is not None,
        "a scale of its own": scaled,
    }
    return tuple(f"{side}: {said}" for said, there in parts.items() if there)


def projection_of(module: nn.MultiheadAttention, side: str) -> tuple[Tensor, Tensor | None]:
    """The weight (E, in) and the bias of one side of PyTorch's module."""
    number, packed, biases = SIDES.index(side), module.in_proj_weight, module.in_proj_bias
    apart = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    bias = None if biases is None else biases.chunk(3)[number]
    return apart[number] if packed is None else packed.chunk(3)[number], bias
