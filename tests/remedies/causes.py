"""Messages of patches, sweeps, circuits and attributions: see `table.py`."""

from .table import case

SETUP = """
import transformers
IDS = torch.arange(12).view(2, 6)
torch.manual_seed(0)
config = transformers.LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                                  num_attention_heads=2)
one = transformers.LlamaForCausalLM(config).eval()
first, second = (layer.self_attn for layer in one.model.layers)
metric = ch.models.logit_difference(7)
def swept(inputs=IDS, model=one, **options):
    make = lambda layer, head: ch.edits.Ablate(layer, head)
    return torch.tensor([row["value"] for row in ch.models.sweep(model, make, inputs, metric, **options)])
def seen(*texts, **options):
    with torch.no_grad(), ch.watch(one, values=True) as found:
        for ids in texts or (IDS,):
            one(ids, **options)
    return found
def patched(source, ids=IDS, **options):
    with torch.no_grad(), ch.edit(one, ch.edits.Patch(source, **options)):
        return one(ids).logits
def whole():
    return one(IDS).logits
def norms():
    value = first.v_proj(one.model.layers[0].input_layernorm(one.model.embed_tokens(IDS))).unflatten(-1, (2, 8))
    return torch.einsum('blhe,ohe->bhlo', value, first.o_proj.weight.unflatten(1, (2, 8))).norm(dim=-1)
"""
PADDED = """
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
def attributed(mask, **options):
    inputs = {"input_ids": IDS, "attention_mask": mask}
    return ch.models.logit_attribution(one, inputs, token=7, **options).logit
def plain_loss(*lengths):
    with torch.no_grad():
        each = [(ids[None, :length], one(ids[None, :length]).logits) for ids, length in zip(IDS, lengths)]
    own = [torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]) for ids, logits in each]
    return torch.stack(own).mean().double()
def loss_of(metric, mask):
    make, inputs = lambda layer, head: ch.edits.Ablate(layer, head), {"input_ids": IDS, "attention_mask": mask}
    return torch.tensor(ch.models.sweep(one, make, inputs, metric).plain, dtype=torch.float64)
"""
FOLDER = """
import atexit, pathlib, shutil, tempfile
folder = tempfile.mkdtemp()
atexit.register(shutil.rmtree, folder, True)
file = pathlib.Path(folder, 'sweep.jsonl')
def damaged(lines):
    swept(folder=folder)
    file.write_text('\\n'.join([*file.read_text().splitlines()[:2], *lines, '']))
    return swept(folder=folder)
def unwritten(again=False):
    made = iter(range(9))
    def make(layer, head):
        if next(made) == 2:
            shutil.rmtree(folder)
        return ch.edits.Ablate(layer, head)
    try:
        return ch.models.sweep(one, make, IDS, metric, folder=folder)
    except ValueError:
        if not again:
            raise
    return swept(folder=folder)
"""
CASES = [
    case(
        "attributed(MASK)",
        (
            "position=attention_mask.sum(1) - 1",
            "(lambda attention_mask: attributed(attention_mask, @))(MASK)",
            "torch.stack([one(IDS[:1, :4]).logits[0, -1, 7], one(IDS[1:]).logits[0, -1, 7]])",
        ),
        setup=SETUP + PADDED,
    ),
    case(
        "attributed(MASK.flip(1), position=0)",
        (
            "position=-1",
            "attributed(MASK.flip(1), @)",
            "torch.stack([one(IDS[:1, 2:]).logits[0, -1, 7], one(IDS[1:]).logits[0, -1, 7]])",
        ),
        setup=SETUP + PADDED,
    ),
    case(
        "loss_of(ch.models.next_token_loss(IDS), MASK)",
        (
            "next_token_loss(ids.masked_fill(attention_mask * attention_mask.roll(1, 1) == 0, -100))",
            "(lambda ids, attention_mask: loss_of(ch.models.@, attention_mask))(IDS, MASK)",
            "plain_loss(4, 6)",
        ),
        setup=SETUP + PADDED,
    ),
    case(
        "ch.models.logit_attribution(one, 'a text', token=7)",
        (
            'tokenizer(text, return_tensors="pt")',
            "(lambda tokenizer, text: ch.models.logit_attribution(one, @, token=7).logit)(lambda text, return_tensors: {'input_ids': IDS}, 'a text')",
            "whole()[:, -1, 7]",
        ),
        setup=SETUP,
    ),
    case(
        "seen().view(effects=metric)",
        (
            "a sweep",
            "torch.tensor([list(seen().view(effects=found).page.meta()['layers'][1]['heads'][0]['measures'][-1])[0]]) # @",
            "torch.tensor([found[2]['effect']])",
        ),
        setup=SETUP + "found = ch.models.sweep(one, lambda layer, head: ch.edits.Ablate(layer, head), IDS, metric)\n",
    ),
    case(
        "ch.models.circuits(bare()).qk(1, 0)",
        (
            "circuits(model, inputs)",
            "ch.models.@.qk(1, 0).dense()",
            "second.q_proj.weight[:8].T @ second.k_proj.weight[:8]",
        ),
        setup=SETUP
        + "model, inputs = one, IDS\n"
        + "def watched(watching):\n    with torch.no_grad(), watching as found:\n        one(IDS)\n    return found\n"
        + "def bare():\n    return watched(ch.watch(one))\n",
    ),
    case(
        "ch.models.circuits(one)",
        (
            "circuits(seen)",
            "ch.models.@.qk(1, 0).dense()",
            "second.q_proj.weight[:8].T @ second.k_proj.weight[:8]",
        ),
        setup=SETUP.replace("def seen(", "def recorded(") + "seen = recorded()\n",
    ),
    case(
        "of_gradients()[0].transformed_norms",
        ("values=True", "of_gradients(@)[0].transformed_norms", "norms()"),
        setup=SETUP
        + "def of_gradients(**more):\n    with ch.watch(one, gradients=True, **more) as found:\n        one(IDS)\n"
        + "    return found\n",
    ),
    case(
        "later[0].transformed_norms",
        ("Read this before the next step of the optimizer", "kept # @", "norms() / 2"),
        setup=SETUP
        + "later = seen()\nkept = later[0].transformed_norms\n"
        + "with torch.no_grad():\n    first.o_proj.weight.mul_(2)\n",
    ),
    case(
        "ch.models.circuits(one, IDS).qk(1, slice(0, 2))",
        (
            "pass one of them",
            "ch.models.circuits(one, IDS).qk(1, 0).dense() # @",
            "second.q_proj.weight[:8].T @ second.k_proj.weight[:8]",
        ),
        setup=SETUP,
    ),
    case(
        "metric(one.model(IDS))",
        ("pass it with its head", "metric(one(IDS)) # @", "whole()[:, -1, 7]"),
        setup=SETUP,
    ),
    case(
        "three.grid('head', 'position')",
        ("layer=0", "torch.from_numpy(three.grid('head', 'position', @)[0])", "first_layer.view(2, 3)"),
        setup=SETUP
        + "rows, columns = 'head', 'position'\n"
        + "cut = lambda layer, head, position: ch.edits.Ablate(layer, head, queries=position)\n"
        + "three = ch.models.sweep(one, cut, IDS[:, :3], metric, ('layer', 'head', 'position'))\n"
        + "first_layer = torch.tensor([row['effect'] for row in three if row['layer'] == 0], dtype=torch.float64)\n",
    ),
    case(
        "by_position.values",
        ("grid(rows, columns)", "torch.from_numpy(by_position.@[0])", "whole_grid"),
        setup=SETUP
        + "rows, columns = 'layer', 'position'\n"
        + "cut = lambda layer, position: ch.edits.Ablate(layer, queries=position)\n"
        + "by_position = ch.models.sweep(one, cut, IDS, metric, (rows, columns))\n"
        + "whole_grid = torch.tensor([[row['effect'] for row in by_position if row['layer'] == n] for n in (0, 1)],\n"
        + "                          dtype=torch.float64)\n",
    ),
    case(
        "swept(IDS.T, turned, batch=2)",
        ("batch=1", "swept(IDS.T, turned, @)", "swept()"),
        setup=SETUP
        + "class Turned(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.one = one\n"
        + "    def forward(self, ids):\n        return self.one(ids.T)\nturned = Turned()\n",
    ),
    case(
        "swept({'input_ids': IDS, 'past_key_values': transformers.DynamicCache()}, batch=2)",
        ("batch=1", "swept({'input_ids': IDS, 'past_key_values': transformers.DynamicCache()}, @)", "swept()"),
        setup=SETUP,
    ),
    case(
        "swept(IDS.flip(1), folder=folder)",
        (
            "Pass a folder that only this sweep uses",
            "swept(IDS.flip(1), folder=f'{folder}/own') # @",
            "swept(IDS.flip(1))",
        ),
        setup=SETUP
        + "import atexit, shutil, tempfile\nfolder = tempfile.mkdtemp()\natexit.register(shutil.rmtree, folder, True)\nswept(folder=folder)\n",
    ),
    case(
        "damaged(['one'])",
        ("Delete it and all lines after it", "damaged([]) # @", "swept()"),
        setup=SETUP + FOLDER,
    ),
    case(
        "unwritten()",
        ("start again with the same arguments once it can be written", "unwritten(again=True) # @", "swept()"),
        setup=SETUP + FOLDER,
    ),
    case(
        "estimated(lambda out: out.logits.argmax())",
        (
            "ch.models.logit_difference(token)",
            "estimated(@)",
            "torch.tensor([row['effect'] for row in halved(metric)])",
        ),
        (
            "ch.models.sweep",
            "torch.tensor([row['value'] for row in @(one, half, IDS, lambda out: out.logits.argmax())])",
            "torch.tensor([row['value'] for row in halved(lambda out: out.logits.argmax())])",
        ),
        setup=SETUP
        + "token, half = 7, lambda layer, head: ch.edits.ScaleHeads(layer, head, 1 - 1e-6)\n"
        + "def halved(metric):\n    return ch.models.sweep(one.double(), half, IDS, metric)\n"
        + "def estimated(metric):\n    found = ch.models.attribution_patching(one.double(), half, IDS, metric)\n"
        + "    return found.values.float().flatten()\n",
    ),
    case(
        "warned(lambda: ch.models.attribution_patching(one, direct, IDS, metric, exact=0))",
        (
            "ch.models.sweep",
            "@(one, direct, IDS, metric).values[0, 1].float()",
            "metric(types.SimpleNamespace(logits=held())).mean() - metric(one(IDS)).mean()",
        ),
        setup=SETUP
        + "import types\nhere, there = seen(), seen(IDS.flip(1))\n"
        + "direct = lambda layer, head: [ch.edits.Patch(here), ch.edits.Patch(there, layer, head)]\n"
        + "def held():\n    of_head = lambda module, given: (torch.cat((given[0][..., :8], moved), -1),)\n"
        + "    moved = there[0].output[:, 1]\n"
        + "    fixed = lambda module, given: (here[1].output.transpose(1, 2).flatten(2),)\n"
        + "    hooks = [first.o_proj.register_forward_pre_hook(of_head),\n"
        + "             second.o_proj.register_forward_pre_hook(fixed)]\n"
        + "    logits = one(IDS).logits\n    for hook in hooks:\n        hook.remove()\n    return logits\n",
    ),
    case(
        "within()",
        (
            "outside of the edit's `with`",
            "within(False) # @",
            "torch.tensor([row['effect'] for row in ch.models.sweep(one, zero, IDS, metric)])",
        ),
        setup=SETUP
        + "zero = lambda layer, head: ch.edits.Ablate(layer, head)\n"
        + "def within(edited=True):\n    if edited:\n        with ch.edit(one, ch.edits.Ablate(0, 0)):\n"
        + "            ch.models.attribution_patching(one, zero, IDS, metric)\n"
        + "    found = ch.models.attribution_patching(one, zero, IDS, metric, exact=4)\n"
        + "    return torch.tensor([row['exact'] for row in found])\n",
    ),
    case(
        "ch.models.attribution_patching(silent, zero, IDS, metric)",
        (
            "ch.models.sweep",
            "torch.tensor([row['value'] for row in @(silent, zero, IDS, metric)])",
            "swept()",
        ),
        setup=SETUP
        + "class Silent(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.one = one\n"
        + "    @torch.no_grad()\n    def forward(self, ids):\n        return self.one(ids)\nsilent = Silent()\n"
        + "zero = lambda layer, head: ch.edits.Ablate(layer, head)\n",
    ),
    case(
        "stored(cut())[0].unedited.weights.dense()",
        (
            "ch.models.Recording([call.unedited for call in seen.calls]).write(path)",
            "with_path(lambda seen, path: @)[0].weights.dense()",
            "cut()[0].unedited.weights.dense()",
        ),
        setup=SETUP
        + "def cut():\n    with torch.no_grad(), ch.watch(one) as found, ch.edit(one, ch.edits.Knockout(0, keys=0)):\n"
        + "        one(IDS)\n    return found\n"
        + "import tempfile\n"
        + "def with_path(write):\n    with tempfile.TemporaryDirectory() as folder:\n"
        + "        return ch.models.load_recording(write(cut(), folder + '/seen'))\n"
        + "def stored(found):\n    return with_path(lambda seen, path: seen.write(path))\n",
    ),
    case(
        "kept()[0].unedited.weights.dense()",
        ("ch.watch(model)", "inside(@)[0].unedited.weights.dense()", "before()[0].weights.dense()"),
        setup=SETUP
        + "model = one\n"
        + "def inside(watching):\n    with torch.no_grad(), watching as found, ch.edit(one, ch.edits.Knockout(0, keys=0)):\n"
        + "        one(IDS)\n    return found\n"
        + "def kept():\n    return inside(ch.models.statistics(one, ch.reductions.Entropy()))\n"
        + "def before():\n    with torch.no_grad(), ch.watch(one) as found:\n        one(IDS)\n    return found\n",
    ),
    case(
        "scaled(2.0).compare(scaled(1.0))",
        (
            "parts by hand: seen[0].weights[index]",
            "(scaled(2.0)[0].weights[index] - scaled(1.0)[0].weights[index]) # @",
            "scaled(1.0)[0].weights[index]",
        ),
        setup=SETUP
        + "index = (0, 1, 3)\n"
        + "def scaled(factor):\n    with torch.no_grad(), ch.watch(one) as found, ch.edit(one, ch.edits.ScaleHeads(0, 1, factor)):\n"
        + "        one(IDS)\n    return found\n",
    ),
    case(
        "patched(recording)",
        ("recording.runs[0]", "patched(@, part='value')", "patched(seen(), part='value')"),
        setup=SETUP + "recording = seen(IDS, IDS.flip(1))\n",
    ),
    case(
        "patched(torch.zeros(3, 2, 6, 8))",
        ("of one for all", "patched(torch.zeros(1, 2, 6, 8)) # @", "patched(torch.zeros(2, 2, 6, 8))"),
        setup=SETUP,
    ),
    case(
        "patched(source)",
        ("source.to('cpu', torch.float32)", "patched(@)", "patched(torch.zeros(2, 2, 6, 8))"),
        setup=SETUP + "source = torch.zeros(2, 2, 6, 8, dtype=torch.float64)\n",
    ),
    case(
        "patched(step, part='query')",
        ("Pass a run on the whole text", "patched(seen(), part='query') # @", "whole()"),
        setup=SETUP
        + "cache = transformers.DynamicCache()\nwith torch.no_grad():\n    one(IDS, past_key_values=cache)\n"
        + "step = seen(IDS[:, :1], past_key_values=cache)\n",
    ),
    case(
        "patched(seen(IDS[:, :4]), part='weights')",
        ("of the same length", "patched(seen(), part='weights') # @", "whole()"),
        setup=SETUP,
    ),
    case(
        "patched(shorter)",
        (
            "positions=([of this text], [of the source])",
            "patched(shorter, positions=([0, 1, 2, 3], [0, 1, 2, 3])) # @",
            "whole()",
        ),
        setup=SETUP + "shorter = seen(IDS[:, :4])\n",
    ),
    case(
        "patched(shifted(), part='key', positions=(range(5), range(1, 6)))",
        ("part='value'", "patched(shifted(), layers=0, positions=(range(5), range(1, 6)), @)", "whole()"),
        (
            "a tensor (B, H, L, E), turned for the positions of this text",
            "patched(seen()[0].key, layers=0, part='key', positions=(range(5), range(5))) # @",
            "whole()",
        ),
        setup=SETUP + "def shifted():\n    return seen(torch.cat([IDS[:, :1], IDS[:, :5]], 1))\n",
    ),
    case(
        "ran('mine')",
        (
            "transformers.AttentionMaskInterface.register('mine', transformers.masking_utils.eager_mask)",
            "(@, ran('mine'))[1]",
            "ran('eager')",
        ),
        setup=SETUP
        + "sizes = {**config.to_dict(), 'sliding_window': 2, 'head_dim': 8}\n"
        + "windowed = transformers.MistralModel(transformers.MistralConfig(**sizes)).eval()\n"
        + "def mine(module, query, key, value, attention_mask, scaling, **options):\n"
        + "    scores = query @ key.mT * scaling + (0 if attention_mask is None else attention_mask)\n"
        + "    return (scores.softmax(-1) @ value).transpose(1, 2), None\n"
        + "transformers.AttentionInterface.register('mine', mine)\n"
        + "def ran(backend):\n    windowed.config._attn_implementation = backend\n"
        + "    with torch.no_grad(), ch.watch(windowed) as found:\n        windowed(IDS)\n"
        + "    return found[0].weights.dense()\n",
    ),
    case(
        "warned(lambda: ch.models.logit_attribution(model, inputs, token))",
        (
            "ch.models.sweep(model, lambda layer, head: ch.edits.Ablate(layer, head), inputs, "
            "ch.models.logit_difference(token))",
            "torch.tensor([row['value'] for row in @])",
            "swept()",
        ),
        setup=SETUP
        + "model, inputs, token = one, IDS, 7\n"
        + "first.o_proj = torch.nn.Sequential(torch.nn.LayerNorm(16), first.o_proj).eval()\n",
    ),
    case(
        "nowhere().plot()",
        (
            "table()",
            "torch.tensor([row['attribution'] for row in nowhere().@]).sum()",
            "whole()[:, -1, 7].mean()",
        ),
        setup=SETUP
        + "import warnings\nfor each in (first, second):\n"
        + "    each.o_proj = torch.nn.Sequential(torch.nn.LayerNorm(16), each.o_proj).eval()\n"
        + "def nowhere():\n    with warnings.catch_warnings():\n        warnings.simplefilter('ignore')\n"
        + "        return ch.models.logit_attribution(one, IDS, 7)\n",
    ),
    case(
        "warned(lambda: recorded(batch=2))",
        ("batch=1", "recorded(@)", "swept()"),
        setup=SETUP + "def recorded(**options):\n    with ch.watch(one):\n        return swept(**options)\n",
    ),
    case(
        "fixed(batch=2)",
        ("batch=1", "fixed(@)", "fixed()"),
        setup=SETUP
        + "class Fixed(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        + "        self.first, self.second = Block(), Block()\n"
        + "    def forward(self, x):\n        return self.first(x).sum((1, 2)) + self.second(q).sum()\n"
        + "def fixed(**options):\n    make = lambda layer, head: ch.edits.Ablate(layer, head)\n"
        + "    found = ch.models.sweep(Fixed(), make, q + 1, lambda out: out.sum(), **options)\n"
        + "    return torch.tensor([row['value'] for row in found])\n",
    ),
]
