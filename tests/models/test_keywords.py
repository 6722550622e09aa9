"""What the models of transformers pass to an attention backend is known to clearhead: read from their sources."""

import ast
import gc
import inspect
import os
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.models.interception.keywords import NOT_READ, READ, loss_words

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")

LISTED = {*READ, *NOT_READ, "sinks"}  # sinks of each query are an error
OWN = {"query", "key", "value", "attention_mask"}  # the interface's own arguments, by name
BACKEND = "the backend"
LEAVES = ast.Name, ast.Constant, ast.expr_context, ast.operator, ast.cmpop


class Source:
    """One modelling file: which class hands its `**kwargs` to which, down to the attention backend.

    Followed are calls of `self.attribute(...)`, and of what a loop takes from one, with what the file's own classes
    assign to that attribute. What a model is called with from outside cannot be told.
    """

    def __init__(self, text):
        tree = ast.parse(text)
        self.classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self.assigned = defaultdict(set)
        methods = [
            (name, function, nodes_of(function))
            for name, node in self.classes.items()
            for function in node.body
            if isinstance(function, ast.FunctionDef)
        ]
        for name, _, nodes in methods:
            for line in nodes:
                if isinstance(line, ast.Assign) and _of_self(line.targets[0]):
                    made = {part.id for part in ast.walk(line.value) if isinstance(part, ast.Name)}
                    self.assigned[name, line.targets[0].attr] |= made & set(self.classes)
        self.given, self.hands_on, self.takes = [], defaultdict(set), {}
        for method in methods:
            self.read(*method)

    def attribute(self, owner, attribute):
        if (owner, attribute) in self.assigned:
            return self.assigned[owner, attribute]
        bases = [base.id for base in self.classes[owner].bases if isinstance(base, ast.Name)]
        return set().union(*(self.attribute(base, attribute) for base in bases if base in self.classes))

    def read(self, owner, function, nodes):
        rest = function.args.kwarg and function.args.kwarg.arg
        if function.name == "forward":
            self.takes[owner] = {one.arg for one in function.args.args + function.args.kwonlyargs}
        named, from_loop, tables = set(), defaultdict(set), {}
        for node in nodes:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                asked = node.value.func if isinstance(node.value, ast.Call) else None
                if isinstance(target, ast.Name) and isinstance(asked, ast.Attribute) and asked.attr == "get_interface":
                    named.add(target.id)
                if isinstance(target, ast.Name) and isinstance(node.value, ast.Dict):
                    tables[target.id] = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            if isinstance(node, ast.For | ast.comprehension):
                attributes = {part.attr for part in ast.walk(node.iter) if _of_self(part)}
                for part in ast.walk(node.target):
                    if isinstance(part, ast.Name):
                        from_loop[part.id] |= attributes
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            attributes = {call.func.attr} if _of_self(call.func) else set()
            if isinstance(call.func, ast.Name):
                attributes = from_loop.get(call.func.id, set())
            targets = set().union(*(self.attribute(owner, one) for one in attributes))
            if isinstance(call.func, ast.Name) and call.func.id in named | {"attention_interface"}:
                targets.add(BACKEND)
            for keyword in call.keywords:
                shown = keyword.value.id if isinstance(keyword.value, ast.Name) else None
                words = [keyword.arg] if keyword.arg else tables.get(shown, [])
                self.given += [(target, word) for target in targets for word in words]
                if keyword.arg is None and shown and shown == rest and function.name == "forward":
                    self.hands_on[owner] |= targets

    def arrives(self, target, word, path=()):
        """Whether what `target` is given by this name reaches the backend, in its `**kwargs` and those below."""
        if target == BACKEND:
            return True
        if word in self.takes.get(target, ()) or target in path:
            return False
        return any(self.arrives(one, word, (*path, target)) for one in self.hands_on[target])

    def keywords(self):
        return {word for target, word in self.given if self.arrives(target, word)} - OWN


def nodes_of(tree):
    """All of a tree as `ast.walk` has them, but names and constants, of which there are most."""
    found = [tree]
    for node in found:  # which grows
        for name in node._fields:
            value = getattr(node, name, None)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST) and not isinstance(child, LEAVES):
                    found.append(child)
    return found


def _of_self(node):
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def test_every_keyword_that_a_model_passes_is_known():
    passed = defaultdict(set)
    gc.disable()  # it would look through each tree many times
    try:
        for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
            text = path.read_text(encoding="utf-8")
            if "get_interface" in text:
                for word in Source(text).keywords():
                    passed[word].add(path.stem)
    finally:
        gc.enable()
    assert len(passed["scaling"]) > 300 and {"position_ids", "s_aux", "indices", "block_indices"} <= set(passed)
    assert {word: sorted(files) for word, files in passed.items() if word not in LISTED} == {}


def llama(**options):
    torch.manual_seed(0)
    config = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    return transformers.LlamaModel(transformers.LlamaConfig(**config, num_attention_heads=4, **options)).eval()


IDS = torch.arange(6)[None]


@pytest.mark.parametrize("backend", ["sdpa", "eager", "clearhead"])
@pytest.mark.parametrize("words", [{"head_mask": torch.ones(4)}, {"cache": object()}, {"sinks": torch.zeros(4)}])
def test_an_unknown_keyword_is_an_error_that_names_it(backend, words):
    model = llama(attn_implementation="sdpa" if backend == "clearhead" else backend)
    (word,) = words
    said = rf"'{backend}' with '{word}'(.|\n)*may change the weights"
    if backend == "clearhead":
        with pytest.raises(ch.UnsupportedError, match=said), torch.no_grad():
            ch.models.run_on_clearhead(model)(IDS, **words)
    else:
        with pytest.warns(UserWarning, match=said), torch.no_grad(), ch.watch(model) as seen:
            model(IDS, **words)
        assert not seen.calls


def test_what_is_none_and_what_changes_no_weight_is_no_error():
    model = llama()
    words = {"head_mask": None, "token_type_ids": torch.zeros_like(IDS), "output_hidden_states": True}
    with torch.no_grad():
        plain = model(IDS, **words)[0]
        with ch.watch(model) as seen:
            assert torch.equal(model(IDS, **words)[0], plain)
        torch.testing.assert_close(ch.models.run_on_clearhead(model)(IDS, **words)[0], plain, atol=1e-5, rtol=0)
    assert len(seen.calls) == 1


def test_each_keyword_stands_in_one_list_with_a_reason():
    assert not READ & NOT_READ.keys() and all(NOT_READ.values())


LOSSES = {
    "shift_labels": torch.cat([IDS[:, 1:], torch.full((1, 1), -100)], 1),
    "ignore_index": 3,
    "num_items_in_batch": 5,
}


@pytest.mark.parametrize("word", LOSSES)
def test_a_keyword_of_the_loss_passes_through(word):
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4)).eval()
    given = {word: LOSSES[word], "labels": IDS}
    with torch.no_grad():
        right = model(IDS, **given).loss
        with ch.watch(model) as seen:
            assert torch.equal(model(IDS, **given).loss, right)
        ch.models.run_on_clearhead(model)
        torch.testing.assert_close(model(IDS, **given).loss, right)
        with ch.watch(model) as again:
            model(IDS, **given)
    assert len(seen) == len(again) == 1


def test_no_keyword_of_a_loss_is_read_by_an_attention_function():
    """The rule by which a keyword of a loss passes: no attention function of transformers has such a parameter."""
    functions = transformers.modeling_utils.AttentionInterface._global_mapping
    mapping = {name: one for name, one in functions.items() if f"{one.__module__}".startswith("transformers.")}
    read = {word for one in mapping.values() for word in inspect.signature(one).parameters}
    losses = {*loss_words()} - {"kwargs"}
    assert {"shift_labels", "ignore_index", "labels"} <= losses and {"scaling", "s_aux"} <= read
    assert not losses & read and not losses & READ
