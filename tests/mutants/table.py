"""The planted faults: each one substitution in one file of `src/clearhead`, and the tests that should find it."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """`old` stands exactly once in `file`, and `new` takes its place; `breaks`: what is wrong then; `tests`: of pytest,
    below `tests/`, with commas between."""

    file: str
    old: str
    new: str
    breaks: str
    tests: str


CONTRACT = "test_contract.py::test_mask,test_contract.py::test_score,test_contract.py::test_bias"
WHOLE = "test_contract.py::test_many_small_blocks,test_contract.py::test_engine_in_many_small_blocks"
INTERPRETED = "test_triton.py::test_a_sample_of_the_kernels"
PAGE = "report/test_report_formulas.py,report/test_report_weights.py"
STEPS = (
    "explanation/test_steps.py,explanation/test_bias_steps.py,explanation/test_modules.py,explanation/test_pictures.py"
)

MASKS = [
    Mutant(
        "masks/causal.py",
        "torch.arange(1, sizes.queries + 1,",
        "torch.arange(0, sizes.queries,",
        "a query does not see its own key",
        "test_masks.py",
    ),
    Mutant(
        "masks/sliding_window.py",
        "(own + after + 1).clamp(",
        "(own + after).clamp(",
        "the window ends one key early",
        "test_masks.py",
    ),
    Mutant(
        "masks/sliding_window.py",
        "Spans((own - before).clamp(",
        "Spans((own - before - 1).clamp(",
        "the window begins one key early",
        "test_masks.py",
    ),
    Mutant(
        "masks/prefix_lm.py",
        "stop = torch.maximum(own,",
        "stop = torch.minimum(own,",
        "a prefix hides keys in place of showing them",
        "test_masks.py",
    ),
    Mutant(
        "masks/lengths.py",
        "elif (longest or 0) > sizes.keys:",
        "elif (longest or 0) > sizes.keys + 1:",
        "a length one above the number of keys is taken",
        "test_masks.py,test_errors.py",
    ),
    Mutant(
        "masks/padding.py",
        "keep.shape[1] - keep.flip(-1)",
        "keep.shape[1] - 1 - keep.flip(-1)",
        "the last word counts as padding",
        "test_masks.py",
    ),
    Mutant("masks/padding.py", "if not hull.holes:", "if True:", "padding inside a sequence is seen", "test_masks.py"),
    Mutant(
        "masks/documents.py",
        "        if extents.together:\n",
        "        if True:\n",
        "documents that are interleaved see each other",
        "test_masks.py",
    ),
    Mutant(
        "masks/documents.py",
        "for t in (ids, first, last + 1))",
        "for t in (ids, first, last))",
        "the last key of each document is not seen",
        "test_masks.py",
    ),
    Mutant(
        "masks/base.py",
        "torch.minimum(a.stop, b.stop), residual, reads)",
        "torch.maximum(a.stop, b.stop), residual, reads)",
        "& ends where the later of two masks does",
        "test_masks.py",
    ),
    Mutant(
        "masks/base.py",
        "one(*slices) & two(*slices)",
        "one(*slices)",
        "& of two masks with residuals forgets the second",
        "test_masks.py",
    ),
    Mutant(
        "masks/base.py",
        "_either(a, b, sizes, torch.Tensor.__or__), reads=reads)",
        "_either(a, b, sizes, torch.Tensor.__and__), reads=reads)",
        "| of masks with residuals is &",
        "test_masks.py",
    ),
    Mutant(
        "masks/base.py",
        "joined(lambda *sides: ~pairs(*sides),",
        "joined(lambda *sides: pairs(*sides),",
        "~ of a mask with a residual is the mask",
        "test_masks.py",
    ),
    Mutant(
        "masks/_spans.py",
        "count = a.shape[-1] + c.shape[-1] - 1",
        "count = max(a.shape[-1] + c.shape[-1] - 2, 1)",
        "the last interval of an intersection is lost",
        "test_masks.py",
    ),
    Mutant(
        "masks/_spans.py",
        "return torch.cat([low, stop], -1), torch.cat([start, high], -1)",
        "return torch.cat([low, stop], -1), torch.cat([start, high - 1], -1)",
        "what ~ leaves ends one key early",
        "test_masks.py",
    ),
]

SCORES = [
    Mutant(
        "scores/dot.py",
        "(1 / math.sqrt(width) if width",
        "(1 / width if width",
        "the scale is 1/E and not 1/√E",
        "test_semantics.py",
    ),
    Mutant(
        "scores/gaussian.py",
        "lower(self, query: Tensor, key: Tensor) -> Pairwise:\n"
        '        return Pairwise("sq_diff", query, key, scale=-1 / (2 * self._width() ** 2))',
        "lower(self, query: Tensor, key: Tensor) -> Pairwise:\n"
        '        return Pairwise("sq_diff", query, key, scale=-1 / (2 * self._width()))',
        "the fused kernels take the bandwidth for its square",
        "test_contract.py::test_settings_of_scores",
    ),
    Mutant(
        "scores/cosine.py",
        'Pairwise("mul", unit(query), unit(key), scale=1 / self.temperature)',
        'Pairwise("mul", unit(query), unit(key), scale=self.temperature)',
        "the fused kernels multiply by the temperature",
        "test_contract.py::test_settings_of_scores",
    ),
    Mutant(
        "scores/cosine.py",
        "torch.where(length > 0, length, torch.ones_like(length))",
        "length",
        "the cosine of a vector of zeros is NaN",
        "test_semantics.py,test_regressions.py,test_borders.py",
    ),
    Mutant(
        "scores/cosine.py",
        "wide = wide / torch.where(largest > 0, largest, torch.ones_like(largest))",
        "wide = wide * 1",
        "the squares of large vectors overflow",
        "test_by_hand.py",
    ),
    Mutant(
        "scores/additive.py",
        'Pairwise("tanh_add", *self.project(query, key), weight=self._vector)',
        'Pairwise("tanh_add", *self.project(query, key), weight=self._vector.abs())',
        "the fused kernels take the weights' sizes for them",
        CONTRACT,
    ),
    Mutant(
        "scores/base.py",
        "softcap * torch.tanh(tile / softcap)",
        "torch.tanh(tile / softcap)",
        "capped scores are between -1 and 1",
        "test_by_hand.py",
    ),
    Mutant(
        "biases/alibi.py",
        "*(place - 0.5 for place in range",
        "*(place for place in range",
        "the slopes of heads beyond a power of two",
        "test_biases.py",
    ),
    Mutant(
        "biases/alibi.py",
        'query_offset(sizes, "ALiBi")).abs()',
        'query_offset(sizes, "ALiBi"))',
        "ALiBi rewards keys after the query",
        "test_biases.py",
    ),
    Mutant(
        "biases/relative.py",
        "return (apart > 0) * half +",
        "return (apart >= 0) * half +",
        "the distance 0 is in a bucket of the keys after it",
        "test_biases.py",
    ),
    Mutant(
        "biases/relative.py",
        "(growth * (buckets - exact)).long()",
        "(growth * (buckets - exact)).round().long()",
        "wide buckets begin half a bucket early",
        "test_biases.py",
    ),
    Mutant(
        "base/dropout.py",
        "out=kept).mul_(1 / (1 - p))",
        "out=kept)",
        "what dropout keeps is not scaled",
        "test_dropout.py",
    ),
    Mutant(
        "base/dropout.py",
        "(seed >> 32).int()",
        "(seed >> 31).int()",
        "PyTorch's engines drop other pairs than the kernels",
        "test_dropout.py",
    ),
]

ENGINES = [
    Mutant(
        "engines/reference.py",
        "tile = torch.where(unseen.all(-1, keepdim=True), 0.0, tile)",
        "tile = tile * 1",
        "gradients of a query that sees nothing are NaN",
        "test_by_hand.py",
    ),
    Mutant(
        "engines/tiled/tiles.py",
        "above.sum(-1).masked_fill(blind, 1.0), blind",
        "above.sum(-1), blind",
        "a query that sees nothing gives NaN in blocks",
        "test_by_hand.py",
    ),
    Mutant(
        "engines/tiled/tiles.py",
        "weights = weights * torch.exp(-F.softplus(above))",
        "weights = weights * 1.0",
        "weights with sinks sum to 1",
        "test_by_hand.py",
    ),
    Mutant(
        "engines/tiled/backward.py",
        "slope = upstream.sub_(delta).mul_(weights)",
        "slope = upstream.mul_(weights)",
        "gradients of scores leave out the softmax's own",
        WHOLE,
    ),
    Mutant(
        "engines/tiled/backward.py",
        "slope.mul_(1 - (capped / lowered.softcap).square_())",
        "slope.mul_(1 - (capped / lowered.softcap).abs_())",
        "the derivative of the softcap",
        WHOLE,
    ),
    Mutant(
        "engines/tiled/backward.py",
        "kept, upstream = weights * factors, upstream.mul_(factors)",
        "kept, upstream = weights * factors, upstream",
        "gradients flow through dropped weights",
        WHOLE,
    ),
    Mutant(
        "engines/tiled/backward.py",
        "first = sizes.queries - region.queries.stop + region.keys.start",
        "first = sizes.queries - region.queries.stop",
        "a relative bias gets its gradient at other distances",
        "test_by_hand.py",
    ),
    Mutant(
        "engines/tiled/backward.py",
        "slope.masked_fill_(weights == 0, 0.0)",
        "pass",
        "a hidden key of NaN gives gradients of NaN",
        "test_by_hand.py",
    ),
    Mutant(
        "engines/tiled/statistics.py",
        'torch.maximum(part, own) if name == "peak" else part + own',
        "part + own",
        "maps of the largest weights add them up",
        "test_by_hand.py",
    ),
    Mutant(
        "engines/tiled/statistics.py",
        "(key.squeeze(-1) + look.start).masked_fill",
        "key.squeeze(-1).masked_fill",
        "the best key of a later block of keys",
        "test_by_hand.py",
    ),
    Mutant(
        "engines/tiled/statistics.py",
        "peaks.clamp(min=least)",
        "peaks",
        "chunks that are used up are taken for masked ones",
        "test_by_hand.py",
    ),
    Mutant(
        "engines/tiled/statistics.py",
        'found["received"] = counted.sum(2)',
        'found["received"] = weights.sum(2)',
        "what a key receives counts padding",
        "inspection/test_statistics.py,models/test_padding.py",
    ),
    Mutant(
        "problem/regions.py",
        " | (stop[1:] != stop[:-1]).any((1, 2))",
        "",
        "sequences of unlike lengths are computed as alike",
        "test_contract.py::test_mask",
    ),
    Mutant(
        "problem/regions.py",
        "joined[-1][1] = max(joined[-1][1], high)",
        "joined[-1][1] = high",
        "a part of the keys is lost where intervals of rows lie in each other",
        "test_by_hand.py",
    ),
    Mutant(
        "problem/partial.py",
        "empty = mine[2] & theirs[2]",
        "empty = mine[2] | theirs[2]",
        "merging with keys that nobody sees forgets the others",
        "test_partial.py",
    ),
    Mutant(
        "problem/partial.py",
        "return -(share * rows.delta).sum((0, 2))",
        "return (share * rows.delta).sum((0, 2))",
        "the sinks' gradient has the wrong sign",
        WHOLE,
    ),
    Mutant(
        "engines/sdpa/pieces.py",
        "elif start[-1] == low and width == 1:",
        "elif start[-1] == low and width <= 2:",
        "where queries see one key after their own, it is hidden in PyTorch's kernel",
        "test_by_hand.py,test_masks.py",
    ),
    Mutant(
        "engines/sdpa/engine.py",
        'problem.visible.unseen == "inside"',
        "False",
        "a hidden key of NaN reaches other rows in PyTorch's kernel",
        "test_semantics.py,test_regressions.py,test_borders.py",
    ),
    Mutant(
        "engines/native/engine.py",
        "        if found.finite:\n            return found\n        guarded",
        "        if True:\n            return found\n        guarded",
        "a hidden key of NaN reaches other rows in the kernels",
        "test_by_hand.py",
    ),
    Mutant(
        "engines/native/engine.py",
        "query=found.query * problem.lowered.weight,",
        "query=found.query,",
        "the query's gradient leaves out the weight of a product",
        "test_by_hand.py",
    ),
    Mutant(
        "engines/native/engine.py",
        "small * _overflow(problem), out=output)",
        "small, out=output)",
        "outputs of values near the largest number are far too small",
        "test_native.py,test_borders.py",
    ),
    Mutant(
        "engines/native/bindings.py",
        "lowered.softcap or 0.0,",
        "0.0,",
        "the kernels have no softcap",
        "test_native.py,test_contract.py::test_engine",
    ),
    Mutant(
        "engines/native/bindings.py",
        "None if problem.sinks is None else _float(problem.sinks),",
        "None,",
        "the kernels have no sinks",
        "test_native.py,test_contract.py::test_engine",
    ),
    Mutant(
        "engines/native/bindings.py",
        "tensor.dtype is torch.float32 and not tensor.is_neg()",
        "tensor.dtype is torch.float32",
        "the kernels read a lazily negated tensor as its positive",
        "test_by_hand.py",
    ),
    Mutant(
        "engines/native/bindings.py",
        "0 if problem.origin is None else problem.origin[2].start",
        "0",
        "a later band of queries drops the pairs of the first",
        "test_native.py,test_dropout.py",
    ),
]

LOOKS = [
    Mutant(
        "inspection/index.py",
        "slices.append(slice(found.start, max(found.stop, found.start), found.step))",
        "slices.append(slice(found.start, max(found.stop, found.start), 1))",
        "a step in an index of weights is left out",
        "inspection/test_weights.py",
    ),
    Mutant(
        "inspection/by_blocks.py",
        "torch.where(better, places + start, where[at])",
        "torch.where(better, places, where[at])",
        "places of largest weights are counted from the beginning of a block",
        "inspection/test_matrix.py",
    ),
    Mutant(
        "inspection/difference.py",
        "after.to(before.device) - before",
        "before - after.to(before.device)",
        "differences have the wrong sign",
        "models/test_differences.py,models/test_compare.py",
    ),
    Mutant(
        "inspection/reductions/entropy.py",
        "return Summary(entropy=True)",
        "return Summary(entropy=True)\n\n    def found(self, found, problem):\n        return found.entropy * 1.01",
        "entropies are a hundredth too large",
        "inspection/test_statistics.py",
    ),
    Mutant(
        "distributed/_merge.py",
        "PartialAttention(functools.reduce(Partial.merge, parts)",
        "PartialAttention(parts[0]",
        "merging over ranks takes the first alone",
        "distributed/test_distributed_decoding.py",
    ),
    Mutant(
        "distributed/by_key.py",
        "shard.channel.gather(peak).amax(0)",
        "shard.channel.gather(peak).sum(0)",
        "the largest weights of ranks are added up",
        "distributed/test_distributed_statistics.py",
    ),
]

MODULES = [
    Mutant(
        "nn/rotary_embedding.py",
        "torch.stack([a * cos - b * sin, b * cos + a * sin], -1)",
        "torch.stack([a * cos - b * sin, b * cos - a * sin], -1)",
        "interleaved pairs are no longer turned",
        "nn/test_nn_positions.py",
    ),
    Mutant(
        "nn/rotary_embedding.py",
        "rows = self._upto(high + length, dtype, x.device)[positions.flatten()]",
        "rows = self._upto(high + length, dtype, x.device)[(positions - positions[:, :1]).flatten()]",
        "sequences at their own positions all stand at 0",
        "nn/test_nn_positions.py",
    ),
    Mutant(
        "nn/sinusoidal_positional_encoding.py",
        "[angles.sin(), angles.cos()]",
        "[angles.cos(), angles.sin()]",
        "sines and cosines change places",
        "nn/test_nn_positions.py",
    ),
    Mutant(
        "nn/key_value_cache.py",
        "chosen.cut(state.lengths[indices.cpu()])",
        "chosen.cut(state.lengths[: len(indices)])",
        "after reorder the lengths are those of other sequences",
        "nn/test_key_value_cache.py,nn/test_continuous_batches.py",
    ),
    Mutant(
        "nn/key_value_cache.py",
        "if room.turn == state.turn >= 0 and",
        "if state.turn >= 0 and",
        "two branches of a cache write to the same memory",
        "test_by_hand.py",
    ),
    Mutant(
        "nn/multi_head_attention.py",
        "            k, v = state.key, state.value\n",
        "            k, v = state.key, state.value\n            cache._hold(state, self)\n",
        "a refused call leaves its keys in the cache",
        "nn/test_key_value_cache.py,nn/test_nn_errors.py",
    ),
    Mutant(
        "nn/multi_head_attention.py",
        "align = align if cache is None else past",
        "align = align if cache is None else 0",
        "a query after a cache stands at its first key",
        "nn/test_key_value_cache.py",
    ),
]

MODELS = [
    Mutant(
        "models/tap/masks.py",
        "mask > torch.finfo(mask.dtype).min / 2",
        "mask >= 0",
        "a bias below 0 in a model's mask hides the pair",
        "test_by_hand.py",
    ),
    Mutant(
        "models/tap/masks.py",
        "bool((mask > -torch.inf).all())",
        "True",
        "a row of -∞ alone is recorded as uniform",
        "models/test_backends.py,models/test_watch.py,models/test_torch_nn.py",
    ),
    Mutant(
        "models/tap/masks.py",
        'digest(tensor) if tensor.device.type == "cpu" and readable(tensor) else 0',
        "0",
        "a mask that NumPy writes to between calls is recorded as it was",
        "models/test_own_modules.py",
    ),
    Mutant(
        "base/versions.py",
        "shifts = (0, 32) if",
        "shifts = (0,) if",
        "signs that change in a cache, through .data, are not seen",
        "models/test_joined.py",
    ),
    Mutant(
        "models/tap/functions.py",
        "if func in SOFTMAX or func in FUSED:",
        "if func in SOFTMAX:",
        "a fused kernel that a module calls by itself is not told of",
        "models/test_own_code.py",
    ),
    Mutant(
        "models/tap/padding.py",
        "of_keys = own[:, length - keys :]",
        "of_keys = own[:, :keys]",
        "behind a sliding cache the padding is that of the first words",
        "test_by_hand.py",
    ),
    Mutant(
        "models/use/edits/changed.py",
        "output = some.output * share.unsqueeze(-1)",
        "output = some.output",
        "a knockout after the softmax is one before it",
        "models/test_edit.py",
    ),
    Mutant(
        "models/use/edits/changed.py",
        "output = output if factor == 1.0 else output * factor",
        "output = output",
        "scaling a head does nothing",
        "models/test_edit.py",
    ),
    Mutant(
        "models/use/edits/recorded.py",
        "        if new.visible is not own.visible:\n",
        "        if False:\n",
        "a knockout is not in the record",
        "models/test_edit_recorded.py",
    ),
    Mutant(
        "models/use/edits/force_mask.py",
        ">= spot.filled",
        "> spot.filled",
        "a forced mask sees one empty slot of a static cache",
        "test_by_hand.py",
    ),
    Mutant(
        "models/use/edits/spot.py",
        "before = 0 if told else max(total - keys, 0)",
        "before = 0",
        "behind a sliding cache edits name other keys",
        "models/test_edit.py",
    ),
    Mutant(
        "models/read/rollout.py",
        "flow = flow / (1 + total)",
        "flow = flow / 2",
        "rollout of rows that do not sum to 1",
        "models/test_rollout.py",
    ),
    Mutant(
        "models/use/recorder.py",
        "call = call._replace(query=copied(call.query))",
        "pass",
        "a query that the model writes to later changes its record",
        "models/test_watch.py,models/test_keep.py",
    ),
    Mutant(
        "models/use/recorder.py",
        "if dropout_p and self.asked.gradients:",
        "if False:",
        "gradients beside dropout are given, and are not the model's",
        "models/test_values.py,test_errors.py,models/test_watch.py",
    ),
    Mutant(
        "models/use/monitor.py",
        "first = keys & (keys.cumsum(-1) == 1)",
        "first = keys & (keys.cumsum(-1) <= 2)",
        "the monitor counts the second key as a sink",
        "models/test_monitor.py",
    ),
]

PAGES = [
    Mutant(
        "report/front/weights.js",
        "head.relative[j - i + head.queries - 1]",
        "head.relative[i - j + head.queries - 1]",
        "the page mirrors a relative bias",
        PAGE,
    ),
    Mutant(
        "report/front/weights.js",
        "score = head.softcap * Math.tanh(score / head.softcap)",
        "score = Math.tanh(score / head.softcap)",
        "the page's softcap is 1",
        PAGE,
    ),
    Mutant("report/front/weights.js", "(7 - (place & 7))", "(place & 7)", "the page mirrors a mask's holes", PAGE),
    Mutant(
        "report/front/weights.js",
        "j >= head.stop[i]) return false",
        "j > head.stop[i]) return false",
        "on the page a query may look at one key too many",
        PAGE,
    ),
    Mutant(
        "report/front/weights.js",
        "+ Math.log1p(Math.exp(-Math.abs(own - sink)))",
        "",
        "on the page sinks take no share of a larger score",
        PAGE,
    ),
    Mutant(
        "report/front/weights.js",
        "weights[b] - weights[a] || a - b",
        "weights[b] - weights[a] || b - a",
        "on the page equal weights are ranked from the last",
        "report/test_report_formulas.py",
    ),
    Mutant(
        "report/front/weights.js",
        "(look.weights[each] > weight ? 1 : 0)",
        "(look.weights[each] >= weight ? 1 : 0)",
        "on the page the strongest weight has rank 2",
        "report/test_report_formulas.py",
    ),
    Mutant(
        "report/_blocks.py",
        "np.where(times < 0, 0, codes)",
        "codes",
        "thumbnails show hidden pairs as weak ones",
        "report/test_report_heads.py,report/test_report_map.py",
    ),
    Mutant(
        "report/layer.py",
        "matrix[start : start + last - first, :keys]",
        "matrix[: last - first, :keys]",
        "rows of a tiled matrix are read from its tile's first",
        "report/test_report_layer.py",
    ),
    Mutant(
        "base/front/operations.js",
        "const top = maximumOf(values);",
        "const top = 0;",
        "the explanation's page overflows in its softmax",
        "explanation/test_page.py",
    ),
    Mutant(
        "base/front/operations.js",
        "lt: compared((a, b) => a < b",
        "lt: compared((a, b) => a <= b",
        "the explanation's page sees one key too many of a length",
        "explanation/test_page.py,explanation/test_page_reader.py",
    ),
    Mutant(
        "base/front/operations.js",
        "ge: compared((a, b) => a >= b",
        "ge: compared((a, b) => a > b",
        "the explanation's page sees one key too few of a window",
        "explanation/test_page.py",
    ),
    Mutant(
        "explanation/front/steps.js",
        "change.inputs.delete(step.name);",
        ";",
        "a number that is set back still counts as changed",
        "explanation/test_page.py",
    ),
]

EXPLANATIONS = [
    Mutant(
        "explanation/of_problem.py",
        "wrong = scores.softmax(-2)",
        "wrong = scores.softmax(-1)",
        "the softmax along the wrong axis is along the right one",
        "explanation/test_examples.py",
    ),
    Mutant(
        "explanation/of_problem.py",
        "late = scores.softmax(-1).masked_fill(~mask, 0.0)",
        "late = scores.softmax(-1)",
        "the mask after the softmax is none",
        "explanation/test_edges.py",
    ),
    Mutant(
        "explanation/gradients.py",
        "flows(user.by, user, known[user.name], step.name)",
        "flows(user.by, user, known[step.name], step.name)",
        "the formula of a gradient names the wrong step",
        "explanation/test_gradients.py",
    ),
    Mutant(
        "explanation/of_problem.py",
        "row[j] >= 0.005",
        "row[j] >= 0.5",
        "what an output is made of leaves out weights below a half",
        "test_by_hand.py",
    ),
    Mutant(
        "explanation/modules/projection.py",
        "value = cat(-before[..., dim // 2 : dim], before[..., : dim // 2])",
        "value = cat(before[..., dim // 2 : dim], before[..., : dim // 2])",
        "the explanation of rotary positions has a wrong sign",
        STEPS,
    ),
    Mutant(
        "explanation/diagnosis/checks/scale.py",
        "missing = applied is None or abs(applied) > ALIKE / root",
        "missing = applied is None",
        "a scale of 1 is not told",
        "diagnosis/test_planted.py,diagnosis/test_models.py",
    ),
    Mutant(
        "explanation/diagnosis/checks/opposite_mask.py",
        'return not own, f"each query sees {at}',
        'return own, f"each query sees {at}',
        "a mask upside down is as sure as a guess",
        "test_by_hand.py",
    ),
]

TRITON = [
    Mutant(
        "engines/triton/kernels/tile.py",
        "keep = (i < given.query.length) & (j < given.key.length)\n",
        "keep = i < given.query.length\n",
        "keys beyond the last are seen: a mask is missing",
        INTERPRETED,
    ),
    Mutant(
        "engines/triton/kernels/tile.py",
        "(j >= start) & (j < stop)",
        "(j >= start) & (j <= stop)",
        "an interval ends one key late",
        INTERPRETED,
    ),
    Mutant(
        "engines/triton/kernels/tile.py",
        "        s += poison(given.key, b, key_head, j)\n",
        "        s += 0.0\n",
        "a key that is not finite reaches nobody: a NaN is lost",
        INTERPRETED,
    ),
    Mutant(
        "engines/triton/kernels/mul.py",
        "sound(x, b, h, places[:, None]) & (dims[None, :] < given.width)",
        "sound(x, b, h, places[:, None]) & (dims[None, :] <= given.width)",
        "a column of the next row is read: a mask is off by one",
        INTERPRETED,
    ),
    Mutant(
        "engines/triton/kernels/tanh_add.py",
        "tl.load(a + x.padded)[:, None]",
        "tl.load(a + x.length)[:, None]",
        "the second dimension is read at a wrong stride",
        INTERPRETED,
    ),
    Mutant(
        "engines/triton/kernels/score.py",
        "        tl.debug_barrier()  #",
        "        pass  #",
        "sums in memory are read before all threads have written them: a barrier is missing",
        INTERPRETED,
    ),
    Mutant(
        "engines/triton/kernels/decode.py",
        "    at = part.to(tl.int64) * rows + row\n",
        "    at = part.to(tl.int64) * (rows - 1) + row\n",
        "a part of another query is joined",
        INTERPRETED,
    ),
]

CAUSES = [
    Mutant(
        "models/causes/frozen.py",
        "                    return result.detach() + (through - through.detach())\n",
        "                    return None\n",
        "causes: the size of a norm follows the part that is attributed: it is not frozen",
        "models/test_causes.py",
    ),
    Mutant(
        "models/causes/attribution.py",
        "value = value.repeat_interleave(output.shape[1] // value.shape[1], 1)",
        "value = value.repeat(1, output.shape[1] // value.shape[1], 1, 1)",
        "causes: a source's part is read from the values of another key head",
        "models/test_causes.py",
    ),
    Mutant(
        "models/causes/circuits.py",
        '        other = "key" if through == "query" else "query"\n',
        '        other, through = through, "key" if through == "query" else "query"\n',
        "causes: composition is of the transposed product: queries are read as keys",
        "models/test_causes.py",
    ),
    Mutant(
        "models/causes/cells.py",
        "return one[place * count : (place + 1) * count]",
        "return one[place::times]",
        "causes: the outputs of a batched sweep are split across its cells",
        "models/test_sweep.py",
    ),
    Mutant(
        "models/causes/estimated.py",
        "step = new.to(exact) - before",
        "step = new.to(exact)",
        "causes: an estimate is of the new output, not of its change",
        "models/test_attribution_patching.py",
    ),
    Mutant(
        "models/causes/estimated.py",
        "-abs(effects[n])",
        "-effects[n]",
        "causes: a large estimate below 0 is not computed exactly",
        "models/test_attribution_patching.py",
    ),
    Mutant(
        "models/use/edits/from_run.py",
        "* heads // spot.all_heads for n in",
        "% heads for n in",
        "causes: a patch takes the key of another key head",
        "models/test_patch.py",
    ),
    Mutant(
        "models/use/edits/patch.py",
        "        if factor is None:\n",
        "        if True:\n",
        "causes: weights that are frozen lose the factor that an edit gave them",
        "models/test_patch.py",
    ),
    Mutant(
        "models/use/edits/ablate.py",
        "torch.randint(int(own), there,",
        "torch.randint(0, there,",
        "causes: resampling takes a sequence's own output",
        "models/test_patch.py",
    ),
    Mutant(
        "models/use/edits/edit.py",
        "[*outer.edits, *self.edits]",
        "[*self.edits, *outer.edits]",
        "causes: of two edits, one inside the other, the inner one comes first",
        "models/test_patch.py",
    ),
]

MUTANTS = [*MASKS, *SCORES, *ENGINES, *TRITON, *LOOKS, *MODULES, *MODELS, *CAUSES, *PAGES, *EXPLANATIONS]
