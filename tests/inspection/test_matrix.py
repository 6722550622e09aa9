"""Lazy matrices used as tensors: each operation gives the result of the dense matrix, or an error in words."""

import operator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch
from clearhead.inspection import by_blocks
from clearhead.inspection.by_blocks import blocks

LEADS = [(), (3,), (2, 4), (2, 2, 2)]


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights_of(*shape, keys=None, dtype=torch.float64, mask=None):
    *lead, queries = shape
    key = random(*lead, queries if keys is None else keys, 4, seed=1, dtype=dtype)
    return ch.weights(random(*lead, queries, 4, dtype=dtype), key, mask=mask, align="lower_right")


def padded(factor=None):
    """The weights of a watched call with padding; with a factor, of one that an edit multiplied."""

    class Block(torch.nn.Module):
        def forward(self, x, attention_mask):
            keep = attention_mask[:, None, None].bool()
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=keep)

    block, x = Block(), random(2, 3, 5, 4)
    edits = [] if factor is None else [ch.edits.ScaleHeads(factor=factor, queries=1)]
    with ch.watch(block) as seen:
        if edits:
            with ch.edit(block, *edits):
                block(x, attention_mask=torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]))
        else:
            block(x, attention_mask=torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]))
    return seen[0].weights


def difference():
    class Block(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    block, seen = Block(), []
    for seed in (0, 1):
        with ch.watch(block) as one:
            block(random(2, 3, 5, 4, seed=seed))
        seen.append(one)
    return seen[0].compare(seen[1])[0].weights


def gradients():
    return weights_of(2, 3, 5).gradients(random(2, 3, 5, 4, seed=3), random(2, 3, 5, 4, seed=4))


KINDS = {
    "Weights": lambda: weights_of(2, 3, 5, mask=ch.Causal()),
    "PaddedWeights": padded,
    "MultipliedWeights": lambda: padded(0.5),
    "WeightGradients": gradients,
    "WeightDifference": difference,
}
REDUCTIONS = ["sum", "mean", "amax", "amin"]
PLACES = ["max", "min", "argmax", "argmin"]
close = {"atol": 1e-12, "rtol": 1e-9}


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_sums_and_extremes_are_those_of_the_dense_matrix_in_blocks_of_any_size(data):
    lead = data.draw(st.sampled_from(LEADS))
    queries, keys = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    mask = data.draw(st.sampled_from([None, ch.Causal()]))  # with a mask many are equal
    w = weights_of(*lead, queries, keys=keys, mask=mask)
    dense = w.dense()
    name = data.draw(st.sampled_from(REDUCTIONS + PLACES))
    one = st.integers(-w.ndim, w.ndim - 1)
    dim = data.draw(st.one_of(st.none(), one))
    if name in REDUCTIONS and data.draw(st.booleans()):
        dim = tuple(data.draw(st.lists(one, min_size=1, unique_by=lambda d: d % w.ndim)))
    keepdim = data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patch:
        most = data.draw(st.integers(1, 2 * dense.numel()))
        patch.setattr(by_blocks, "_read", lambda matrix: [(at, matrix[at]) for at in blocks(matrix.shape, most)])
        found = getattr(w, name)(dim, keepdim) if dim is not None else getattr(w, name)(keepdim=keepdim)
    if dim is None:  # PyTorch gives it another way for each of these
        want = getattr(dense, name)()
        want = want.reshape([1] * w.ndim) if keepdim else want
    else:
        want = getattr(dense, name)(dim, keepdim)
    same(found, want)


def same(found, want):
    """Equal: numbers but for their last digits, since a part may be rounded another way than the whole is."""
    if isinstance(want, torch.Tensor):
        torch.testing.assert_close(found, want, **close)
    else:
        assert type(found) is type(want)
        torch.testing.assert_close(found.values, want.values, **close)
        assert torch.equal(found.indices, want.indices)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=5), st.integers(1, 200))
def test_blocks_are_all_of_it_once_and_in_order(shape, most):
    numbers = torch.arange(int(np.prod(shape))).reshape(shape)
    found = [numbers[at] for at in blocks(shape, most)]
    assert torch.equal(
        torch.cat([block.flatten() for block in found]) if found else numbers.flatten(), numbers.flatten()
    )
    assert all(block.numel() <= max(most, shape[-1]) for block in found)
    assert all(block.shape[-1] == shape[-1] for block in found)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_matrix_has_the_same_operations(kind):
    matrix = KINDS[kind]()
    dense = matrix.dense()
    assert matrix.shape == dense.shape == matrix.size() and matrix.dtype == dense.dtype
    assert (matrix.ndim, matrix.dim(), matrix.numel()) == (dense.ndim, dense.dim(), dense.numel())
    assert matrix.device == dense.device and matrix.size(-1) == dense.size(-1) and len(matrix) == len(dense)
    assert torch.equal(matrix[:], dense) and torch.equal(matrix[...], dense)
    # the whole and a part of it are computed in two ways
    torch.testing.assert_close(torch.stack(list(matrix)), dense, **close)
    for name in REDUCTIONS + PLACES:
        for dim in range(-4, 4):
            want = getattr(dense, name)(dim)
            same(getattr(matrix, name)(dim), want)
            same(getattr(torch, name)(matrix, dim=dim), want)
    assert np.array_equal(matrix.numpy(), dense.numpy()) and np.array_equal(np.asarray(matrix), dense.numpy())
    assert matrix.tolist() == dense.tolist()
    assert repr(matrix) == f"{matrix._head()}[0, :3]:\n{matrix[0, :3]}"
    for operation in (torch.Tensor.softmax, torch.Tensor.detach, torch.Tensor.argsort):
        with pytest.raises(AttributeError, match=rf"Write w\[:\]\.{operation.__name__}\(…\)"):
            getattr(matrix, operation.__name__)(-1)
    assert not hasattr(matrix, "cpu") and not hasattr(matrix, "nothing")


OPERATORS = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "eq", "ne"]


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_those_of_the_dense_matrix(name):
    w, other = weights_of(2, 3, 5), random(2, 3, 5, 5, seed=8).abs()
    dense, apply = w.dense(), getattr(operator, name)
    for mine, theirs in (
        ((w, 2), (dense, 2)),
        ((2, w), (2, dense)),
        ((w, other), (dense, other)),
        ((other, w), (other, dense)),
        ((w, w), (dense, dense)),
    ):
        assert torch.equal(apply(*mine), apply(*theirs)), (name, mine)
    assert torch.equal(+w, dense)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_number_of_numpy_on_the_left_gives_a_tensor_in_its_graph(name):
    query, apply = random(2, 3, 5, 4).requires_grad_(), getattr(operator, name)
    w = ch.weights(query, random(2, 3, 5, 4, seed=1))
    found, want = apply(np.float64(2), w), apply(2.0, w)
    assert isinstance(found, torch.Tensor) and torch.equal(found, want) and found.requires_grad == want.requires_grad
    array = random(5, seed=2).abs().numpy()
    assert np.array_equal(apply(array, w), apply(array, w.numpy()))


def test_torch_makes_a_tensor_of_it():
    for matrix in (weights_of(2, 3, 5), weights_of(1, 1, 1), weights_of(0, 2, 3), gradients(), difference()):
        for make in (torch.as_tensor, torch.asarray, torch.tensor, torch.from_dlpack):
            assert torch.equal(make(matrix), matrix.dense())
    with pytest.raises(BufferError, match="require gradient"):
        torch.as_tensor(ch.weights(torch.ones(2, 4, requires_grad=True), torch.ones(3, 4)))


def test_sums_and_extremes_stay_on_the_device_of_the_matrix():
    for kind in KINDS:
        matrix = KINDS[kind]()
        for name in REDUCTIONS + PLACES:
            want = getattr(matrix, name)(-1)
            with torch.device("meta"):
                found = getattr(matrix, name)(-1)
            same(found, want)
    array = ch.weights(np.eye(4), np.eye(4))
    with torch.device("meta"):
        assert np.allclose(array.sum(-1), 1.0) and (array * torch.ones(4, device="cpu").numpy()).sum() > 3
        assert torch.stack([array]).device.type == "cpu"


FUNCTIONS = {
    "stack": lambda w: torch.stack([w, w]),
    "cat": lambda w: torch.cat((w, w), dim=1),
    "einsum": lambda w: torch.einsum("bhij,bhjk->bhik", w, w),
    "softmax": lambda w: torch.softmax(w, -1),
    "functional": lambda w: torch.nn.functional.dropout(w, 0.0),
    "where": lambda w: torch.where(w > 0.2, w, 0.0),
    "max of two": lambda w: torch.max(w, torch.full_like(w, 0.2)),
    "topk": lambda w: torch.topk(w, 2).values,
    "allclose": lambda w: torch.tensor(torch.allclose(w, w)),
    "sum by name": lambda w: torch.sum(input=w, dim=-1),
    "sum in another dtype": lambda w: torch.sum(w, -1, dtype=torch.float32),
    "tensor @": lambda w: torch.eye(5, dtype=torch.float64) @ w,
    "copy_": lambda w: torch.empty(2, 3, 5, 5).copy_(w),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_given_the_dense_matrix(name):
    w = weights_of(2, 3, 5)
    assert torch.equal(FUNCTIONS[name](w), FUNCTIONS[name](w.dense()))


ARRAYS = {
    "stack": lambda w: np.stack([w, w]),
    "mean": np.mean,
    "max": lambda w: np.max(w, axis=-1, keepdims=True),
    "argmax": np.argmax,
    "sqrt": np.sqrt,
    "add": lambda w: np.add(np.ones(5), w),
    "times": lambda w: np.ones(5) * w,
}


@pytest.mark.parametrize("name", ARRAYS)
def test_functions_of_numpy_are_given_the_dense_array(name):
    w = weights_of(2, 3, 5)
    found, want = ARRAYS[name](w), ARRAYS[name](w.dense().numpy())
    assert type(found) is type(want) and np.array_equal(found, want)


def test_products():
    w, other, value = weights_of(2, 3, 5), weights_of(2, 3, 5, mask=ch.Causal()), random(2, 3, 5, 7, seed=9)
    for found, want in (
        (w @ value, w.dense() @ value),
        (torch.matmul(w, value), w.dense() @ value),
        (w @ other, w.dense() @ other.dense()),  # as attention rollout multiplies them
        (torch.matmul(w, other), w.dense() @ other.dense()),
        (gradients() @ value, gradients().dense() @ value),
        (difference() @ difference(), difference().dense() @ difference().dense()),
    ):
        torch.testing.assert_close(found, want, **close)


def test_arrays_give_arrays():
    x = random(2, 3, 5, 4).numpy()
    w = ch.weights(x, x)
    dense = w.dense()
    assert isinstance(dense, np.ndarray)
    for name in REDUCTIONS + PLACES:
        for dim in (None, -1, 1):
            found = getattr(w, name)(dim)
            assert isinstance(found, np.ndarray)
            np.testing.assert_allclose(
                found, getattr(dense, name.removeprefix("a") if name in ("amax", "amin") else name)(dim)
            )
    assert np.array_equal(w * 2, dense * 2) and np.array_equal(w > 0.2, dense > 0.2)
    assert np.array_equal(np.ones(5) - w, 1 - dense) and torch.equal(torch.stack([w]), torch.from_numpy(dense[None]))


def test_sums_and_extremes_have_gradients():
    query, key = random(2, 4, 5, 4).requires_grad_(), random(2, 4, 5, 4, seed=1).requires_grad_()
    w = ch.weights(query, key)
    truth = (query @ key.mT / 2).softmax(-1)
    for look in (
        lambda a: a.sum(-2).square().sum(),
        lambda a: (a.mean((0, 2)) * torch.arange(4.0)[:, None]).sum(),
        lambda a: a.max(-1).values.sum(),
        lambda a: a.amin(2).sum(),
        lambda a: a.max(),
        lambda a: (a * a).sum() + torch.stack([a, a]).square().sum(),
    ):
        want, got = (torch.autograd.grad(look(of), [query, key], retain_graph=True) for of in (truth, w))
        torch.testing.assert_close(got, want)
    with torch.no_grad():
        assert not w.sum(-1).requires_grad and not w.max().requires_grad
    found = torch.func.grad(lambda q: ch.weights(q, key.detach()).amax(-1).sum())(query.detach())
    torch.testing.assert_close(found, torch.autograd.grad(truth.amax(-1).sum(), query)[0])
    by_one = torch.func.vmap(lambda q, k: ch.weights(q, k).sum(-2))(query.detach(), key.detach())
    torch.testing.assert_close(by_one, truth.sum(-2).detach())


def test_sums_of_a_large_matrix_take_the_memory_of_some_rows(monkeypatch):
    x = random(1, 2, 5800, 4, dtype=torch.float32)
    w = ch.weights(x, x, mask=ch.Causal())
    assert w.numel() * 4 > 2**28
    with pytest.raises(ch.ClearheadError, match=r"dense\(\) would make"):
        w + 1
    read, largest = type(w).__getitem__, []

    def watched(self, index):
        found = read(self, index)
        largest.append(found.numel())
        return found

    monkeypatch.setattr(type(w), "__getitem__", watched)
    received = w.sum(-2)
    assert max(largest) <= by_blocks.NUMBERS
    torch.testing.assert_close(received, w.received(), atol=1e-4, rtol=1e-5)
    assert w.argmax() == 0 and w.max() == 1.0


def test_sums_of_many_equal_numbers_are_not_rounded_away():
    x = torch.zeros(1, 1, 1, 1)
    w = ch.weights(x.expand(1, 1, 300_000, 1), x.expand(1, 1, 3, 1))
    torch.testing.assert_close(w.sum(), torch.tensor(300_000.0), rtol=1e-6, atol=0)
    torch.testing.assert_close(w.mean(), torch.tensor(1 / 3), rtol=1e-6, atol=0)


def test_numbers_that_are_nan_are_the_extremes_as_in_pytorch(monkeypatch):
    query = random(1, 2, 6, 4)
    query[0, 1, 3] = torch.nan
    w = ch.weights(query, random(1, 2, 6, 4, seed=1), mask=ch.Causal(), engine="reference")
    dense = w.dense()
    assert dense.isnan().any()
    monkeypatch.setattr(by_blocks, "_read", lambda matrix: [(at, matrix[at]) for at in blocks(matrix.shape, 6)])
    for name in ("amax", "amin", "argmax", "argmin"):
        for dim in (-1, -2, 1):
            torch.testing.assert_close(getattr(w, name)(dim), getattr(dense, name)(dim), equal_nan=True)
    assert w.argmax() == dense.argmax() and w.max().isnan()


def test_one_number_is_a_number_and_more_are_refused():
    one = ch.weights(torch.zeros(1, 2), torch.zeros(1, 2))
    assert float(one) == one.item() == 1.0 and int(one) == 1 and bool(one)
    w = weights_of(2, 3, 5)
    for ask in (bool, float, int, lambda w: w.item()):
        with pytest.raises(ch.ClearheadError, match=r"one number is wanted, and this matrix is \(2, 3, 5, 5\)"):
            ask(w)


def test_matrices_without_numbers():
    none = ch.weights(torch.zeros(2, 0, 4), torch.zeros(2, 3, 4))
    assert none.sum() == 0 and none.sum(-1).shape == (2, 0) and none.mean().isnan() and none.max(-1)[0].shape == (2, 0)
    for ask in (lambda: none.max(), lambda: none.argmax(1), lambda: none.amin(1)):
        with pytest.raises(ch.ClearheadError, match="has no largest number"):
            ask()


def test_matrices_are_keys_of_dictionaries_and_are_compared_by_their_numbers():
    w, same = weights_of(2, 3, 5), weights_of(2, 3, 5)
    assert {w: 1}[w] == 1 and same not in {w: 1}
    assert (w == same).all()


def test_a_property_that_raises_an_attribute_error_says_so():
    class Own(ch.extend.Mask):
        def lower(self, sizes):
            return self.kept

    w = weights_of(2, 3, 5)
    w._source.problem = lambda: Own().kept
    with pytest.raises(AttributeError, match="'Own' object has no attribute 'kept'"):
        _ = w.problem


def test_small_matrices_are_printed_with_their_numbers():
    for shape, index, written in [
        ((3,), ..., ""),
        ((4, 8), ..., ""),
        ((2, 2, 3), ..., ""),
        ((6, 3), slice(4), "[:4]"),
        ((2, 8, 3), (0, slice(4)), "[0, :4]"),
        ((2, 2, 3, 3), (0, 0, slice(3)), "[0, 0, :3]"),
    ]:
        w = weights_of(*shape)
        assert repr(w) == str(w) == f"{w._head()}{written}:\n{w[index]!r}"
    one = weights_of(9)
    assert repr(one) == f"{one._head()}:\n{one[:]!r}"  # of one head all numbers
    for shape in ((1, 9), (1, 1, 9), (1, 0), (0, 3)):
        w = weights_of(*shape)
        assert repr(w) == w._head() and repr(w).startswith("Weights((")


def test_printing_computes_what_it_prints_and_keeps_no_graph():
    seen = []

    class Own(ch.extend.Score):
        def tile(self, query, key):
            seen.append(query.shape[0] * query.shape[1])
            return query @ key.mT

    x = random(3, 5, 4, 4).requires_grad_()
    w = ch.weights(x, x, score=Own())
    text = repr(w)
    assert "[0, :4]:\ntensor" in text and "grad_fn" not in text and max(seen) <= 4
    assert w[0, 0].dense().requires_grad, "printing has left weights without gradients"
    seen.clear()
    assert "\n" not in repr(ch.weights(random(1, 2, 9, 4), random(1, 2, 9, 4), score=Own())) and not seen


def test_what_cannot_be_computed_is_printed_too():
    attend, x = ch.nn.MultiHeadAttention(4, 2, record_gradients=True), random(1, 3, 4, dtype=torch.float32)
    attend(x, x, x)
    w = attend.attention_weights
    assert "with gradients)" in repr(w)
    with torch.no_grad():
        for tensor in (t for _, t in w._source._named()):
            tensor.mul_(2)
    assert repr(w).startswith("RecordedWeights((1, 2, 3, 3), torch.float32, not to be computed: ")
    assert repr(w) in w._repr_html_() or "RecordedWeights()" in w._repr_html_()
    assert "device='meta'" in repr(ch.weights(x.to("meta"), x.to("meta")))
