"""The command: its summary, its page and its errors."""

import subprocess
import sys

import pytest
import torch

from clearhead import cli

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
    from clearhead.models.load import bundled

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


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input_is_one_line_and_status_2(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, says = ERRORS[name]
    status, _, err = run(capsys, "report", *arguments)
    assert status == 2 and err.startswith("clearhead: ") and "Traceback" not in err
    assert all(word in err for word in says), err
    assert not list(tmp_path.iterdir()), "something was written"


@pytest.mark.parametrize(("missing", "extra"), [("rich.console", "terminal"), ("transformers", "models")])
def test_a_missing_extra_names_the_command(missing, extra, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    status, _, err = run(capsys, "report", "x")
    assert status == 2 and f"pip install 'clearhead[{extra}]'" in err


def test_the_command_is_installed():
    done = subprocess.run([sys.executable, "-m", "clearhead.cli", "report", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--model" in done.stdout
