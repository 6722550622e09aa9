"""The house: imports run downward only, `import clearhead` is light, and every public name says what it does."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import clearhead as ch

SOURCE = Path(ch.__file__).parent
# Each layer may import those to its right alone. Modules of one layer may import each other, but for those below.
ORDER = [
    "cli",
    "models",
    "report",
    "explanation",
    "nn",
    "inspection",
    "_drop_in",
    "_attention",
    "_compiled",
    "engines",
    "_native",
    "_pieces",
    "_differentiable",
    "_backward",
    "_tiles",
    "_problem",
    "_unseen",
    "_reads",
    "scores masks biases",
    "_align",
    "_dropout",
    "_shapes",
    "_arguments",
    "_versions",
    "_closures",
    "_values",
    "_errors",
]
# In these every module stands alone: a new one is one new file.
APART = {
    "scores": {"base"},
    "masks": {"base", "_draw", "_lengths"},
    "biases": {"base"},
    "engines": {"base"},
    "inspection": {"base", "_index"},
}
GATHERS = {"engines.choose", "inspection.weights"}  # what knows all of its kind


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        if name not in ("__init__", "testing"):  # the public names, and the contract of all of it
            yield name.removesuffix(".__init__"), path, path.name == "__init__.py"


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("clearhead"):
            base = node.module.removeprefix("clearhead").strip(".")
            for alias in node.names:
                full = ".".join(filter(None, [base, alias.name]))
                is_module = (SOURCE / Path(*full.split("."))).with_suffix(".py").exists()
                yield full if is_module else base
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("clearhead.") for alias in node.names), path


def rank(name):
    top = name.split(".")[0]
    return next(i for i, names in enumerate(ORDER) if top in names.split())


@pytest.mark.parametrize(("name", "path", "package"), list(modules()), ids=lambda x: x if isinstance(x, str) else "")
def test_imports_run_downward(name, path, package):
    top = name.split(".")[0]
    for imported in imports_of(path):
        other, _, other_leaf = imported.partition(".")
        if other == top:
            if top in APART and not package and name not in GATHERS:
                assert other_leaf in APART[top], f"{name} imports {imported}: they stand alone"
            continue
        assert rank(imported) > rank(name), f"{name} imports {imported}, which stands above it or beside it"


def test_the_import_test_sees_imports():
    assert "_shapes" in set(imports_of(SOURCE / "_problem.py"))
    assert "engines.sdpa" in set(imports_of(SOURCE / "engines" / "choose.py"))
    assert rank("cli") < rank("masks.causal") == rank("scores.dot") < rank("_errors")


def test_importing_clearhead_is_light():
    code = "import clearhead, sys; print([m for m in ('transformers', 'matplotlib', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_package_bears_the_name_of_a_public_function():
    functions = {name for name, value in vars(ch).items() if inspect.isfunction(value)}
    assert functions >= {"attention", "weights", "watch", "plan"}
    assert not functions & {path.stem for path in SOURCE.iterdir()}


PUBLIC = {name: value for name, value in vars(ch).items() if not name.startswith("_") and not inspect.ismodule(value)}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_open_with_what_they_do_and_an_example(name):
    value = PUBLIC[name]
    text = inspect.getdoc(value)
    assert text and text.splitlines()[0].rstrip().endswith((".", ":")), name
    if not issubclass(value, ch.ClearheadError) if inspect.isclass(value) else True:
        has_example = ">>>" in text or name in ("Plan", "Seen", "Call")  # shown where they are made
        assert has_example, f"{name} has no example"
    if inspect.isfunction(value):
        assert len(inspect.signature(value).parameters) <= 8


@pytest.mark.parametrize("kind", [ch.Score, ch.Mask, ch.Bias], ids=lambda c: c.__name__)
def test_a_class_bears_the_name_of_its_file(kind):
    for cls in kind.__subclasses__():
        if cls.__module__.startswith("clearhead.") and not cls.__module__.endswith(".base"):
            words = cls.__module__.rsplit(".", 1)[1].split("_")
            assert cls.__name__.removesuffix("Mask").removesuffix("Bias").lower() == "".join(words)


def test_every_file_is_small():
    long = {name: len(path.read_text().splitlines()) for name, path, _ in modules()}
    assert max(long.values()) <= 400, sorted(long.items(), key=lambda item: -item[1])[:3]


FACTORIES = {"empty", "zeros", "ones", "full", "tensor", "arange", "linspace", "eye", "empty_strided", "rand", "randn"}


def test_new_tensors_do_not_take_the_callers_defaults():
    """Under a default dtype or device of the caller's they would be other numbers, or not numbers at all."""
    loose = []
    for name, path, _ in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        # what a module learns, or holds beside it, is made with the defaults, as in torch.nn; so are examples for tests
        kept = {"Parameter", "register_buffer"}
        allowed = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") in kept]
        allowed += [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "example"]
        inside = {id(inner) for outer in allowed for inner in ast.walk(outer)}
        for call in ast.walk(tree):
            function = getattr(call, "func", None)
            if not isinstance(call, ast.Call) or id(call) in inside or not isinstance(function, ast.Attribute):
                continue
            if (
                not isinstance(function.value, ast.Name)
                or function.value.id != "torch"
                or function.attr not in FACTORIES
            ):
                continue
            given = {keyword.arg for keyword in call.keywords}
            integers = function.attr in ("arange", "tensor")  # of whole numbers: int64 under every default
            if "device" not in given or not ("dtype" in given or integers):
                loose.append(f"{name}:{call.lineno} torch.{function.attr}")
    assert not loose


def test_types_are_shipped():
    assert (SOURCE / "py.typed").exists()
