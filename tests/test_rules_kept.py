"""The results of a rule are cached where its names show all that it reads, and each change of these is followed."""

import functools
import random
import sys
import time
import types

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.base.user_functions.function_reads import FunctionReads

L = 70  # more than one block of 48 × 64
I, J = torch.arange(L)[:, None], torch.arange(L)[None]  # noqa: E741
X = torch.randn(3, 1, 1, L, 4, generator=torch.Generator().manual_seed(0))

number = 5
table = torch.rand(L, generator=torch.Generator().manual_seed(1)) < 0.5
listed = [3]
draw = torch.rand
array = np.arange(L) % 3


def helper(x):
    return x % number


class Holder:
    def __init__(self):
        self.number = 4
        self.table = table.clone()

    def rule(self, b, h, i, j):
        return (i + j) % self.number != 0

    def __call__(self, b, h, i, j):
        return self.table[i] | self.table[j]


class Odd(int):
    """An integer whose operations are its own."""

    modulus = 3

    def __rmod__(self, other):
        return other % Odd.modulus


def seen(rule):
    """The rule's matrix, asked now."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    return rule(zero, zero, I[None, None], J[None, None]).expand(1, 1, L, L)


def found(mask, engine):
    return ch.attention(*X, mask=mask, engine=engine)


def wanted(rule):
    query, key, value = X.double()
    keep = seen(rule)
    weights = (query @ key.mT / 2).masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ value).float()


# Each makes a rule, and functions that change what it reads. ---------------------------------------------------------


def a_global():
    def rebind(r):
        globals()["number"] = r.randint(2, 9)

    return lambda b, h, i, j: (i + j) % number != 0, [rebind]


def a_global_function():
    def redefine(r):
        n = r.randint(2, 9)
        namespace = {"__builtins__": __builtins__, "n": n}
        globals()["helper"] = r.choice([lambda x: x % n, lambda x: (x // 2) % n, eval("lambda x: x % n", namespace)])

    def rebind(r):
        globals()["number"] = r.randint(2, 9)

    return lambda b, h, i, j: helper(i * 3 + j) != 0, [redefine, rebind]


def a_cell():
    n = 3

    def rule(b, h, i, j):
        return (i * j) % n != 0

    def rebind(r):
        nonlocal n
        n = r.choice([2, 3, 2.5, True, 7, Odd(3)])

    return rule, [rebind]


def its_own_integers():
    n = Odd(3)

    def change(r):
        Odd.modulus = r.randint(2, 5)

    return lambda b, h, i, j: (i + j) % n != 0, [change]


def a_tensor():
    local = table.clone()

    def write(r):
        local[r.randrange(L)] ^= True

    def other(r):
        local.data = torch.rand(L) < 0.5

    return lambda b, h, i, j: local[i] | local[j], [write, other]


def a_tensor_rebound():
    local = table.clone()

    def rebind(r):
        nonlocal local
        local = (torch.rand(L) * r.choice([2.0, 3.0])).to(r.choice([torch.float32, torch.float64, torch.int64])) > 0.5

    return lambda b, h, i, j: local[j] & (i >= 0), [rebind]


def an_array():
    def write(r):
        array[r.randrange(L)] = r.randrange(3)

    return lambda b, h, i, j: torch.from_numpy(array)[i] == torch.from_numpy(array)[j], [write]


def a_list():
    def write(r):
        listed[0] = r.randint(2, 9)

    return lambda b, h, i, j: (i + j) % listed[0] != 0, [write]


def a_method():
    holder = Holder()

    def write(r):
        holder.number = r.randint(2, 9)

    return holder.rule, [write]


def an_object():
    holder = Holder()

    def write(r):
        holder.table[r.randrange(L)] ^= True

    return holder, [write]


def an_attribute():
    holder = Holder()

    def write(r):
        holder.number = r.randint(2, 9)

    return lambda b, h, i, j: (i + j) % holder.number != 0, [write]


def a_partial():
    def rule(b, h, i, j, own):
        return own[i] | own[j]

    local = table.clone()

    def write(r):
        local[r.randrange(L)] ^= True

    return functools.partial(rule, own=local), [write]


def a_default():
    def rule(b, h, i, j, n=3, *, own=table.clone()):  # noqa: B008
        return ((i + j) % n != 0) | own[j]

    def replace(r):
        rule.__defaults__ = (r.randint(2, 9),)

    def write(r):
        rule.__kwdefaults__["own"][r.randrange(L)] ^= True

    def other(r):
        rule.__kwdefaults__ = {"own": torch.rand(L) < 0.5}

    return rule, [replace, write, other]


def its_code():
    def rule(b, h, i, j):
        return (i + j) % 3 != 0

    def replace(r):
        rule.__code__ = r.choice(
            [(lambda b, h, i, j: (i + j) % 2 != 0).__code__, (lambda b, h, i, j: (i * j) % 5 != 0).__code__]
        )

    return rule, [replace]


def executed():
    namespace = {"n": 3}
    exec("def rule(b, h, i, j):\n    return (i + j) % n != 0", namespace)

    def rebind(r):
        namespace["n"] = r.randint(2, 9)

    return namespace["rule"], [rebind]


def of_a_namespace():
    class Own(dict):
        n = 3

        def __missing__(self, key):
            if key == "n":
                return Own.n
            raise KeyError(key)

    rule = types.FunctionType((lambda b, h, i, j: (i + j) % n != 0).__code__, Own())  # noqa: F821

    def change(r):
        Own.n = r.randint(2, 9)

    return rule, [change]


def nested():
    n = 3

    def rule(b, h, i, j):
        def inner(x):
            return x % n

        return inner(i + j) != 0

    def rebind(r):
        nonlocal n
        n = r.randint(2, 9)

    return rule, [rebind]


def calling():
    n = 3

    def inner(x):
        return x % n

    def rule(b, h, i, j):
        return inner(i + j) != 0

    def rebind(r):
        nonlocal n
        n = r.randint(2, 9)

    def other(r):
        nonlocal inner
        m = r.randint(2, 9)
        inner = r.choice([lambda x: (x * m) % n, lambda x: x % m])

    def replace(r):
        if inner.__code__.co_freevars == ("n",):
            inner.__code__ = (lambda x: (x + 1) % n).__code__

    return rule, [rebind, other, replace]


def a_module():
    own = types.ModuleType("own")
    own.n = 3

    def change(r):
        own.n = r.randint(2, 9)

    return lambda b, h, i, j: (i + j) % own.n != 0, [change]


def a_setting():
    def change(r):
        torch.set_default_dtype(r.choice([torch.float32, torch.float64, torch.bfloat16]))

    return lambda b, h, i, j: (((i * 100 + j) / 3) * 3 == i * 100 + j) | (i == j), [change]


def in_a_comprehension():
    n, tables = 3, (table.clone(), ~table)

    def rebind(r):
        nonlocal n, tables
        n, tables = r.randint(2, 9), r.choice([tables[::-1], (tables[0], tables[0])])

    def write(r):
        tables[0][r.randrange(L)] ^= True

    return lambda b, h, i, j: sum([(lambda x: one[x] * n)(j) for one in tables]) > n / 2 + i % 2, [rebind, write]


def in_turn():
    """The same values under other names."""
    one, two, three = table.clone(), ~table, 2
    four = three

    def swap(r):
        nonlocal one, two, four
        one, two, four = two, r.choice([one, two]), r.choice([2, 3])

    return lambda b, h, i, j: one[i] & two[j] | ((i + j) % three != i % four), [swap]


def of_torch():
    join = torch.maximum

    def other(r):
        nonlocal join
        join = r.choice([torch.maximum, torch.minimum, torch.add, max])

    return lambda b, h, i, j: (i % 2 if join is max else join(i, j) % 3) != 0, [other]


def bound_later():
    def bind(r):
        globals()["later"] = r.randint(2, 9)

    def unbind(r):
        globals().pop("later", None)

    def rule(b, h, i, j):
        try:
            return (i + j) % later != 0
        except NameError:
            return i >= j

    return rule, [bind, unbind]


def imported_inside():
    sys.modules["clearhead_of_a_test"] = own = types.ModuleType("clearhead_of_a_test")
    own.n = 3

    def change(r):
        own.n = r.randint(2, 9)

    def rule(b, h, i, j):
        import clearhead_of_a_test as of_a_test

        return (i + j) % of_a_test.n != 0

    return rule, [change]


def by_text():
    def rebind(r):
        globals()["number"] = r.randint(2, 9)

    return lambda b, h, i, j: (i + j) % globals()["number"] != 0, [rebind]


def an_attribute_of_a_tensor():
    own = torch.zeros(L)
    own.count = 3

    def replace(r):
        own.count = r.randint(2, 9)

    return lambda b, h, i, j: (i + j) % own.count != 0, [replace]


def deep_tuples():
    local = table.clone()
    deep = functools.reduce(lambda inner, _: (inner,), range(12), local)

    def rule(b, h, i, j):
        found = deep
        while isinstance(found, tuple):
            (found,) = found
        return found[i] | found[j]

    def write(r):
        local[r.randrange(L)] ^= True

    return rule, [write]


def compiled():
    n = 3

    def inner(b, h, i, j):
        return (i + j) % n != 0

    def rebind(r):
        nonlocal n
        n = r.randint(2, 9)

    return torch.compile(inner, backend="eager"), [rebind]


WAYS = [
    a_global, a_global_function, a_cell, its_own_integers, a_tensor, a_tensor_rebound, an_array, a_list,
    a_method, an_object, an_attribute, a_partial, a_default, its_code, executed, of_a_namespace, nested, calling,
    a_module, a_setting, compiled, in_a_comprehension, in_turn, of_torch, bound_later, imported_inside, by_text,
    an_attribute_of_a_tensor, deep_tuples,
]  # fmt: skip


@pytest.fixture(autouse=True)
def as_it_was():
    kept = dict(globals())
    own = torch.get_default_dtype()
    yield
    torch.set_default_dtype(own)
    globals().pop("later", None)
    globals().update(kept)


@pytest.mark.parametrize("engine", [None, "tiled"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_each_change_is_followed(way, seed, engine):
    r = random.Random(seed)
    torch.manual_seed(seed)
    rule, changes = way()
    joined = seed == 2
    mask = ch.Causal() & ch.MaskFunction(rule) if joined else ch.MaskFunction(rule)
    whole = (lambda b, h, i, j: rule(b, h, i, j) & (j <= i)) if joined else rule
    for _ in range(10):
        torch.testing.assert_close(found(mask, engine), wanted(whole))
        if r.random() < 0.8:
            r.choice(changes)(r)


@pytest.mark.parametrize("seed", range(4))
def test_a_change_between_a_forward_and_a_backward_pass(seed):
    """What the backward pass, or lazy weights, find of another state is not kept for the one before."""
    n = 3
    mask = ch.MaskFunction(lambda b, h, i, j: (i + j) % n != 0)
    x = X[0].clone().requires_grad_()
    for engine in ("tiled", "native"):
        for turn in range(4):
            n = 3
            lazy = ch.weights(x.detach(), X[1], mask=mask)
            output = ch.attention(x, X[1], X[2], mask=mask, engine=engine)
            n = 4 + turn
            lazy[0, 0, 3]
            output.sum().backward()
            n = 3
            torch.testing.assert_close(found(mask, "native"), wanted(mask.fn))


def test_a_change_before_a_transform():
    n = 3
    mask = ch.MaskFunction(lambda b, h, i, j: (i + j) % n != 0)
    found(mask, None)
    n = 4
    got = torch.func.jvp(lambda query: ch.attention(query, X[1], X[2], mask=mask), (X[0],), (X[0],))[0]
    torch.testing.assert_close(got, wanted(mask.fn))
    torch.testing.assert_close(found(mask, "native"), wanted(mask.fn))


KEPT = {
    "numbers": lambda b, h, i, j: (i // 8 * 7 + j // 8 * 3) % 4 == 0,
    "a tensor": lambda b, h, i, j: table[i] | table[j],
    "a global number": lambda b, h, i, j: (i + j) % number != 0,
    "a nested lambda": lambda b, h, i, j: (lambda x: x % number)(i + j) != 0,
    "a generator": lambda b, h, i, j: next(x for x in (i > j,)),
    "torch's": lambda b, h, i, j: torch.where(i > j, i, j).remainder(3) != 0,
    "methods": lambda b, h, i, j: ((i - j).abs().clamp(max=9) < 5).logical_or(j == 0),
    "a choice": lambda b, h, i, j: (i >= j) if number > 3 else (i <= j),
}
NOT_KEPT = {
    "random": (lambda b, h, i, j: torch.rand(i.shape) + j > 0.5, "(rand)"),
    "random by another name": (lambda b, h, i, j: draw(i.shape) + j > 0.5, "(rand)"),
    "a sample": (lambda b, h, i, j: torch.zeros(i.shape).geometric_(0.5) > 1 + j, "(geometric_)"),
    "a gradient": (lambda b, h, i, j: i - j > (0 if table.grad is None else table.grad), "(grad)"),
    "the time": (lambda b, h, i, j: (i + j) % (int(time.time()) % 2 + 2) != 0, "time, a module"),
    "random of Python's": (lambda b, h, i, j: (i + j) % random.randint(2, 3) != 0, "(randint)"),
    "an array": (lambda b, h, i, j: (i + j) % int(array[0] + 2) == 0, "array, a ndarray"),
    "a list": (lambda b, h, i, j: (i + j) % listed[0] != 0, "listed, a list"),
    "a function": (lambda b, h, i, j: helper(i + j) != 0, "helper, a function"),
    "a nested one": (lambda b, h, i, j: (lambda x: helper(x))(i + j) != 0, "helper, a function"),
    "a method that draws": (lambda b, h, i, j: ((i + j) % 2 / 2).bernoulli() > 0, "(bernoulli)"),
    "a method": (Holder().rule, "is a method"),
    "a partial": (functools.partial(lambda b, h, i, j, n: (i + j) % n != 0, n=3), "is a partial"),
    "of C": (torch.eq, "is a builtin_function_or_method"),
    "an object": (Holder(), "is a Holder"),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_rule_whose_code_says_what_it_reads_is_asked_once(name, monkeypatch):
    mask = ch.MaskFunction(KEPT[name])
    first = found(mask, "native")
    monkeypatch.setattr("clearhead.masks.mask_function.ask", None)  # asked again, it would fail
    assert torch.equal(found(mask, "native"), first)
    assert ch.plan(*X, mask=mask).notes == []


@pytest.mark.parametrize("name", NOT_KEPT)
def test_what_is_not_known_is_said(name):
    rule, word = NOT_KEPT[name]
    assert word in FunctionReads(rule).unknown
    if name != "of C":
        (note,) = ch.plan(*X, mask=~ch.MaskFunction(rule)).notes
        assert word in note and "reads=" in note
    if name not in ("of C", "an object"):
        assert ch.plan(*X, mask=ch.MaskFunction(rule, reads=())).notes == []


def test_a_zero_changes_its_sign():
    zeros = torch.zeros(L)
    mask = ch.MaskFunction(lambda b, h, i, j: (1 / zeros[j] > 0) | (i == j))
    for _ in range(3):
        torch.testing.assert_close(found(mask, "native"), wanted(mask.fn))
        zeros.neg_()


def test_rules_that_compare_objects():
    def made():
        return lambda x: x

    one, other, big = made(), made(), 10**6
    same, number = one, big
    by_function = ch.MaskFunction(lambda b, h, i, j: i >= j if one == same else i <= j)
    by_number = ch.MaskFunction(lambda b, h, i, j: i >= j if big is number else i <= j)
    for mask in (by_function, by_number):
        torch.testing.assert_close(found(mask, "native"), wanted(mask.fn))
    same, number = other, int("1000000")
    for mask in (by_function, by_number):
        torch.testing.assert_close(found(mask, "native"), wanted(mask.fn))


@pytest.mark.parametrize("engine", ["native", "tiled", "sdpa"])
def test_a_write_is_noticed_in_an_equal_tensor_that_took_the_place_of_the_first(engine):
    read = table.clone()
    mask = ch.MaskFunction(lambda b, h, i, j: read[j] | (i == j))
    found(mask, engine)
    read = read.clone()
    x = X[0].clone().requires_grad_()
    output = ch.attention(x, X[1], X[2], mask=mask, engine=engine)
    read.logical_not_()
    with pytest.raises(ch.ClearheadError, match="modified"):
        output.sum().backward()
