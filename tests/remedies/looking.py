"""Cases, as in the table: what looks at weights, recordings and models, and compiled code."""

from remedies.table import LLAMA, PLOT, case

SEEN = """
def seen_of(model, *given, **options):
    with ch.watch(model, **options) as seen, torch.no_grad():
        model(*given)
    return seen
class Masked(Block):
    def forward(self, x, mask=None):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
"""
BERT = (
    SEEN
    + """
import transformers
WORDS = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
def bert(**options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return transformers.BertModel(transformers.BertConfig(**sizes, num_attention_heads=2)).eval()
def recorded(mask, padding=WORDS):
    model = bert()
    with ch.watch(model, padding=padding) as seen, torch.no_grad():
        model(torch.arange(8).view(2, 4), attention_mask=mask)
    return seen
def leaked(mask):
    return recorded(mask)[0].weights.dense()[1, :, :, 2:].sum()
"""
)
JOINED = """
class Cached(torch.nn.Module):
    def forward(self, x, past):
        keys = torch.cat([past, x], 2)
        causal = x.shape[2] == keys.shape[2]
        return torch.nn.functional.scaled_dot_product_attention(x, keys, keys, is_causal=causal), keys
def generated(change=None):
    block, past = Cached(), q[:, :, :0]
    with ch.watch(block) as seen:
        for step in (q[:, :, :3], q[:, :, 3:4], q[:, :, 4:]):
            past = block(step, past)[1]
            past = past if change is None else change(past)
    return seen
"""
BEAMS = """
import os, tempfile, transformers, warnings
TEXT = torch.tensor([[4, 9, 2, 7]])
def writer(**options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "initializer_range": 0.3, "eos_token_id": None, "pad_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **options)).eval()
def generated(one):
    return one.generate(
        TEXT, max_new_tokens=6, num_beams=3, do_sample=False, return_dict_in_generate=True, output_scores=True
    )
def beams():
    with ch.watch(one := writer()) as seen:
        generated(one)
    return seen
def of_first(seen, row=0):
    return seen[0].weights[row].dense()
def from_file(seen):
    with tempfile.TemporaryDirectory() as folder:
        return ch.models.load_recording(seen.write(os.path.join(folder, "seen.safetensors")))
NAMED = generated(writer())
OUT = NAMED.sequences
with torch.no_grad(), warnings.catch_warnings():
    FULL = writer(attn_implementation="eager")(OUT[:, :-1], output_attentions=True).attentions[0][0]
warnings.filterwarnings("ignore", "joined: these rows are beams")
"""

# two texts that get the same answer
ALIKE = """
SOURCES = torch.tensor([[4, 9, 2, 7], [8, 3, 5, 5]])
torch.manual_seed(0)
SIZES = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
PAIR = transformers.T5ForConditionalGeneration(
    transformers.T5Config(**SIZES, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None)
).eval()
PAIR.lm_head = torch.nn.Linear(16, 50, bias=False)
torch.nn.init.zeros_(PAIR.lm_head.weight)
def of_two(ask, sources=SOURCES):
    with torch.no_grad(), ch.watch(PAIR.decoder) as seen:
        out = PAIR.generate(sources, max_new_tokens=4, do_sample=False)
    return ask(seen, out)
PAIR.set_attn_implementation("eager")
with torch.no_grad():
    CROSS = PAIR(
        input_ids=SOURCES[1:], decoder_input_ids=torch.zeros(1, 4, dtype=torch.long), output_attentions=True
    ).cross_attentions[0][0]
PAIR.set_attn_implementation("sdpa")
"""
FRESH = PLOT + "\nfresh = lambda: ch.weights(x, x).plot(0)\n"
DRAWN = "torch.tensor(True)"
CALLED = (
    LLAMA
    + """
def called(one, ids=IDS, **more):
    with torch.no_grad():
        return one(ids, use_cache=False, **more).last_hidden_state
"""
)
PATCHES = (
    SEEN
    + "def pictured(image):\n    found = seen_of(Block(), torch.rand(1, 2, 5, 8)).view(image=image)\n    return torch.tensor(found.page.meta()['image']['rows'])\n"
)
CASES = [
    case(
        "ch.explain(module, x)",
        ("ch.explain(module, x, x, x)", "@['result']", "of_torch(x)"),
        setup="torch.manual_seed(0)\nmodule = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()",
    ),
    case(
        "pictured(torch.zeros(30, 70, 3))",
        (
            "as the processor has resized and cropped it",
            "pictured(torch.zeros(30, 70, 3)[:, :30]) # @",
            "torch.tensor(2)",
        ),
        setup=PATCHES,
    ),
    case(
        "pictured('picture.png')",
        ("(3, height, width)", "pictured(torch.zeros(3, 30, 30)) # @", "torch.tensor(2)"),
        setup=PATCHES,
    ),
    case(
        "ch.explain(x, x, x).write('steps.docx')",
        ("ends in .html, .md", "torch.tensor('weights' in ch.explain(x, x, x).markdown()) # @", "torch.tensor(True)"),
    ),
    # diagnoses
    case(
        "ch.diagnose(long / 8, other, long)",
        ("scale=1.0", "attention(long / 8, other, long, @)", "plain(long, other, long)"),
        ("leave the division of the query out", "attention(long, other, long) # @", "plain(long, other, long)"),
        setup="long, other = torch.randn(2, 2, 12, 64)",
    ),
    case(
        "ch.diagnose(long, other, long, scale=1 / 64)",
        ("scale=0.125", "attention(long, other, long, @)", "plain(long, other, long)"),
        setup="long, other = torch.randn(2, 2, 12, 64)",
    ),
    case(
        "recorded(None).diagnose()",
        ("attention_mask", "(lambda attention_mask: leaked(@))(WORDS)", "torch.tensor(0.0)"),
        (
            "mask=Padding(attention_mask)",
            "(lambda attention_mask: attention(x[:2], x[:2], x[:2], @))(WORDS.bool())",
            "plain(x[:2], x[:2], x[:2], WORDS.bool()[:, None])",
        ),
        setup=BERT,
    ),
    case(
        "recorded(1 - WORDS).diagnose()",
        (
            "Padding(attention_mask)",
            "(lambda attention_mask: attention(x[:2], x[:2], x[:2], mask=@))(WORDS.bool())",
            "plain(x[:2], x[:2], x[:2], WORDS.bool()[:, None])",
        ),
        (
            "key_padding_mask=attention_mask == 0",
            "(lambda attention_mask: as_torch(x[:2], x[:2], x[:2], @)[0])(WORDS)",
            "torch.cat([of_torch(x)[:1], as_torch(x[1:2], x[1:2, :2], x[1:2, :2])[0]])",
        ),
        setup=BERT,
    ),
    case(
        "ch.diagnose(x, x, x, mask=torch.zeros(4, 4).masked_fill(~matrix, -1e9).index_fill(0, torch.tensor(1), -1e9))",
        (
            "−∞",
            "attention(x, x, x, mask=torch.zeros(4, 4).masked_fill(~matrix, float('@'.replace('−∞', '-inf'))))",
            "plain(x, x, x, matrix)",
        ),
        ("a bool mask (True: may attend)", "attention(x, x, x, mask=matrix) # @", "plain(x, x, x, matrix)"),
    ),
    case(
        "ch.diagnose(x, x, x, mask=added + torch.where(matrix, 0.0, torch.nan))",
        (
            "−∞",
            "attention(x, x, x, mask=torch.where(matrix, added, float('@'.replace('−∞', '-inf'))))",
            "plain(x, x, x, matrix, added)",
        ),
        ("torch.where", "attention(x, x, x, mask=@(matrix, added, -torch.inf))", "plain(x, x, x, matrix, added)"),
    ),
    case(
        "ch.diagnose(q, q + 1e5, q, mask=Causal())",
        (
            "float64",
            "attention(q.to(torch.@), q.to(torch.@) + 1e5, q.to(torch.@), mask=Causal()).float()",
            "plain(q, q, q, five)",
        ),
        (
            "take out an offset that all keys share",
            "attention(q, key - 1e5, q, mask=Causal()) # @",
            "plain(q.double(), key.double(), q.double(), five).float()",
        ),
        setup="key = q + 1e5",
    ),
    # explanations
    case(
        "ch.explain(scores, gradients=True)",
        (
            "scores.astype(float)",
            "torch.from_numpy(ch.explain(@, gradients=True)['weights'])",
            "torch.from_numpy(scores).double().softmax(-1)",
        ),
        setup="scores = np.arange(12).reshape(3, 4) % 5",
    ),
    case(
        "ch.explain(hooked(), x, x, x)",
        ("ch.watch(module)", "seen(hooked(), lambda module: @)", "of_torch(x)"),
        setup="""
def hooked():
    attend.W_q.register_forward_hook(lambda module, given, output: output)
    return attend
def seen(module, watching):
    with watching(module) as found:
        output = module(x, x, x)
    step = found[0].explain()
    return output.detach()
""",
    ),
    # weights and gradients of weights
    case(
        "torch.compile(lambda w, value: w() @ value, backend='eager', fullgraph=True)(lambda: ch.weights(x, x), x)",
        ("torch.matmul(w, value)", "(lambda w, value: @)(ch.weights(x, x), x)", "soft(x, x) @ x"),
    ),
    case(
        "module.attention_weights",
        (
            "ch.nn.set_recording(module, True)",
            "(@, module(x, x, x), module.attention_weights[...])[2]",
            "soft(x, x)",
        ),
        setup="""
module = ch.nn.DotProductAttention(record=False)
module(x, x, x)
""",
    ),
    case(
        "ch.nn.DotProductAttention(record=False, record_gradients=True)",
        (
            "record=False",
            "torch.tensor(ch.nn.DotProductAttention(record_gradients=True).record_gradients)",
            "torch.tensor(True)",
        ),
    ),
    case(
        "read(False)",
        ("Read what you need of attention_weights before", "read(True) # @", "soft(x, x, scale=0.5)"),
        setup="""
class Twice(ch.extend.Score):
    times = 2.0
    def tile(self, query, key):
        return self.times * query @ key.mT
def read(before):
    score = Twice()
    score.times = 0.5
    dot = ch.nn.MultiHeadAttention(8, 1, score=score, record_gradients=True)
    with torch.no_grad():
        for layer in (dot.W_q, dot.W_k):
            layer.weight.copy_(torch.eye(8)), layer.bias.zero_()
        dot(x, x, x)
    found = dot.attention_weights
    if before:
        return found.dense()[:, 0].detach()
    score.times = 3.0
    return found.dense()
""",
    ),
    case(
        "attention(*[q.transpose(1, 2)] * 3, mask=Lengths([3, 5]))",
        (
            "tensor.transpose(1, 2)",
            "attention(*[@ for tensor in [q.transpose(1, 2)] * 3], mask=Lengths([3, 5]))",
            "plain(q, q, q, torch.arange(5) < torch.tensor([3, 5])[:, None, None, None])",
        ),
    ),
    case(
        "backward(lambda tensor: tensor)",
        ("tensor.clone()", "backward(lambda tensor: @)", "expected()"),
        setup="""
def backward(kept):
    with torch.enable_grad():
        query, bias = x.clone().requires_grad_(), added.clone()
        output = attention(query, x, x, bias=DenseBias(kept(bias)), mask=Documents([0, 0, 1, 1]), engine='sdpa')
        bias.zero_()
        output.square().sum().backward()
    return query.grad
def expected():
    blocks = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).bool()
    with torch.enable_grad():
        query = x.clone().requires_grad_()
        plain(query, x, x, blocks, added).square().sum().backward()
    return query.grad
""",
    ),
    case(
        "ch.weights(x, x).gradients(x, x.to('meta'))",
        ("one kind", "ch.weights(x, x).gradients(x, x)[...] # @", "x @ x.mT"),
    ),
    case(
        "ch.weights(big, big).gradients(big, big)[...]",
        ("Index the part", "ch.weights(big, big).gradients(big, big)[:, 7, :9] # @", "(big[:, 7] @ big.mT)[:, 0, :9]"),
        setup="big = torch.zeros(1, 12000, 2)\nbig[..., :9, :] = torch.rand(9, 2)\n",
    ),
    # pictures, words, recordings
    case(
        "ch.weights(x, x).plot(ax=fresh())",
        ("choose one", "drawn(ch.weights(x, x).plot(1, ax=fresh())) # @", DRAWN),
        ("pass no ax", "drawn(ch.weights(x, x).plot()) # @", DRAWN),
        setup=FRESH,
    ),
    case(
        "ch.explain(q, q, q).plot('query', ax=fresh())",
        ("pass no ax", "drawn(ch.explain(q, q, q).plot('query')) # @", DRAWN),
        setup=FRESH,
    ),
    case(
        "two()",
        (
            "tokens= and beside_tokens=",
            "two('abcde', 'abcd') # @",
            "torch.tensor(True)",
        ),
        setup="""
import tempfile, os
def of(length):
    model = Block()
    with ch.watch(model) as seen:
        model(q[:, :, :length])
    return seen
def two(tokens=None, beside_tokens=None):
    path = os.path.join(tempfile.mkdtemp(), 'page.html')
    page = of(5).view(tokens=tokens and list(tokens), beside=of(4), beside_tokens=beside_tokens and list(beside_tokens)).write(path)
    return torch.tensor(os.path.getsize(page) > 1000)
""",
    ),
    case(
        "seen_of(Masked(), q, five).compare(seen_of(Masked(), q))",
        (
            "the same padding and mask",
            "seen_of(Masked(), q, five).compare(seen_of(Masked(), q, five))[0].divergence # @",
            "torch.zeros(2).double()",
        ),
        (
            "matched=",
            "seen_of(Masked(), q, five).compare(seen_of(Masked(), q[:, :, :3], five[:3, :3]), @([0, 1, 2], [0, 1, 2]))[0].divergence",
            "torch.zeros(2).double()",
        ),
        setup=SEEN,
    ),
    case(
        "across(q, q[:, :, :3]).explain(tokens=list('abcde'), source_tokens=list('ab'))",
        (
            "one a position",
            "across(q, q[:, :, :3]).explain(tokens=list('abcde'), source_tokens=list('abc'))['output'] # @",
            "plain(q, q[:, :, :3], q[:, :, :3])",
        ),
        setup="""
class Across(Block):
    def forward(self, x, y):
        return torch.nn.functional.scaled_dot_product_attention(x, y, y)
def across(x, y):
    model = Across()
    with ch.watch(model, values=True) as seen:
        model(x, y)
    return seen[0]
""",
    ),
    case(
        "seen_of(Masked(), q[:, :, :1]).distinctive()",
        ("a longer text", "torch.tensor(seen_of(Masked(), q).distinctive().head in (0, 1)) # @", DRAWN),
        setup=SEEN,
    ),
    case(
        "many().plot('*', 0)",
        ("'L0, run 1'", "drawn(many().plot(@, 0))", DRAWN),
        setup=FRESH
        + "def many():\n    model = Block()\n    with ch.watch(model) as seen:\n        model(q), model(q)\n    return seen\n",
    ),
    case(
        "watched().explain(0, 0, query='pump')",
        (
            "pass tokens=",
            "watched().explain(0, 0, query='pump', tokens=['a', 'b', 'c', 'pump', 'd'])['weights'].sum() # @",
            "torch.tensor(1.0)",
        ),
    ),
    case(
        "watched().explain(0, 0, query='a', tokens=['a', 'b', 'c', 'a', 'd'])",
        (
            "pass one of these",
            "watched().explain(0, 0, query=3, tokens=['a', 'b', 'c', 'a', 'd'])['weights'].sum() # @",
            "torch.tensor(1.0)",
        ),
    ),
    case(
        "edited(ch.edits.ScaleHeads(layers=-1, factor=0.0))",
        ("numbers from 0 on", "edited(ch.edits.ScaleHeads(layers=0, factor=0.0)) # @", "torch.zeros(2, 2, 5, 8)"),
        setup="class Two(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.one = Block()\n"
        "    def forward(self, x):\n        return self.one(x)\n"
        "def edited(edit):\n    model = Two()\n    with ch.edit(model, edit):\n        return model(q)",
    ),
    case(
        "mapped(lambda w: w - 0.2)",
        ("weights.clamp(min=0)", "mapped(lambda w: (lambda weights: @)(w - 0.2))", "(five - 0.2).clamp(min=0)"),
        setup="def mapped(function):\n    model = Block()\n"
        "    with ch.watch(model) as seen, ch.edit(model, ch.edits.MapWeights(function)):\n        model(q)\n"
        "    return seen[0].weights.dense()\n"
        "five = torch.softmax((q @ q.mT * 8**-0.5).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf), -1)",
    ),
    case(
        "recorded(rows, rows).layers(sequence=1)",
        ("another sequence=", "torch.tensor(len(recorded(rows, rows).layers(sequence=0))) # @", "torch.tensor(1)"),
        setup=BERT + "rows = torch.tensor([[1] * 4, [0] * 4])\n",
    ),
    case(
        "watched().layers(error=2)",
        ("1e-4", "torch.tensor(len(watched().layers(error=@)))", "torch.tensor(1)"),
    ),
    # generation
    case(
        "generated(lambda past: (past * 8).round() / 8 + 1e-3)['Cached'].joined()",
        ("another cache", "generated()['Cached'].joined().dense() # @", "soft(q, q, five)"),
        (
            "seen[name][n:].joined()",
            "(lambda seen, name, n: @)(generated(), 'Cached', 0).dense()",
            "soft(q, q, five)",
        ),
        setup=JOINED,
    ),
    case(
        "generated()['Cached'][::2].joined()",
        ("seen[name]", "(lambda seen, name: @)(generated(), 'Cached').joined().dense()", "soft(q, q, five)"),
        setup=JOINED,
    ),
    case(
        "warned(lambda: beams().joined())",
        ("joined(sequences)", "(lambda sequences: of_first(beams().@))(OUT)", "FULL"),
        setup=BEAMS,
    ),
    case(
        "beams().joined(OUT + 1)",
        (
            "joined(sequences[i, :length])",
            "(lambda sequences, i, length: of_first(beams().@))(OUT, 0, OUT.shape[1])",
            "FULL",
        ),
        setup=BEAMS,
    ),
    case(
        "of_two(lambda seen, out: seen.joined(out[:1]))",
        (
            "Pass all sequences, in the order",
            "of_two(lambda seen, out: seen.joined(out))[1].weights[1].dense() # @",
            "CROSS",
        ),
        (
            "generate for this input alone",
            "of_two(lambda seen, out: seen.joined(out[:1]), SOURCES[1:])[1].weights[0].dense() # @",
            "CROSS",
        ),
        setup=BEAMS + ALIKE,
    ),
    case(
        "from_file(beams()).joined(OUT)",
        (
            "out.beam_indices[:, -1]",
            "(lambda out: of_first(from_file(beams()).joined(), *(@).tolist()))(NAMED)",
            "FULL",
        ),
        setup=BEAMS,
    ),
    case(
        "beams().view(tokens=list('abcdefghij'))",
        ("seen.joined(sequences)", "(lambda seen, sequences: of_first(@))(beams(), OUT)", "FULL"),
        setup=BEAMS,
    ),
    # backends
    case(
        "called(ch.models.run_on_clearhead(model()), cu_seq_lens_q=torch.tensor([0, 4]), cu_seq_lens_k=torch.tensor([0, 4]), max_length_q=4, max_length_k=4)",
        (
            "documents that fill the whole sequence",
            "called(ch.models.run_on_clearhead(model()), cu_seq_lens_q=STARTS, cu_seq_lens_k=STARTS, max_length_q=4, max_length_k=4, position_ids=PLACES) # @",
            "torch.cat([called(model(), IDS[:, :4]), called(model(), IDS[:, 4:])], 1)",
        ),
        setup=CALLED + "STARTS, PLACES = torch.tensor([0, 4, 6]), torch.tensor([[0, 1, 2, 3, 0, 1]])\n",
    ),
    case(
        "called(ch.models.run_on_clearhead(model()), unknown=torch.ones(4))",
        ("attn_implementation='sdpa'", "called(model(@))", "ids_out(model(attn_implementation='eager'))"),
        (
            "with no keyword in its call that its forward does not name",
            "called(ch.models.run_on_clearhead(model())) # @",
            "ids_out(model())",
        ),
        setup=CALLED,
    ),
    case(
        "ch.assert_attends(bert(), {'input_ids': torch.arange(8).view(2, 4)}, None, padding=WORDS)",
        (
            "attention_mask",
            "torch.tensor(ch.assert_attends(bert(), {'input_ids': torch.arange(8).view(2, 4), '@': WORDS}, None) is None)",
            DRAWN,
        ),
        setup=BERT,
    ),
    case(
        "ch.distributed.ZigZag(8)",
        ("a number of ranks", "ch.distributed.ZigZag(8, 2).positions() # @", "torch.tensor([0, 1, 6, 7])"),
    ),
    case(
        "called(ch.models.run_on_clearhead(model()), IDS.view(2, 3), cu_seq_lens_q=ACROSS, cu_seq_lens_k=ACROSS)",
        (
            "(1, L)",
            "called(ch.models.run_on_clearhead(model()), IDS.view(1, 6), cu_seq_lens_q=ACROSS, cu_seq_lens_k=ACROSS, position_ids=PLACES) # @",
            "torch.cat([called(model(), IDS[:, :2]), called(model(), IDS[:, 2:])], 1)",
        ),
        setup=CALLED + "ACROSS, PLACES = torch.tensor([0, 2, 6]), torch.tensor([[0, 1, 0, 1, 2, 3]])\n",
    ),
    case(
        "ch.assert_attends(model(), PACKED, EXPECTED)",
        (
            "use_cache=False",
            "torch.tensor(ch.assert_attends(model(), {**PACKED, **dict(@)}, EXPECTED) is None)",
            DRAWN,
        ),
        setup=LLAMA
        + """
PACKED = {'input_ids': IDS, 'position_ids': torch.tensor([[0, 1, 2, 3, 0, 1]])}
EXPECTED = Causal() & Documents([0, 0, 0, 0, 1, 1])
""",
    ),
    # compiled code
    case(
        "warned(lambda: monitored(Block(), q))",
        ("torch.compiler.reset()", "(@, monitored(model(), IDS))[1]", "torch.tensor(1)"),
        ("train without compiling", "monitored(Block(), q, compiled=False) # @", "torch.tensor(1)"),
        setup=LLAMA
        + """
def monitored(one, given, compiled=True):
    step = lambda given: one(given)
    step = torch.compile(step, backend='eager') if compiled else step
    with ch.models.monitor(one.train()) as seen:
        step(given)
    return torch.tensor(seen.steps)
""",
    ),
    case(
        "watched_in(compiled())",
        (
            "watch(copy.deepcopy(model))",
            "(lambda watch, model: watched_in(*@))(lambda one: (one, ch.watch(one)), compiled())",
            "soft(q, q, five)",
        ),
        setup="""
import copy
def compiled():
    one = Block()
    one.compile(backend='eager')
    return one
def watched_in(model, manager=None):
    with manager or ch.watch(model) as seen:
        model(q)
    return seen[0].weights.dense()
""",
    ),
    case(
        "monitored(compiled())",
        ("torch.compiler.reset()", "(compiled(), @, monitored(Own()))[2]", "torch.tensor(1)"),
        setup="""
class Own(Block):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True) * 2
def compiled():
    one = Own().train()
    torch.compile(one, backend='eager')(q)
    return one
def monitored(model):
    with ch.models.monitor(model.train()) as seen:
        model(q)
    return torch.tensor(seen.steps)
""",
    ),
    case(
        "warned(lambda: monitored(Calls(ch.attention)))",
        ("ch.nn.DotProductAttention()", "monitored(Calls(@))", "torch.tensor(4)"),
        setup="""
class Calls(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend, self.other = attend, ch.nn.DotProductAttention()
    def forward(self, x):
        return self.attend(x, x, x) + self.other(x, x, x)
def monitored(model):
    torch.compiler.reset()
    with ch.models.monitor(model.train()) as seen:
        torch.compile(model, backend='eager')(q)
    return torch.tensor(len(seen.table()))
""",
    ),
    case(
        "torch.compile(step, backend='eager', fullgraph=True)(x)",
        ("outside of the compiled function", "step(x)[:, :, :0] # @", "x[:, :, :0]"),
        setup="""
def step(x):
    cache = ch.nn.KeyValueCache()
    with torch.no_grad():
        return attend(x, x, x, Causal(), cache=cache, new_lens=[2, 1, 4, 3])
""",
    ),
    case(
        "torch.compile(of_engine, backend='eager', fullgraph=True)(x)",
        ("outside of the compiled function", "of_engine(x) # @", "plain(x, x, x, low)"),
        (
            "engine=None",
            "torch.compile(lambda x: attention(x, x, x, mask=Causal(), @), backend='eager')(x)",
            "plain(x, x, x, low)",
        ),
        setup="from clearhead.engines.choose import ENGINES\ndef of_engine(x):\n    return attention(x, x, x, mask=Causal(), engine=ENGINES[-2])\n",
    ),
    case(
        "warned(lambda: pooled(False))",
        ("call a module of it in these threads", "pooled('module') # @", "soft(q, q, five)"),
        ("run it in one thread", "pooled('one') # @", "soft(q, q, five)"),
        setup="""
from concurrent.futures import ThreadPoolExecutor
class Pooled(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.inner = how, Block()
    def forward(self, x):
        run = self.inner if self.how == 'module' else lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        if self.how == 'one':
            return run(x)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run, x).result()
def pooled(how):
    model = Pooled(how)
    with ch.watch(model) as seen:
        model(q)
        if not how:
            model.inner(q)
    return seen[0].weights.dense()
""",
    ),
    case(
        "warned(lambda: handing(True))",
        ("run it in one thread", "handing(False) # @", "torch.tensor(2)"),
        setup="""
from concurrent.futures import ThreadPoolExecutor
class Handing(torch.nn.Module):
    def __init__(self, pooled):
        super().__init__()
        self.pooled, self.first, self.second = pooled, Block(), Block()
    def forward(self, x):
        x = self.first(x)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.second, x).result() if self.pooled else self.second(x)
def handing(pooled):
    met = []
    ch.audit(Handing(pooled), q, lambda call: (met.append(call), Causal())[1], level="outputs")
    return torch.tensor(len(met))
""",
    ),
    case(
        "asked()",
        ("with ch.watch(...) as seen:", "watched()[0].weights.dense() # @", "soft(q, q, five)"),
        setup="""
def asked():
    made, said = ch.watch(Block()), ""
    try:
        made.calls
    except AttributeError as error:
        said = str(error)
    try:
        with made:  # else it would be one that was forgotten
            pass
    except ch.ClearheadError:
        pass
    raise ValueError(said)
""",
    ),
    case(
        "ch.explain(ch.masked_softmax, scores, [2, 3, 1], dim=0)",
        (
            "scores.movedim(dim, -1)",
            "ch.explain(ch.masked_softmax, @[None], [2])['weights'][0]",
            "scores.T[:, :2].softmax(-1) @ torch.eye(2, 4)",
        ),
        setup="scores, dim = torch.rand(4, 4), 0",
    ),
    case(
        "ch.explain(scores, scale=scale, bias=bias)",
        ("scores * scale + bias", "ch.explain(@)['weights']", "(scores / 3 + added).softmax(-1)"),
        ("pass query, key and value", "ch.explain(x, x, x, scale=scale)['weights'] # @", "soft(x, x, scale=1 / 3)"),
        setup="scores, scale, bias = torch.rand(4, 4), 1 / 3, added",
    ),
    case(
        "ch.explain(scores, mask=mask)",
        ("scores + mask", "ch.explain(@)['weights']", "(scores + added).softmax(-1)"),
        setup="scores, mask = torch.rand(4, 4), added",
    ),
    case(
        "ch.explain(scores, mask=mask)",
        ("valid_lens=mask", "ch.explain(scores, @)['weights']", "scores[..., :2].softmax(-1) @ torch.eye(2, 4)"),
        setup="scores, mask = torch.rand(3, 4, 4), torch.tensor([2, 2, 2])",
    ),
]
