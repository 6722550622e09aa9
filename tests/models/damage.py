"""Recordings in files whose headers are changed at random, with the checksum of what they then hold, and what a reader
makes of them with little memory.

`python tests/models/damage.py 5000` tries so many changes; `--from 1234` begins with another seed.
"""

import argparse
import copy
import json
import multiprocessing
import random
import resource
import struct
import tempfile
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load

import clearhead as ch
from clearhead.base.torch_state.versions import compute_checksum
from clearhead.models.recordings.recording_file import CHECKSUM, HEADER

ROOM = 1 << 30  # bytes of memory above those that the process has: a length of 10^15 asks for more
VALUES = [None, True, False, -1, 0, 1, 2, 3, 7, 1.5, -0.5, 1e308, 10**6, 2**31, 10**12, 10**15, 2**63, 10**400]
VALUES += ["", "x", "0", "1", "2", "5", "9", "99", "self", "cross", "lower_right", "upper_left"]
VALUES += [[], {}, [0], [0, 0], [1, 0], [0, 1], [0, 10**15], ["0"], ["0", "1"], [None] * 2, [None] * 5, {"tensor": "0"}]
TEXTS = ["NaN", "Infinity", "-Infinity", "1e999", "[" * 100_000 + "]" * 100_000, '{"a": 1, "a": 2}', "truth"]


class Generating(torch.nn.Module):
    """A cache that grows, one with empty slots, one of which a window has left the first, and a source."""

    def __init__(self):
        super().__init__()
        self.grown = self.window = torch.zeros(2, 2, 0, 4)
        self.slots = torch.zeros(2, 2, 12, 4)
        self.at = 0
        self.calls = torch.nn.ModuleList([Attend() for _ in range(4)])

    def forward(self, x):
        length = x.shape[2]
        self.grown = torch.cat([self.grown, x], 2)
        self.window = torch.cat([self.window, x], 2)[:, :, -5:]
        self.slots = self.slots.clone()
        self.slots[:, :, self.at : self.at + length] = x
        keep = torch.arange(12) <= self.at + torch.arange(length)[:, None]
        self.at += length
        grown, slots, window, source = self.calls
        causal = torch.ones(length, self.grown.shape[2], dtype=torch.bool).tril(self.grown.shape[2] - length)
        x = grown(x, self.grown, causal)
        x = x + slots(x, self.slots, keep)
        x = x + window(x, self.window, torch.zeros(length, self.window.shape[2]).normal_())
        return x + source(x, torch.ones(2, 2, 3, 4), None)


class Attend(torch.nn.Module):
    def forward(self, query, key, mask):
        return F.scaled_dot_product_attention(query, key, key, attn_mask=mask)


class Masked(torch.nn.Module):
    """Spans, gaps, pairs, biases, sinks and padding."""

    def forward(self, x, attention_mask):
        words = ch.Padding(attention_mask.bool())
        scattered = ch.MaskFunction(lambda b, h, i, j: (i + j) % 3 > 0)
        x = ch.attention(
            x, x, x, mask=ch.Causal() & (ch.SlidingWindow(before=2) | ch.Lengths([2, 3])), bias=ch.ALiBi(2)
        )
        x = ch.attention(x, x, x, mask=scattered, scale=0.3, sinks=torch.zeros(2))
        x = ch.attention(x, x, x, mask=words, bias=torch.ones(9, 9), score=ch.Dot(softcap=5.0))
        return ch.attention(x[:, :, :4], x, x, mask=ch.Causal() & words, align=torch.tensor([5, 3]))


def recordings():
    """Files with all that a header may hold."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), ch.watch(model := Generating(), values=True) as first:
        for length in (4, 1, 1, 2):
            model(torch.randn(2, 2, length, 4, generator=generator))
    masked, x = Masked(), torch.randn(2, 2, 9, 4, generator=generator, requires_grad=True)
    with ch.watch(masked, gradients=True) as second:
        masked(x, attention_mask=torch.tensor([[1] * 9, [1] * 6 + [0] * 3])).sum().backward()
    return first, second


def parts(path):
    """The header of a file as objects, that of the recording in it, and the bytes after it."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    return header, json.loads(header["__metadata__"][HEADER]), raw[8 + length :]


def places(tree, at=()):
    """Every place in a tree of lists and objects."""
    if at:
        yield at
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in items:
        yield from places(value, (*at, name))


def changed(tree, draw):
    """The JSON of a copy with one change, in words."""
    tree = copy.deepcopy(tree)
    at = draw.choice(list(places(tree)))
    parent = tree
    for name in at[:-1]:
        parent = parent[name]
    kind = draw.choice(["value"] * 6 + ["near", "gone", "more", "text", "other"])
    old = parent[at[-1]]
    if kind == "near" and isinstance(old, int):
        parent[at[-1]] = old + draw.choice([-2, -1, 1, 2])
    elif kind == "gone":
        del parent[at[-1]]
    elif kind == "more":
        parent.append(draw.choice(VALUES)) if isinstance(parent, list) else parent.update(more=draw.choice(VALUES))
    elif kind == "other":  # what stands elsewhere in the tree
        place = draw.choice(list(places(tree)))
        found = tree
        for name in place:
            found = found[name]
        parent[at[-1]] = copy.deepcopy(found)
    elif kind == "text":
        parent[at[-1]] = mark = "a mark that stands nowhere else"
        value = draw.choice(TEXTS)
        return json.dumps(tree).replace(json.dumps(mark), value), f"{at}: {value[:20]}"
    else:
        parent[at[-1]] = draw.choice(VALUES)
    return json.dumps(tree), f"{at} {kind}: {str(old)[:30]} -> {str(parent[at[-1]] if kind != 'gone' else '')[:30]}"


def damaged(path, draw):
    """The bytes of a file with one change, and the change in words."""
    header, inner, data = parts(path)
    kind = draw.choice(["inner"] * 8 + ["outer", "outer", "cut", "bit", "length"])
    said = kind
    if kind == "inner":
        header["__metadata__"][HEADER], said = changed(inner, draw)
    text = json.dumps(header)
    if kind == "outer":
        del header["__metadata__"]
        text, said = changed(header, draw)
        text = text[:-1] + ', "__metadata__": ' + json.dumps({HEADER: json.dumps(inner), CHECKSUM: "0" * 64}) + "}"
    new = text.encode()
    new += b" " * (-len(new) % 8)
    raw = struct.pack("<Q", len(new)) + new + data
    if kind == "cut":
        raw = raw[: draw.randrange(len(raw))]
    elif kind == "bit":
        at = draw.randrange(len(new) + 8)
        raw = raw[:at] + bytes([raw[at] ^ 1 << draw.randrange(8)]) + raw[at + 1 :]
    elif kind == "length":
        raw = struct.pack("<Q", draw.choice([0, 1, len(new) - 8, len(new) + 8, 10**8, 10**15, 2**64 - 1])) + raw[8:]
    return raw, f"{kind}: {said}"


def seal(raw):
    """The bytes of a file with the checksum of what it holds, so that a reader looks at every part of it."""
    try:
        tensors, (length,) = load(raw), struct.unpack("<Q", raw[:8])
        words = json.loads(raw[8 : 8 + length])["__metadata__"]
        return raw.replace(words[CHECKSUM].encode(), compute_checksum(words[HEADER], tensors).encode(), 1)
    except Exception:  # safetensors does not open it
        return raw


def looked_at(seen):
    """Ask a recording for all that it has; what is refused in words is left out."""
    asks = [lambda: repr(seen), lambda: seen.table(), lambda: seen.runs, lambda: seen.diagnose(), seen._repr_html_]
    for name in {call.name for call in seen.calls}:
        asks.append(lambda name=name: seen[name].joined().entropy())
    for call in seen.calls:
        asks += [
            lambda call=call: (repr(call), repr(call.mask)),
            lambda call=call: (call.key, call.value, call.problem),
            lambda call=call: call.weights.dense(),
            lambda call=call: call.weights.reduce(
                ch.reductions.Entropy(),
                ch.reductions.Received(),
                ch.reductions.SinkShare(),
                ch.reductions.MeanDistance(),
            ),
            lambda call=call: (call.weights[0, 0, 0], call.weights.topk(2), call.weights.pool(2)),
            lambda call=call: (call.output, call.value_norms, call.weighted_value_norms),
            lambda call=call: (call.gradients.by_key(), call.head_importance),
            lambda call=call: str(call.explain((0, 0, 0))),
        ]
    done = 0
    for ask in asks:
        try:
            ask()
            done += 1
        except ch.ClearheadError:
            pass
    return done


def verdict(path):
    """ "refused", "read", or what went wrong."""
    try:
        seen = ch.models.load_recording(path)
    except ch.ClearheadError as error:
        return "refused" if str(path) in str(error) else f"does not name the file: {error}"
    except BaseException as error:
        return f"load: {type(error).__name__}: {error!s:.200}"
    try:
        looked_at(seen)
    except BaseException as error:
        return f"look: {type(error).__name__}: {error!s:.200}"
    return "read"


def _child(pipe, files, seeds, folder):
    torch.set_num_threads(1)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    warnings.simplefilter("ignore")
    path = Path(folder, "damaged")
    for seed in seeds:
        draw = random.Random(seed)
        raw, said = damaged(draw.choice(files), draw)
        path.write_bytes(seal(raw))
        pipe.send((seed, said, verdict(path)))
    pipe.close()


def tried(seeds, folder):
    """(seed, change, verdict) of each; in a process of its own, whose memory is limited."""
    files = [seen.write(Path(folder, f"whole{i}")) for i, seen in enumerate(recordings())]
    for path in files:  # what is imported late is not counted as memory that a file asks for
        assert looked_at(ch.models.load_recording(path)) > 20
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(its, files, seeds, folder))
    process.start()
    its.close()
    found = []
    while len(found) < len(seeds):
        try:
            found.append(mine.recv())
        except EOFError:
            found.append((seeds[len(found)], "", "the process ended"))
            break
    process.join()
    return found


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("count", type=int)
    options.add_argument("--from", dest="first", type=int, default=0)
    options = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = tried(range(options.first, options.first + options.count), folder)
    for seed, said, result in found:
        if result not in ("refused", "read"):
            print(seed, said, "|", result)
    print({kind: sum(result == kind for *_, result in found) for kind in ("refused", "read")}, "of", len(found))
