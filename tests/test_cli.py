"""The command: its summary, its page and its errors."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from clearhead import cli
from clearhead.explanation.examples import example

transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
TEXT = "The pump in Broad Street. <script>alert('x')</script> & \"quotes\" [bold]rich[/bold]"


def run(capsys, *arguments):
    status = cli.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_report_writes_a_page_and_a_summary(tmp_path, capsys):
    page = tmp_path / "page.html"
    status, out, err = run(capsys, "report", TEXT, "-o", page)
    assert status == 0 and not err
    for word in ("most focused", "most diffuse", "sink", "distance", "encoder.layer.5", "[CLS]", "page.html"):
        assert word in out.replace("\n", ""), out
    html = page.read_text(encoding="utf-8")
    assert "alert('x')" not in html and html.count("<script") >= 3
    assert "http://" not in html.replace("http://www.w3.org", "") and "https://" not in html


def test_layers_chosen(tmp_path, capsys):
    page = tmp_path / "page.html"
    status, out, _ = run(capsys, "report", "Two words.", "--layers", "1,3-4", "-o", page)
    assert status == 0
    assert [f"encoder.layer.{i}" in out for i in range(6)] == [False, True, False, True, True, False]


def test_a_file_and_a_long_text(tmp_path, capsys):
    text = tmp_path / "long.txt"
    text.write_text("word " * 700, encoding="utf-8")
    status, out, _ = run(capsys, "report", "--file", text, "--layers", "0", "-o", tmp_path / "page.html")
    assert status == 0 and "at most 512 tokens" in out and "190 more were left out" in out


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_other_models_from_a_folder(tmp_path, capsys, kind):
    from clearhead.models.loading import bundled

    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled(), local_files_only=True)
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = transformers.LlamaModel(config)
    else:
        config = transformers.T5Config(
            vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4
        )
        model = transformers.T5Model(config)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    status, out, err = run(capsys, "report", "A text.", "--model", tmp_path / "model", "-o", tmp_path / "page.html")
    assert status == 0, err
    assert ("(cross)" in out) == (kind == "t5")
    for path in (tmp_path / "model").glob("*token*"):
        path.unlink()
    status, _, err = run(capsys, "report", "A text.", "--model", tmp_path / "model", "-o", tmp_path / "other.html")
    assert status == 2 and "holds no tokenizer" in err and not (tmp_path / "other.html").exists()


ERRORS = {
    "no text": ([], ["no text", "--file"]),
    "an empty text": (["  "], ["text is empty"]),
    "a file that is not there": (["--file", "nowhere.txt"], ["cannot read", "nowhere.txt", "No such file"]),
    "a model that is not there": (["x", "--model", "nowhere"], ["no folder", "nowhere", "save_pretrained"]),
    "a folder without safetensors": (["x", "--model", "."], ["safetensors", "save_pretrained"]),
    "a page that cannot be written": (["x", "-o", "nowhere/page.html"], ["cannot write", "nowhere/page.html"]),
    "layers that are no numbers": (["x", "--layers", "first"], ["'first'", "0,2,5-7"]),
    "layers that are not there": (["x", "--layers", "0,9"], ["6 calls", "0 to 5"]),
    "layers from last to first": (["x", "--layers", "5-3"], ["5-3", "is empty"]),
    "layers in other digits": (["x", "--layers", "²"], ["²", "0,2,5-7"]),
}


ERRORS |= {
    "a text that is not UTF-8": (["caf\udce9"], ["text is not UTF-8"]),
    "a NUL in the text's path": (["--file", "a\0b"], ["cannot read the text", "null"]),
    "a folder for a text": (["--file", "."], ["cannot read the text", "directory"]),
    "a NUL in the model's path": (["x", "--model", "a\0b"], ["no folder", "a\\x00b"]),
    "a NUL in the page's path": (["x", "-o", "a\0b"], ["cannot write the report", "a\\x00b", "null"]),
    "a folder for a page": (["x", "-o", "."], ["cannot write the report", "directory"]),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input_is_one_line_and_status_2(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, says = ERRORS[name]
    status, _, err = run(capsys, "report", *arguments)
    assert status == 2 and err.startswith("clearhead: ") and "Traceback" not in err
    assert all(word in err for word in says), err
    assert not list(tmp_path.iterdir()), "something was written"


def cut(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def configure(**options):
    def edit(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | options), encoding="utf-8")

    return edit


def only_vocabulary(content):
    def edit(folder):
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.txt").write_bytes(content)

    return edit


def a_directory(name):
    def edit(folder):
        (folder / name).unlink()
        (folder / name).mkdir()

    return edit


WEIGHTS = "model.safetensors"
BROKEN = {
    "weights cut at the head": (cut(WEIGHTS, 5000), "SafetensorError"),
    "weights cut at the tail": (cut(WEIGHTS, 2**20), "SafetensorError"),
    "weights of no bytes": (cut(WEIGHTS, 0), "SafetensorError"),
    "weights that are none": (write(WEIGHTS, b"\x08\0\0\0\0\0\0\0{}      "), "lack"),
    "weights of other shapes": (configure(hidden_size=96), "other shapes than its config.json says"),
    "a smaller vocabulary": (configure(vocab_size=100), "other shapes than its config.json says"),
    "layers that are not there": (configure(num_hidden_layers=8), "lack 32 tensors"),
    "a folder for the weights": (a_directory(WEIGHTS), "no file named model.safetensors"),
    "a configuration that is a list": (write("config.json", b"[1]"), "holds a list in JSON"),
    "a configuration that is empty": (cut("config.json", 0), "config.json' cannot be read as JSON"),
    "a configuration of nothing": (write("config.json", b"{}"), "model_type"),
    "a configuration that is cut": (cut("config.json", 40), "config.json' cannot be read as JSON"),
    "a configuration in no UTF-8": (write("config.json", b"\xff{}"), "config.json' cannot be read as JSON"),
    "a configuration of words": (configure(hidden_size="wide"), "hidden_size"),
    "a configuration of no heads": (configure(num_attention_heads=0), "cannot load"),
    "a model that is unknown": (configure(model_type="nobody"), "nobody"),
    "no layers": (configure(num_hidden_layers=0), "made no attention call"),
    "a folder for a configuration": (a_directory("config.json"), "model_type"),
    "a tokenizer that is cut": (cut("tokenizer.json", 100), "tokenizer.json' cannot be read as JSON"),
    "a tokenizer that is a list": (write("tokenizer.json", b"[]"), "holds a list in JSON"),
    "a tokenizer of nothing": (write("tokenizer.json", b"{}"), "cannot load"),
    "options that are a list": (write("tokenizer_config.json", b"[]"), "holds a list in JSON"),
    "a vocabulary in no UTF-8": (only_vocabulary(b"[PAD]\n[UNK]\n\xe9\n"), "UTF-8"),
    "a vocabulary of no words": (only_vocabulary(b""), "vocabulary"),
    "a shard that is not there": (
        lambda folder: (
            (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors"),
            write("model.safetensors.index.json", b'{"metadata": {}, "weight_map": {"a": "b.safetensors"}}')(folder),
        ),
        "b.safetensors",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_one_line_and_status_2(name, tmp_path, capfd):
    from clearhead.models.loading import bundled

    edit, says = BROKEN[name]
    folder = tmp_path / "model"
    shutil.copytree(bundled(), folder)
    edit(folder)
    status = cli.main(["report", "A text.", "--model", str(folder), "-o", str(tmp_path / "page.html")])
    err = capfd.readouterr().err
    assert status == 2 and err.startswith("clearhead: ") and says in err, err
    if name != "no layers":  # that one is of the record, which says more
        assert len(err.strip().splitlines()) <= 2
    assert not (tmp_path / "page.html").exists()


def test_a_model_and_a_tokenizer_that_do_not_belong_together(tmp_path, capsys):
    from clearhead.models.loading import bundled

    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled(), local_files_only=True)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    models = {
        "words": transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)),
        "images": transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=4, **sizes)),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        status, _, err = run(capsys, "report", "A text.", "--model", tmp_path / name, "-o", tmp_path / "page.html")
        assert status == 2 and "cannot read the text" in err and "Traceback" not in err, err


def test_bytes_of_a_path_that_are_no_text(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, "report", "A text.", "--layers", "0", "-o", "\udce9.html")
    assert status == 0, err
    assert "udce9.html" in out.encode().decode().replace("\n", "") and [*tmp_path.iterdir()]


@pytest.mark.parametrize(("missing", "extra"), [("rich.console", "terminal"), ("transformers", "models")])
def test_a_missing_extra_names_the_command(missing, extra, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    status, _, err = run(capsys, "report", "x")
    assert status == 2 and f"pip install 'clearhead[{extra}]'" in err


def test_the_command_is_installed():
    done = subprocess.run([sys.executable, "-m", "clearhead.cli", "report", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--model" in done.stdout


@pytest.mark.parametrize(
    "arguments", [["a", "--layers", "1" * 5000], ["a", "--model", "x" * 5000]], ids=["layers", "model"]
)
def test_arguments_that_are_too_long(arguments, capsys):
    assert cli.main(["report", *arguments]) == 2
    assert capsys.readouterr().err.startswith("clearhead: ")


def test_the_examples_are_listed(capsys):
    status, out, _ = run(capsys, "explain")
    assert status == 0
    assert len(out.splitlines()) == 12 and out.endswith(": clearhead explain NAME\n")
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("name", ["additive", "multi-head"])
def test_an_example_in_a_terminal_of_80_columns(name, capsys):
    status, out, _ = run(capsys, "explain", name)
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    assert out == f"{example(name)}\n"


def test_one_query_of_a_text(capsys):
    text = "The animal did not cross the street because it was tired"
    status, out, _ = run(capsys, "explain", "--text", text, "--layer", 2, "--head", 3, "--from", "it", "--to", "Animal")
    assert status == 0
    assert "scores[3, 9, 2] = " in out
    assert "The largest difference to the output" in " ".join(out.split())
    same = run(capsys, "explain", "--text", text, "--layer", 2, "--head", 3, "--from", 9, "--to", 2)[1]
    assert same == out


@pytest.mark.parametrize("kind", [".md", ".py"])
def test_an_explanation_in_a_file(kind, tmp_path, capsys):
    path = tmp_path / f"dot{kind}"
    status, out, _ = run(capsys, "explain", "dot", "-o", path)
    assert status == 0 and str(path) in out
    found = example("dot")
    assert path.read_text() == (found.markdown() if kind == ".md" else found.script())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dots"], "no example is called 'dots'"),
        (["dot", "-o", "dot.txt"], "expected a file .html, .md or .py"),
        (["dot", "--text", "A word", "--from", "word"], "beside --text"),
        (["--text", "A word"], "--from is missing"),
        (["--text", " ", "--from", "word"], "the text is empty"),
        (["--text", "A word", "--from", "cat"], "no token of the text: [CLS] a word [SEP]"),
        (["--text", "A word", "--from", "word", "--to", "99"], "--to is '99'"),
        (["--text", "A word", "--from", "word", "--layer", "99"], "there is no call 99"),
        (["--text", "A word", "--from", "word", "--head", "99"], "out of range"),
    ],
)
def test_bad_input_to_explain_is_one_line(arguments, words, capsys):
    status, out, err = run(capsys, "explain", *arguments)
    assert (status, out) == (2, "")
    assert words in err
