"""A mask whose tensors its owner writes to, or replaces: what it says now holds, and no other mask changes."""

import copy
import pickle

import pytest
import torch

import clearhead as ch
from clearhead.masks import Intervals
from clearhead.problem import visible

ROWS = torch.arange(20).view(2, 10)
# a mask, the name of its tensor, and what is written to that
WRITTEN = {
    "Lengths": (lambda: ch.Lengths([3, 5]), "valid_lens", torch.tensor([8, 2])),
    "Lengths of queries": (lambda: ch.Lengths(ROWS // 2), "valid_lens", ROWS.flip(1) // 2),
    "Padding": (lambda: ch.Padding(ROWS % 3 > 0), "keep", ROWS % 4 > 1),
    "Padding without holes": (lambda: ch.Padding(ROWS < 16), "keep", ROWS % 4 > 1),
    "Documents": (lambda: ch.Documents(ROWS // 4), "ids", ROWS // 7),
    "Documents, then apart": (lambda: ch.Documents(ROWS // 4), "ids", ROWS % 3),
    "Documents apart": (lambda: ch.Documents(ROWS % 3), "ids", ROWS // 7),
    "Documents by lengths": (lambda: ch.Documents.from_lengths([4, 6]), "ids", ROWS[0] // 3),
    "PrefixLM": (lambda: ch.PrefixLM([3, 5]), "lengths", torch.tensor([8, 2])),
    "Intervals": (lambda: Intervals(ROWS[0] // 2, ROWS[0] + 1), "start", ROWS[0]),
    "DenseMask": (lambda: ch.DenseMask(ROWS[0, :, None] > ROWS[0] % 5), "keep", ROWS[0, :, None] < ROWS[0] % 7),
}


@pytest.fixture(params=WRITTEN)
def written(request):
    visible._plain.clear()
    return WRITTEN[request.param]


def dense(mask):
    """By the rules themselves, in a mask that was never used."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 10, 4)
    return ch.attention(x, x, x, mask=mask), ch.attention(x, x, x, mask=copy.deepcopy(mask), engine="reference")


def renewed(mask, name, numbers, how):
    if how == "written":
        getattr(mask, name).copy_(numbers)
    elif how == "in inference mode":
        with torch.inference_mode():
            getattr(mask, name).copy_(numbers)
    else:
        setattr(mask, name, numbers.clone())


@pytest.mark.parametrize("how", ["written", "in inference mode", "replaced"])
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize(
    "join", [lambda m: m, lambda m: m & ch.SlidingWindow(before=5, after=5), lambda m: m | ch.DenseMask(ROWS[0] < 3)]
)
def test_what_it_says_now_holds(written, used, how, join):
    make, name, numbers = written
    mask = make()
    joined = join(mask)
    if used:
        dense(joined)
        dense(joined)  # a dense mask is kept from its second use on
    before = dense(join(make()))[1]
    renewed(mask, name, numbers, how)
    got, want = dense(joined)
    torch.testing.assert_close(got, want)
    assert not torch.equal(want, before), "the case writes nothing new"


@pytest.mark.parametrize("how", ["written", "replaced"])
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_another_mask_of_the_same_numbers_is_as_before(written, used, how):
    make, name, numbers = written
    want = dense(make())[1]
    visible._plain.clear()
    mask = make()
    if used:
        dense(mask)
    renewed(mask, name, numbers, how)
    dense(mask)
    torch.testing.assert_close(dense(make())[0], want)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask))])
def test_a_copy_that_is_written_to_leaves_the_mask_alone(written, copied):
    make, name, numbers = written
    mask = make()
    want = dense(mask)[1]
    other = copied(mask)
    renewed(other, name, numbers, "written")
    torch.testing.assert_close(*dense(other))
    torch.testing.assert_close(dense(mask)[0], want)


def test_made_in_inference_mode(written):
    make, name, numbers = written
    with torch.inference_mode():
        mask = make()
        dense(mask)
        renewed(mask, name, numbers, "written")
        torch.testing.assert_close(*dense(mask))


@pytest.mark.parametrize("engine", ["native", "sdpa", "tiled"])
def test_written_to_before_the_backward_pass(written, engine):
    """The gradients are those of what the forward pass saw, or an error says that they are lost."""
    make, name, numbers = written
    torch.manual_seed(0)
    x = torch.randn(2, 3, 10, 4, requires_grad=True)
    want = torch.autograd.grad(ch.attention(x, x, x, mask=make(), engine="reference").square().sum(), x)[0]
    mask = make()
    loss = ch.attention(x, x, x, mask=mask, engine=engine).square().sum()
    renewed(mask, name, numbers, "written")
    try:
        got = torch.autograd.grad(loss, x)[0]
    except ch.ClearheadError as lost:
        assert "was modified in place after the forward pass" in str(lost)
    else:
        torch.testing.assert_close(got, want)


def test_a_digest_reads_a_large_mask_in_parts():
    """A shift of the whole mask would make another tensor of its size, which took most of the time."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from clearhead.base.torch_state.versions import digest

    largest = 0

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            for one in found if isinstance(found, list | tuple) else [found]:
                if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() != memory:
                    largest = max(largest, one.nbytes)
            return found

    mask = torch.randn(1024, 1024)
    memory = mask.untyped_storage().data_ptr()
    with Made():
        before = digest(mask)
    assert largest <= mask.nbytes / 8
    mask.data[1000, [1, 2]] = mask.data[1000, [2, 1]]
    assert digest(mask) != before


def test_a_digest_changes_with_the_signs_of_an_even_number_of_numbers():
    from clearhead.base.torch_state.versions import digest

    bias = torch.randn(2, 2, 5, 8)
    assert digest(bias) != digest(bias.where(torch.arange(8) % 2 == 0, -bias))
