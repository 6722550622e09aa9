"""The house: imports run downward only, `import clearhead` is light, and every public name says what it does."""

import ast
import functools
import inspect
import pydoc
import re
import sys
from pathlib import Path

import pytest
from apart import run
from public_api import FILE, format_api, list_public_names

import clearhead as ch

SOURCE = Path(ch.__file__).parent
DESIGN = Path(__file__).parents[1] / "docs" / "design.md"
# From the ground up: each floor may import those before it alone. What shares a line does not import each other.
FLOORS = [
    "base",
    "scores masks biases",
    "problem",
    "engines",
    "_attention",
    "inspection _drop_in _engine_comparison _partial _versions",
    "nn distributed",
    "explanation",
    "report",
    "models",
    "cli exercises",
]
# Modules that hold public names of others alone.
NAMESPACES = ("edits", "extend", "reductions", "results")
# In these folders every module stands alone, but for what is named: a new one is one new file.
APART = {
    "scores": {"base", "_pairwise", "pair_functions"},
    "masks": {"base", "_draw", "_read", "_spans", "combined", "first_keys", "mask_in_documents"},
    "biases": {"base"},
    "inspection.reductions": {"base"},
    "inspection.measures": {"base", "subject", "allowed"},
}


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        if name not in ("__init__", "__main__", "testing", *NAMESPACES):  # public names, and the contract of all of it
            yield name.removesuffix(".__init__"), path, path.name == "__init__.py"


@functools.cache
def imports_of(path):
    return tuple(_imports(path))


def _imports(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tests = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    for_types = {id(inner) for test in tests for inner in ast.walk(test)}
    for node in (n for n in ast.walk(tree) if id(n) not in for_types):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("clearhead"):
            base = node.module.removeprefix("clearhead").strip(".")
            for alias in node.names:
                full = ".".join(filter(None, [base, alias.name]))
                is_module = (SOURCE / Path(*full.split("."))).with_suffix(".py").exists()
                yield full if is_module else base
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("clearhead.") for alias in node.names), path


def floor(name):
    top = name.split(".")[0]
    return next(i for i, names in enumerate(FLOORS) if top in names.split())


def test_imports_run_downward():
    for name, path, package in modules():
        folder = name.rpartition(".")[0]
        for imported in imports_of(path):
            if imported.split(".")[0] == name.split(".")[0]:
                other_folder, _, leaf = imported.rpartition(".")
                if folder in APART and folder == other_folder and not package:
                    assert leaf in APART[folder], f"{name} imports {imported}: they stand alone"
                continue
            assert floor(imported) < floor(name), f"{name} imports {imported}, which stands above it or beside it"


# The same inside of `models`, by the beginnings of names.
MODELS = [
    "table loading origins. model_calls",
    "interception.",
    "backend. recordings.",
    "edits.",
    "recorder.",
    "lazy_matrices. monitoring. comparison.",
    "views.",
    "surveys.",
    "recording watch audits. causes.",
]


def models_floor(name):
    """Of the longest beginning that fits."""
    found = [(len(start), i) for i, names in enumerate(MODELS) for start in names.split() if fits(name, start)]
    return max(found)[1]


def fits(name, start):
    return name.startswith(start) if start.endswith(".") else name == start


def test_models_are_met_once_and_looked_at_from_above():
    """The interception knows no handler's work, and only `views` and what stands above it makes pages."""
    above_masks = {"engines", "inspection", "nn", "distributed", "explanation", "report", "cli"}
    for name, path, package in modules():
        part, _, inside = name.partition(".")
        if part != "models" or package:
            continue
        for imported in imports_of(path):
            first, _, other = imported.partition(".")
            if first == "models":
                same_folder = "." in inside and inside.split(".")[0] == other.split(".")[0]
                lower = models_floor(other) < models_floor(inside)
                assert lower or same_folder or models_floor(inside) == len(MODELS) - 1, f"{name} imports {imported}"
            elif inside.startswith("interception."):
                # clearhead's own attention is met where it computes, by the engine that it has chosen
                assert first not in above_masks or (inside == "interception.intercept" and first == "engines"), (
                    name,
                    imported,
                )
            elif first == "report":
                assert models_floor(inside) >= MODELS.index("views."), f"{name} imports {imported}"


def test_no_modules_import_each_other_in_a_circle():
    imports = {name: {i for i in imports_of(path) if i != name} for name, path, _ in modules()}
    while imports:
        free = {name for name, needs in imports.items() if not needs & imports.keys()}
        assert free, f"a circle among {sorted(imports)}"
        imports = {name: needs for name, needs in imports.items() if name not in free}


def test_the_import_test_sees_imports():
    assert "base.shapes" in set(imports_of(SOURCE / "problem" / "problem.py"))
    assert "engines.sdpa.engine" in set(imports_of(SOURCE / "engines" / "choose.py"))
    assert floor("cli") > floor("masks.causal") == floor("scores.dot") > floor("base.errors")


def picture():
    """A row for each floor, from the top down, and a column for each below it: ■ where the row imports of it."""
    names = " ".join(FLOORS).split()
    found = {name: set() for name in names}
    for name, path, _ in modules():
        for other in imports_of(path):
            found[name.split(".")[0]].add(other.split(".")[0])
    width = max(map(len, names))
    lines = []
    for i, name in reversed(list(enumerate(names))):
        cells = "".join("  ■" if other in found[name] else "  ·" for other in names[:i])
        lines.append(f"{i:2} {name.ljust(width)}{cells}")
    lines.append(" " * (width + 3) + "".join(f"{i:3}" for i in range(len(names) - 1)))
    return "\n".join(line.rstrip() for line in lines)


def test_the_picture_of_the_floors_is_true():
    text = DESIGN.read_text(encoding="utf-8")
    assert picture() in text, f"docs/design.md should have this picture of the floors:\n{picture()}"


def test_importing_clearhead_is_light():
    heavy = ("transformers", "matplotlib", "rich", "torch._dynamo", "clearhead.models", "clearhead.report")
    code = f"import clearhead, sys; print([m for m in {heavy} if m in sys.modules])"
    done = run(code, strict=True)
    assert done.out.strip() == "[]", done.errors


def test_every_public_name_is_there_before_it_is_imported():
    imported = {}
    for node in ast.walk(ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("clearhead"):
            imported |= {alias.name: node.module for alias in node.names if alias.asname == alias.name}
    assert sorted(ch.__all__) == sorted(imported)  # what type checkers see is what there is
    code = (
        "import clearhead as ch; assert {*ch.__all__} <= {*dir(ch)} and not hasattr(ch, 'wacth')\n"
        "from clearhead import *; found = {name: globals()[name] for name in ch.__all__}\n"
        f"for name, module in {imported!r}.items():\n"
        "    assert found[name] is getattr(ch, name), name\n"
        "    assert found[name] is getattr(__import__(module, fromlist=[name]), name), name\n"
        "print(len(found))"
    )
    done = run(code, strict=True)
    assert done.status == 0 and int(done.out) == len(imported), done.errors


def test_no_package_bears_the_name_of_a_public_function():
    functions = {name for name in ch.__all__ if inspect.isfunction(getattr(ch, name))}
    assert functions >= {"attention", "weights", "watch", "plan"}
    assert not functions & {path.stem for path in SOURCE.iterdir()}


PUBLIC = dict(list_public_names())
# Classes whose objects are shown where they are made, and forms that parts of one's own are given
MADE = {"results.Plan", "distributed.RankPlan", "distributed.Share", "distributed.ShardedBatch"}
MADE |= {f"extend.{name}" for name in ("Cost", "Found", "Partial", "Problem", "Sizes", "Summary")}
MADE |= {
    f"models.{name}" for name in ("AttentionCall", "ReducedCall", "Statistics", "Monitor", "Distinctive", "Recording")
}
MADE |= {
    f"models.{name}"
    for name in ("AuditFinding", "AuditReport", "AuditTest", "Differences", "CallDifference", "Framed", "Survey")
}
MADE |= {f"models.{name}" for name in ("AttributedCall", "Circuits", "LogitAttribution", "Projections", "SVD", "Sweep")}


@pytest.mark.parametrize("space", sorted({name.partition(".")[0] for name in PUBLIC if "." in name} - {"testing"}))
def test_help_of_a_namespace_shows_its_names_and_a_star_imports_no_others(space):
    wanted = {name.partition(".")[2] for name in PUBLIC if name.startswith(f"{space}.")}
    found = {}
    exec(f"from clearhead.{space} import *", found)
    assert found.keys() - {"__builtins__"} == wanted
    told = pydoc.plain(pydoc.render_doc(getattr(ch, space)))
    assert all(re.search(rf"^    (class )?{name}\(", told, re.MULTILINE) for name in wanted)


def test_the_public_api_is_that_of_its_file():
    assert format_api() == FILE.read_text(encoding="utf-8"), "run `.venv/bin/python tests/public_api.py --write`"


def test_the_top_holds_few_names():
    assert len(ch.__all__) <= 45


def test_public_names_open_with_what_they_do_and_an_example():
    for name, value in PUBLIC.items():
        text = inspect.getdoc(value)
        assert text and text.splitlines()[0].rstrip().endswith((".", ":")), name
        needs_more = name.startswith(("distributed.", "testing."))  # several processes; the class that is checked
        if not needs_more and (not inspect.isclass(value) or not issubclass(value, ch.ClearheadError)):
            assert ">>>" in text or name in MADE, f"{name} has no example"
        if inspect.isfunction(value):
            # of attention and `watch`, which take many options
            operands = {"query", "key", "value", "valid_lens", "layout", "model", "padding", "others"}
            assert len(inspect.signature(value).parameters.keys() - operands) <= 8, name


@pytest.mark.parametrize("kind", [ch.extend.Score, ch.extend.Mask, ch.extend.Bias], ids=lambda c: c.__name__)
def test_a_class_bears_the_name_of_its_file(kind):
    for cls in kind.__subclasses__():
        of_the_package = (
            getattr(sys.modules[cls.__module__], cls.__name__, None) is cls
        )  # not one of a docstring's example
        if of_the_package and cls.__module__.startswith("clearhead.") and not cls.__module__.endswith(".base"):
            words = cls.__module__.rsplit(".", 1)[1].split("_")
            assert cls.__name__.removesuffix("Mask").removesuffix("Bias").lower() == "".join(words)


def test_every_file_is_small():
    long = {name: len(path.read_text().splitlines()) for name, path, _ in modules()}
    assert max(long.values()) <= 600, sorted(long.items(), key=lambda item: -item[1])[:3]


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


def test_modules_say_what_they_do_and_what_they_are_called_with():
    for name, value in vars(ch.nn).items():
        if not inspect.isclass(value):
            continue
        text = inspect.getdoc(value)
        assert text and ">>>" in text.split("\n\n")[1], f"{name} does not open with an example"
        for method in ("forward", "prepare", "append", "reorder", "crop", "reset", "from_torch", "to_torch"):
            assert method not in vars(value) or vars(value)[method].__doc__, (name, method)
