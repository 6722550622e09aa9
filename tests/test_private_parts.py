"""Private names of PyTorch and transformers: used through the tables alone, and each may be missing."""

import ast
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.base.torch_state import private as private_names
from clearhead.models.interception import transformers_private

SOURCE = Path(ch.__file__).parent
HOMES = {SOURCE / "base" / "torch_state" / f"{name}.py" for name in ("private", "torch_private", "active")}
HOMES |= {SOURCE / "models" / "interception" / "transformers_private.py"}
FILES = sorted(set(SOURCE.rglob("*.py")) - HOMES)
PARTS = private_names.PURPOSES | transformers_private.PURPOSES
# attributes that the compiler sets or reads; whether a version still does so cannot be seen
MARKS = ("_dynamo_marked_constant", "_torchdynamo_disable", "_torchdynamo_disable_msg", "_orig_mod")
MARKS += ("_torchdynamo_orig_callable", transformers_private.ORIGIN)
NAMEDTUPLE = {"_replace", "_asdict", "_fields", "_field_defaults"}
STANDARD = {"os._exit"}  # of Python itself
STEPS = {step.removesuffix("()") for name in (*PARTS, *MARKS) for step in name.split(".") if step.startswith("_")}
LABELS = {"_native_multi_head_attention", "_transformer_encoder_layer_fwd"}  # a record's backend, in words


def private(name):
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name.strip("_") != ""


def theirs():
    """Private names that objects of PyTorch's have, and those of the tables."""
    owners = [torch.Tensor, torch.nn.Module(), torch.autograd.Function]
    found = {name for owner in owners for name in dir(owner)}
    return {name for name in found | {name.split(".")[-1] for name in (*PARTS, *MARKS)} if private(name)}


def own_names(tree):
    """Private names that a file gives to what is its own: functions, fields, and what it assigns to `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.arg):
            yield node.arg


def uses(tree):
    """Each private name that is used, with the code around it, and whether it is looked up on `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            yield (
                node.lineno,
                node.attr,
                ast.unparse(node),
                isinstance(node.value, ast.Name) and node.value.id == "self",
            )
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for full in (f"{module}.{alias.name}".strip(".") for alias in node.names):
                if not full.startswith("clearhead"):
                    yield from ((node.lineno, word, full, False) for word in full.split(".") if private(word))
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, word.arg, f"{word.arg}=", False) for word in node.keywords if word.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            whole = node.value.isidentifier() or node.value.replace(".", "").isidentifier()
            for word in node.value.split(".") if whole else ():
                yield node.lineno, word, repr(node.value), False


@functools.cache
def sources():
    """The files, and the private names that each gives to what is its own."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    return trees, {path: {name for name in own_names(tree) if private(name)} for path, tree in trees.items()}


def foreign(trees):
    """Every use of a private name that is none of the sources' own."""
    own, outside = sources()[1], theirs()
    every = set().union(*own.values())
    for path, tree in trees.items():
        quoted = {word for _, word, code, _ in uses(tree) if code[0] in "'\""}
        for line, name, code, on_self in uses(tree):
            if not private(name) or name in NAMEDTUPLE or code in STANDARD:
                continue
            if code[0] in "'\"":
                wrong = name in (outside - every) | STEPS and name not in LABELS
            elif name in outside:
                wrong = not (on_self and name in own.get(path, ()))
            else:
                wrong = name not in every | quoted  # names that `object.__setattr__` and `__dict__` give
            if wrong:
                yield f"{path.name}:{line} {code}"


def test_private_names_are_used_through_the_tables_alone():
    assert list(foreign(sources()[0])) == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._guards import TracingContext",
        "from torch.overrides import _pop_mode_temporarily",
        "torch._C._get_tracing_state()",
        "tensor._version",
        "tensor._base is None",
        "module._forward_hooks",
        "layer._parameters.items()",
        "torch.ops.aten._fused_sdp_choice(q)",
        "config._attn_implementation = 'eager'",
        "getattr(config, '_attn_implementation', None)",
        "hasattr(forward, '_torchdynamo_orig_callable')",
        "replaced(nn.Module, '_call_impl', wrap)",
        "sys.modules.get('torch._dynamo')",
        "model.compile(_nobody=True)",
        "thing._nobody_has_this",
        "class Own(nn.Module):\n    def forward(self):\n        return self._parameters",
    ],
)
def test_another_use_would_be_found(code):
    assert list(foreign({Path("new.py"): ast.parse(code)}))


def test_only_the_base_asks_what_compiles_and_casts():
    outside = {path: path.read_text(encoding="utf-8") for path in FILES if SOURCE / "base" not in path.parents}
    words = ("torch._C", "is_compiling", "is_autocast_enabled", "_functorch")
    assert [path for path, text in outside.items() if any(word in text for word in words)] == []


def test_the_tables_say_what_each_name_serves():
    for name, purpose in PARTS.items():
        assert purpose.startswith("to "), name
        assert any(private(step.removesuffix("()")) for step in name.split(".")), name


# ------------------------------------------------------------------------------------------------- where one is missing

NAMES = {name: name.removesuffix(".default").split(".")[-1] for name in PARTS}


@pytest.fixture(scope="module")
def ran(request):
    """What each use gives where a name is missing, by that name; "" for nothing missing, "all" for all at once."""
    tests = [item for item in request.session.items if getattr(item, "originalname", None) == WHERE_MISSING]
    asked = {item.callspec.params["name"] for item in tests}
    every = sorted(set(NAMES.values()))
    missing = {"": [], "all": every, "all, compiled": every, **{name: [leaf] for name, leaf in NAMES.items()}}
    given = json.dumps({name: leaves for name, leaves in missing.items() if not name or name in asked})
    script = Path(__file__).with_name("missing_parts.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], input=given, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


WHERE_MISSING = "test_without_a_name_the_numbers_are_the_same_or_an_error_says_so"


def test_without_any_missing_all_runs(ran):
    assert {use: found for use, found in ran[""].items() if isinstance(found, str)} == {}


@pytest.mark.parametrize("name", [*PARTS, "all", "all, compiled"])
def test_without_a_name_the_numbers_are_the_same_or_an_error_says_so(ran, name):
    assert len(ran[name]) > 20  # clearhead was imported
    refused = {use: found for use, found in ran[name].items() if isinstance(found, str)}
    for use, found in ran[name].items():
        if use not in refused:
            assert found == pytest.approx(ran[""][use], rel=1e-5, abs=1e-5, nan_ok=True), (
                use
            )  # of float32, some twice differentiated
    for use, found in refused.items():
        kind = found.removeprefix("InternalTorchDynamoError: ")  # where the compiler has met the error
        assert kind.startswith("UnsupportedError") and "which clearhead needs to" in found, (use, found)
        assert name not in PARTS or NAMES[name] in found, (use, found)
    assert refused
