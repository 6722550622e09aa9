"""An engine: it computes some problems, and gives its objections to the others."""

import math

import torch

from clearhead.extend import Cost, Engine, Partial


class Einsum(Engine):
    """Dot products by two calls of einsum, every pair at once.

    Its gradients are autograd's, which follows these operations. An engine with a kernel of its own has a `backward`:
    see `clearhead.extend.Engine`.
    """

    name = "einsum"

    def objections(self, problem):
        found = []
        if problem.value is None:
            found.append("it does not give the weights")
        if problem.lowered is None or problem.lowered.phi != "mul":
            found.append("the score is no dot product")
        elif problem.lowered.softcap is not None or problem.sinks is not None:
            found.append("it has no softcap and no sinks")
        if problem.bias is not None or problem.dropout_p:
            found.append("it has no bias and no dropout")
        return found

    def forward(self, problem, rows=False):
        lowered, every = problem.lowered, slice(None)
        query = lowered.query if lowered.weight is None else lowered.query * lowered.weight
        key, value = (t.repeat_interleave(problem.groups, dim=1) for t in (lowered.key, problem.value))
        scores = torch.einsum("bhid,bhjd->bhij", query, key) * lowered.scale
        if problem.spans is not None:
            keep = problem.spans.keep(every, every, every, every, problem.sizes.keys)
            scores = scores.masked_fill(~keep, -torch.inf)
        blind = scores.amax(-1, keepdim=True) == -torch.inf
        weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
        return Partial(torch.einsum("bhij,bhjd->bhid", weights, value))

    def cost(self, problem):
        pairs = math.prod(problem.sizes.shape)
        return Cost(pairs, 2 * pairs * problem.query.element_size())
