"""Matrix products of bfloat16, on a stand-in for a CPU with AMX, where PyTorch's product reads past a row's end."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead as ch
from clearhead.base.products import multiply

MM, BMM, ADDMM = torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default
SCORES = {
    "additive": lambda: ch.Additive(20, 38, hidden_dim=37),
    "one matrix": lambda: ch.Additive.from_weights(torch.randn(38, 20), None, torch.randn(38)),
    "bilinear": lambda: ch.Bilinear(20, 38),
    "wide": lambda: ch.Bilinear(100, 38),
}


class ReadsPastRows(TorchDispatchMode):
    """Products of bfloat16 as PyTorch computes them with AMX: where the inner width is odd, or above 32 and no multiple
    of 32, a row is NaN where the next row of the left matrix is not finite."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        left = args[1 if func is ADDMM else 0]
        if func not in (MM, BMM, ADDMM) or left.dtype != torch.bfloat16:
            return result
        width = left.shape[-1]
        if width % 2 or (width > 32 and width % 32):
            odd = ~left.isfinite().all(-1)
            result[..., :-1, :][odd[..., 1:]] = torch.nan
        return result


@pytest.fixture
def amx(monkeypatch):
    monkeypatch.setattr("clearhead.base.products.has_matrix_instructions", lambda _: True)


def odd_rows(tensor):
    return (~tensor.isfinite().all(-1)).nonzero().flatten().tolist()


@pytest.mark.parametrize("width", [7, 32, 37, 38, 80, 96])
def test_the_stand_in_and_the_product(width, amx):
    left, right = torch.randn(60, width).bfloat16(), torch.randn(width, 20).bfloat16()
    plain = left @ right
    assert torch.allclose(multiply(left, right).float(), plain.float(), rtol=2**-7, atol=2**-6)
    left[14] = torch.inf
    with ReadsPastRows():
        assert odd_rows(left @ right) == ([14] if width in (32, 96) else [13, 14])
        assert odd_rows(multiply(left, right)) == [14]


@pytest.mark.parametrize("engine", ["native", "tiled", "reference"])
@pytest.mark.parametrize("name", SCORES)
def test_an_infinite_row_reaches_no_other_row(name, engine, amx):
    """Forward, an infinite key that one query may see; backward, an infinite gradient of one query's output."""
    torch.manual_seed(0)
    score = SCORES[name]().bfloat16()
    queries, keys = (100 if name == "wide" else 20), 38
    inputs = [torch.randn(1, 1, n, e).bfloat16() for n, e in ((21, queries), (21, keys), (21, 12))]
    causal = ch.Causal()
    for infinite in (0, 1):
        given = [t.clone() for t in inputs]
        given[infinite][0, 0, 9] = torch.inf
        with ReadsPastRows():
            output = ch.attention(*given, score=score, mask=causal, engine=engine)
        assert odd_rows(output[0, 0]) == ([9] if infinite == 0 else list(range(9, 21))), infinite
    leaves = [t.clone().requires_grad_() for t in inputs]
    with ReadsPastRows():
        output = ch.attention(*leaves, score=score, mask=causal, engine=engine)
        up = torch.ones_like(output)
        up[0, 0, 9] = torch.inf
        of_query, of_key, _ = torch.autograd.grad(output, leaves, up)
    assert odd_rows(of_query[0, 0]) == [9]
    assert odd_rows(of_key[0, 0]) == list(range(10))


def test_gradients_of_a_matrix_row_by_row(amx):
    """The inner width of the matrix's gradient is the number of queries."""
    torch.manual_seed(0)
    matrix = torch.randn(37, 20).bfloat16().requires_grad_()
    with ReadsPastRows():
        product = multiply(torch.randn(3, 7, 20).bfloat16(), matrix.T)
        up = torch.ones_like(product)
        up[1, 3, 5] = torch.inf
        (found,) = torch.autograd.grad(product, matrix, up)
    assert odd_rows(found) == [5]


def test_one_compiled_product_serves_every_length(amx):
    matrix = torch.randn(20, 37).bfloat16()
    compiled = torch.compile(multiply, backend="eager", fullgraph=True, dynamic=True)
    for length in (5, 32, 64, 7):
        with torch.compiler.set_stance("default" if length == 5 else "fail_on_recompile"):
            rows = torch.randn(2, length, 20).bfloat16()
            assert torch.equal(compiled(rows, matrix), multiply(rows, matrix))


def test_autocast(amx):
    rows, matrix = torch.randn(21, 37), torch.randn(37, 20)
    rows[9] = torch.inf
    with torch.autocast("cpu", torch.bfloat16), ReadsPastRows():
        assert odd_rows(multiply(rows, matrix)) == [9]
        assert odd_rows(rows @ matrix) == [8, 9]
