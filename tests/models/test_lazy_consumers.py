"""Code that was written for eager attentions, run on lazy ones: the same numbers, and what each made dense."""

import copy
import io
import os
import pickle
import warnings

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.models.lazy_matrices.lazy_attention import DENSE

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
trainer = pytest.importorskip("transformers.trainer_pt_utils")

LAYERS, HEADS, LENGTH = 6, 12, 11
ROW, HEAD, ONE, ALL = LENGTH, LENGTH**2, HEADS * LENGTH**2, LAYERS * HEADS * LENGTH**2


@pytest.fixture(scope="module")
def both():
    """The attentions of the bundled BERT for one sentence, on eager and lazy: tuples of (1, 12, 11, 11)."""
    make = lambda **options: transformers.AutoModel.from_pretrained(ch.models.bundled(), **options).eval()
    ids = torch.tensor([[101, 1996, 10216, 1999, 5041, 2395, 2001, 2701, 1012, 2307, 102]])
    fast, slow = make(), make(attn_implementation="eager")
    with torch.no_grad(), ch.models.lazy_attentions(fast):
        lazy = fast(ids, output_attentions=True).attentions
    with torch.no_grad():
        eager = slow(ids, output_attentions=True).attentions
    assert len(lazy) == LAYERS and all(isinstance(one, ch.models.LazyAttention) for one in lazy)
    assert lazy[0].shape == (1, HEADS, LENGTH, LENGTH)
    return eager, lazy


def bertviz(attentions):
    """What its head view and model view read."""
    return torch.stack([layer.squeeze(0) for layer in attentions]).tolist()


def bertviz_some(attentions):
    chosen = [attentions[i] for i in (1, 2)]
    return torch.stack([layer.squeeze(0)[[0, 3]] for layer in chosen]).tolist()


def rollout(attentions):
    """Abnar and Zuidema 2020."""
    joined = torch.stack(attentions).mean(2) + torch.eye(LENGTH)
    joined = joined / joined.sum(-1, keepdim=True)
    rolled = joined[0]
    for layer in joined[1:]:
        rolled = layer @ rolled
    return rolled


def rollout_of_images(attentions):
    """With the largest head, and the least weights dropped."""
    rolled = torch.eye(attentions[0].size(-1))
    for attention in attentions:
        fused = attention.max(axis=1)[0]
        flat = fused.view(fused.size(0), -1)
        _, least = flat.topk(int(flat.size(-1) * 0.5), -1, False)
        flat[0, least[least != 0]] = 0
        a = (fused + 1.0 * torch.eye(fused.size(-1))) / 2
        rolled = torch.matmul(a / a.sum(dim=-1), rolled)
    return rolled


def rollout_in_numpy(attentions):
    found = np.asarray([a.detach().cpu().numpy() for a in attentions])
    return np.sum(found.squeeze(), axis=1)


def contacts(attentions):
    """The contact head of ESM: symmetrised, average product corrected."""
    a = torch.stack(attentions, dim=1)[..., 1:-1, 1:-1].flatten(1, 2)
    a = a + a.transpose(-1, -2)
    return a - a.sum(-1, keepdim=True) * a.sum(-2, keepdim=True) / a.sum((-1, -2), keepdim=True)


def entropies(attentions):
    return torch.stack([-(a * torch.log(a + 1e-9)).sum(-1) for a in attentions])


def by_head(attentions):
    return [[head.mean().item() for head in layer[0]] for layer in attentions]


def saved(attentions):
    file = io.BytesIO()
    torch.save(attentions, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assigned(attentions):
    buffer = torch.zeros(LAYERS, *attentions[0].shape)
    for i, layer in enumerate(attentions):
        buffer[i] = layer
    return buffer


def savez(attentions):
    file = io.BytesIO()
    np.savez(file, *attentions)
    file.seek(0)
    return list(np.load(file).values())


def array(attentions):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy's, for every tensor
        return np.array(attentions[0])


def vmapped(attentions):
    return torch.vmap(lambda one: one.sum(0))(attentions[0])


def below(attentions):
    """By operations that ask no tensor subclass first."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.stack([attentions[0], attentions[1]]).sum(2), attentions[0].transpose(2, 3)


VALUE = torch.randn(1, HEADS, LENGTH, 4, generator=torch.Generator().manual_seed(0))
SHARED = torch.randn(1, 1, LENGTH, 4, generator=torch.Generator().manual_seed(0))

# what it does, how many times something was made dense, and how many numbers in all
CONSUMERS = {
    "BertViz": (bertviz, LAYERS, ALL),
    "BertViz, some heads": (bertviz_some, 2, 2 * ONE),
    "rollout": (rollout, LAYERS, ALL),
    "rollout of images": (rollout_of_images, LAYERS, ALL),
    "rollout in NumPy": (rollout_in_numpy, LAYERS, ALL),
    "contacts": (contacts, LAYERS, ALL),
    "entropies": (entropies, 2 * LAYERS, 2 * ALL),  # each of two operations is given a copy
    "by head": (by_head, LAYERS * HEADS, ALL),
    "save and load": (saved, LAYERS, ALL),
    "assigned": (assigned, LAYERS, ALL),
    "savez": (savez, LAYERS, ALL),
    "vmap": (vmapped, 1, ONE),
    "below": (below, 3, 3 * ONE),
    "stack": (lambda A: torch.stack(A), LAYERS, ALL),
    "cat": (lambda A: torch.cat(A, dim=0), LAYERS, ALL),
    "cat of means": (lambda A: torch.cat([a.mean(1) for a in A]), LAYERS, ALL),
    "mean": (lambda A: A[0].mean(1), 1, ONE),
    "torch.mean": (lambda A: torch.mean(A[0], dim=1), 1, ONE),
    "a sequence, then its mean": (lambda A: A[0][0].mean(0), 1, ONE),
    "a head": (lambda A: A[0][:, 3] + 0, 1, HEAD),
    "a head of a sequence": (lambda A: A[0][0, -1].sum(-1), 1, HEAD),
    "some heads": (lambda A: A[0][:, 2:8:2].sum(), 1, 3 * HEAD),
    "a head, then a row": (lambda A: A[0][0][3][5], 1, ROW),
    "a row": (lambda A: A[-1][0, 3, 5], 1, ROW),
    "one weight": (lambda A: A[-1][0, 3, 5, -1].item(), 1, 1),
    "to the first token": (lambda A: A[-1][:, :, 0, 1:], 1, HEADS * (LENGTH - 1)),
    "ellipsis": (lambda A: A[-1][..., 2], 1, HEADS * LENGTH),
    "heads by a list": (lambda A: A[-1][:, [0, 3]], 1, ONE),
    "heads by a tensor": (lambda A: A[-1][:, torch.tensor([1, 2])], 1, ONE),
    "None": (lambda A: A[0][None], 1, ONE),
    "no heads": (lambda A: A[0][:, 2:2], 1, 0),
    "bool mask": (lambda A: A[0][A[0] > 0.1], 2, 2 * ONE),
    "add": (lambda A: A[0] + torch.eye(LENGTH), 1, ONE),
    "radd": (lambda A: torch.eye(LENGTH) + A[0], 1, ONE),
    "rmul": (lambda A: 2 * A[0], 1, ONE),
    "from one": (lambda A: 1 - A[0], 1, ONE),
    "by itself": (lambda A: A[0] * A[0], 1, ONE),
    "matrix product": (lambda A: A[0] @ A[1], 2, 2 * ONE),
    "product with a value": (lambda A: A[0] @ VALUE, 0, 0),
    "torch.matmul": (lambda A: torch.matmul(A[0], SHARED), 0, 0),
    "product with a matrix": (lambda A: A[0].matmul(VALUE[0, 0]), 1, ONE),
    "matrix times it": (lambda A: torch.eye(LENGTH) @ A[0], 1, ONE),
    "einsum": (lambda A: torch.einsum("bhqk,bhke->bqe", A[0], VALUE), 1, ONE),
    "numpy": (lambda A: A[0].numpy(), 1, ONE),
    "numpy, forced": (lambda A: A[0].numpy(force=True), 1, ONE),
    "np.array": (array, 1, ONE),
    "np.stack": (lambda A: np.stack(A), LAYERS, ALL),
    "np.asarray": (lambda A: np.asarray(A[0]).mean(1), 1, ONE),
    "dlpack": (lambda A: np.from_dlpack(A[0]).sum(), 1, ONE),
    "tolist": (lambda A: A[0].tolist(), 1, ONE),
    "squeeze": (lambda A: A[0].squeeze(0)[2, 1], 1, ROW),
    "squeeze all": (lambda A: torch.squeeze(A[0]), 1, ONE),
    "permute": (lambda A: A[0].permute(0, 2, 3, 1), 1, ONE),
    "mT": (lambda A: A[0].mT, 1, ONE),
    "T": (lambda A: A[0][0, 0].T, 1, HEAD),
    "view": (lambda A: A[0].view(1, -1), 1, ONE),
    "sum": (lambda A: A[0].sum().item(), 1, ONE),
    "argmax": (lambda A: A[0].argmax(-1), 1, ONE),
    "topk": (lambda A: A[0].topk(3), 1, ONE),
    "largest": (lambda A: A[0].max(dim=1).values, 1, ONE),
    "shape, dtype, device": (lambda A: [tuple(A[0].shape), A[0].ndim, A[0].size(1), str(A[0].dtype), len(A[0])], 0, 0),
    "what it is": (
        lambda A: [A[0].is_cuda, A[0].requires_grad, A[0].is_contiguous(), A[0].numel(), A[0].stride()],
        0,
        0,
    ),
    "set": (lambda A: len(set(A)), 0, 0),
    "zeros_like": (lambda A: torch.zeros_like(A[0]), 0, 0),
    "new_zeros": (lambda A: A[0].new_zeros(3), 0, 0),
    "stays lazy": (lambda A: A[0].to("cpu").float().contiguous().cpu().detach().data[0, 0, 0], 1, ROW),
    "float64": (lambda A: A[0].double()[0, 0, 0], 1, ROW * 2),  # counted in float32
    "bfloat16": (lambda A: A[0].to(torch.bfloat16)[0, 0, 0, :4].float() * 0, 1, 2),
    "integers": (lambda A: (A[0] * 3).long() + A[0].to(torch.int64), 2, 2 * ONE),
    "clone": (lambda A: A[0].clone().mul_(2), 1, ONE),
    "unsqueeze": (lambda A: A[0].unsqueeze(0), 1, ONE),
    "unbind": (lambda A: [one.sum() for one in A[0].unbind(1)], 1, ONE),
    "for": (lambda A: [one.sum() for one in A[0]], 1, ONE),
    "split": (lambda A: A[0].split(4, 1)[0], 1, ONE),
    "entr": (lambda A: torch.special.entr(A[0]).sum(-1), 1, ONE),
    "masked_fill": (lambda A: A[0].masked_fill(A[0] < 0.1, 0), 2, 2 * ONE),
    "where": (lambda A: torch.where(A[0] > 0.1, A[0], 0.0), 2, 2 * ONE),
    "allclose": (lambda A: torch.allclose(A[0].sum(-1), torch.ones(1)), 1, ONE),
    "interpolate": (lambda A: torch.nn.functional.interpolate(A[0], scale_factor=2), 1, ONE),
    "a module": (lambda A: torch.nn.Softmax(-1)(A[0]), 1, ONE),
    "a parameter's module": (lambda A: torch.nn.Linear(LENGTH, 2)(A[0]).shape, 1, ONE),
    "flip": (lambda A: A[0].flip(-1), 1, ONE),
    "gather": (lambda A: A[0].gather(-1, torch.zeros(A[0].shape, dtype=torch.long)), 1, ONE),
    "out": (lambda A: torch.add(A[0], 1, out=torch.empty(A[0].shape)), 1, ONE),
    "copy": (lambda A: torch.empty(A[0].shape).copy_(A[0]), 1, ONE),
    "isinstance": (lambda A: [isinstance(A[0], torch.Tensor), torch.is_tensor(A[0])], 0, 0),
    "repr": (lambda A: len(repr(A[0])) > 0 and len(f"{A[0]}") > 0 and f"{A[0][0, 0, 0, 0]:.3f}", None, None),
    "pickle": (lambda A: pickle.loads(pickle.dumps(A[0])), 1, ONE),
    "deepcopy": (lambda A: copy.deepcopy(A[0]), 1, ONE),
    "pytree": (lambda A: torch.utils._pytree.tree_map(lambda t: t.sum(), A), LAYERS, ALL),
    "trainer, detached": (lambda A: trainer.nested_detach(A)[0].sum(), 1, ONE),
    "trainer, in NumPy": (lambda A: trainer.nested_numpify(A), LAYERS, ALL),
    "trainer, joined": (lambda A: trainer.nested_concat(A, A), 2 * LAYERS, 2 * ALL),
    "data loader": (lambda A: torch.utils.data.default_collate([A[0][0], A[1][0]]), 2, 2 * ONE),
}


def check_same(got, want):
    assert type(got) is type(want) or isinstance(want, np.ndarray | np.generic), (type(got), type(want))
    if isinstance(want, list | tuple):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            check_same(one, other)
    elif isinstance(want, torch.Tensor | np.ndarray | np.generic | float):
        torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want), atol=3e-6, rtol=3e-6)
    else:
        assert got == want


@pytest.mark.parametrize("name", CONSUMERS)
def test_consumers(both, name):
    consume, made, numbers = CONSUMERS[name]
    eager, lazy = both
    torch.manual_seed(0)
    want = consume(tuple(one.clone() for one in eager))
    before = DENSE.made, DENSE.bytes
    torch.manual_seed(0)
    got = consume(lazy)
    check_same(got, want)
    if made is not None:
        assert (DENSE.made - before[0], DENSE.bytes - before[1]) == (made, 4 * numbers)
