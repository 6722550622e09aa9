"""The command: its summary, its page and its errors."""

import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from apart import run_each

import clearhead as ch
from clearhead import cli
from clearhead.base.errors import ClearheadError, human_bytes
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


def test_names_patterns_and_heads_chosen(tmp_path, capsys):
    page = tmp_path / "page.html"
    status, out, _ = run(
        capsys, "report", "Two words.", "--layers", "*layer.1.*,encoder.layer.4.attention.self", "--heads", "5,0-1",
        "-o", page,
    )  # fmt: skip
    assert status == 0
    assert [f"encoder.layer.{i}" in out for i in range(6)] == [False, True, False, False, True, False]
    described = meta_of(page)["layers"]
    assert [len(layer["heads"]) for layer in described] == [3, 3]
    assert all(layer["name"].endswith("(heads 0, 1, 5)") for layer in described)
    focused = {line.split()[2].rstrip(":") for line in out.splitlines() if "encoder.layer" in line}
    assert focused <= {"0", "1", "5"}


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ("--layer 2 --head 9", (2, 9)),
        ("--layer -1", (5, 0)),
        ("--head 3 --layers 4,5", (0, 3)),
        ("--layer encoder.layer.4.attention.self --head -1 --layers 3-4 --heads 2,11", (1, 1)),
    ],
)
def test_the_page_opens_on_a_layer_and_a_head(arguments, place, tmp_path, capsys):
    page = tmp_path / "page.html"
    status, _, err = run(capsys, "report", "Two words.", *arguments.split(), "-o", page)
    assert status == 0, err
    assert tuple(meta_of(page)["opens"].values()) == place


def test_two_texts_beside_each_other(tmp_path, capsys):
    page = tmp_path / "page.html"
    status, out, err = run(
        capsys, "report", "A cat sat.", "--beside", "The old cat sat.", "--layers", "1,3", "--heads", "0,4", "-o", page
    )
    assert status == 0 and not err
    assert re.search(r"Beside 7 tokens: L[13]H[04] differs most: a Jensen–Shannon divergence of 0\.\d+ nats", out)
    assert "the mean over 4 heads" in out
    meta = meta_of(page)
    assert [layer["label"] for layer in meta["layers"]] == ["L1", "L3", "L1′", "L3′"]
    assert [[head["number"] for head in layer["heads"]] for layer in meta["layers"]] == [[0, 4]] * 4
    assert meta["beside"] == [[0, 2], [1, 3]]
    texts = [meta["texts"][layer["queryText"]] for layer in meta["layers"]]
    words = ["[CLS]", "a", "cat", "sat", ".", "[SEP]"], ["[CLS]", "the", "old", "cat", "sat", ".", "[SEP]"]
    assert texts == [words[0]] * 2 + [words[1]] * 2
    assert meta["aligned"][0]["positions"] == [[0, 2, 3, 4, 5], [0, 3, 4, 5, 6]]


def meta_of(page):
    found = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page.read_text(encoding="utf-8"), re.S)
    return json.loads(found[1])


def test_the_longest_text_and_one_beyond(tmp_path, capsys):
    text, page = tmp_path / "long.txt", tmp_path / "page.html"
    text.write_text("word " * 510, encoding="utf-8")
    status, out, err = run(capsys, "report", "--file", text, "--layers", "0", "--heads", "0", "-o", page)
    assert status == 0 and "512 tokens" in out, err
    page.unlink()
    text.write_text("word " * 511, encoding="utf-8")
    status, _, err = run(capsys, "report", "--file", text, "-o", page)
    assert status == 2 and "has 513 tokens" in err and "at most 512" in err and not page.exists()


@pytest.mark.parametrize("arguments", [["-"], ["--file", "-"]], ids=" ".join)
def test_standard_input(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Der Brunnen läuft.".encode())))
    status, out, _ = run(capsys, "report", *arguments, "--layers", "0", "-o", tmp_path / "page.html")
    assert status == 0 and "encoder.layer.0" in out
    texts = meta_of(tmp_path / "page.html")["texts"]
    assert "brunnen" in "".join(texts[0]).replace("##", "")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    status, _, err = run(capsys, "report", *arguments, "-o", tmp_path / "other.html")
    assert status == 2 and "of standard input is not UTF-8" in err


def test_the_size_is_said_before_the_page_is_written(tmp_path, capsys, monkeypatch):
    from clearhead.report import Page

    page = tmp_path / "page.html"
    said = []
    written = Page.write
    monkeypatch.setattr(Page, "write", lambda *a: (said.append(capsys.readouterr().out), written(*a))[1])
    assert run(capsys, "report", "Two words.", "--layers", "0", "-o", page)[0] == 0
    assert f"The page has {human_bytes(page.stat().st_size)}." in said[0]


def test_the_path_is_tried_before_the_model_is_loaded(tmp_path, capsys, monkeypatch):
    from clearhead.cli import report

    monkeypatch.setattr(report, "model_of", lambda *_: pytest.fail("the model was loaded"))
    status, _, err = run(capsys, "report", "x", "-o", tmp_path / "nowhere" / "page.html")
    assert status == 2 and "cannot write the report" in err
    kept = tmp_path / "kept.html"
    kept.write_text("what was there")
    monkeypatch.setattr(report, "model_of", lambda *_: (_ for _ in ()).throw(ClearheadError("no model")))
    assert run(capsys, "report", "x", "-o", kept)[0] == 2 and kept.read_text() == "what was there"
    assert run(capsys, "report", "x", "-o", tmp_path / "new.html")[0] == 2 and not (tmp_path / "new.html").exists()


def test_version(capsys):
    ch.show_versions()
    printed = capsys.readouterr().out
    assert printed.startswith(f"clearhead {ch.__version__}\n  kernels ")
    assert run(capsys, "--version") == (0, printed, "")


APART = {
    "help": """
import runpy, sys
sys.argv = ["clearhead", "report", "--help"]
try: runpy.run_module("clearhead.cli", run_name="__main__")
except SystemExit as ended: assert not ended.code
heavy = ("transformers", "rich", "clearhead.models", "clearhead.report", "clearhead.explanation")
print("heavy:", [name for name in heavy if name in sys.modules])
""",
    "signals": """
import signal, sys
sys.argv, sys.orig_argv = ["-c", "-m", "clearhead"], [sys.executable, "-c", "code", "-m", "clearhead"]
before = signal.getsignal(signal.SIGINT)
import clearhead.cli
assert signal.getsignal(signal.SIGINT) is before is signal.default_int_handler
""",
    "ascii": """
import io, runpy, sys
sys.stdout, sys.argv = io.TextIOWrapper(sys.stdout.buffer, encoding="ascii"), ["clearhead", "explain", "dot"]
try: runpy.run_module("clearhead.cli", run_name="__main__")
except SystemExit as ended: assert not ended.code
""",
}


@pytest.fixture(scope="module")
def ended():
    """How each of these ends in a process of its own, which has imported PyTorch before."""
    return dict(zip(APART, run_each("import torch", list(APART.values())), strict=True))


def test_the_command_is_a_module_whose_help_imports_nothing_that_runs_a_model(ended):
    done = ended["help"]
    assert done.status == 0 and done.out.endswith("heavy: []\n") and "--model" in done.out, done.errors


@pytest.mark.parametrize("example", [["multi-head"], []], ids=["rich", "plain"])
def test_a_reader_that_has_gone(example):
    command = [sys.executable, "-m", "clearhead.cli", "explain", *example]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child.stdout.close()
    assert child.wait() == 1 and not child.stderr.read()
    child.stderr.close()


HOOK = """
import os, sys
left, begun = int(os.environ["AT_EVENT"]), False
def hook(event, arguments):
    global left, begun
    begun = begun or (event == "import" and arguments[0] == "torch")
    if begun and event == os.environ["EVENT"]:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), int(os.environ["BY"]))
sys.addaudithook(hook)
"""
ENTRIES = {"script": [str(Path(sys.executable).parent / "clearhead")], "module": [sys.executable, "-m", "clearhead"]}


def signalled(tmp_path, entry, arguments, number, event, at):
    """The command, which gets a signal at an event of Python's: the `at`-th since `import torch`."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    surroundings = {"PYTHONPATH": str(tmp_path / "hook"), "EVENT": event, "AT_EVENT": str(at), "BY": str(int(number))}
    return subprocess.run(
        [*ENTRIES[entry], *arguments], capture_output=True, text=True, env=os.environ | surroundings, cwd=tmp_path
    )


@pytest.mark.skipif(os.name != "posix", reason="processes end by signals on POSIX alone")
@pytest.mark.parametrize("seed", range(6))
def test_a_signal_at_any_import_is_one_line_and_an_end_by_that_signal(seed, tmp_path):
    draw = random.Random(seed)
    entry, number = sorted(ENTRIES)[seed % 2], [signal.SIGINT, signal.SIGTERM][seed % 3 == 2]
    arguments = draw.choice([["report", "a"], ["explain", "dot"], ["explain"], ["survey", "--file", "f"]])
    done = signalled(tmp_path, entry, arguments, number, "import", draw.randrange(1, 900))
    said = {signal.SIGINT: "clearhead: interrupted\n", signal.SIGTERM: "clearhead: terminated\n"}[number]
    assert (done.returncode, done.stdout, done.stderr) == (-number, "", said)  # a shell says 130, and 143


@pytest.mark.skipif(os.name != "posix", reason="processes end by signals on POSIX alone")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_write_leaves_the_old_file_alone(number, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("what was there")
    done = signalled(tmp_path, "module", ["explain", "dot", "-o", "page.html"], number, "os.chmod", 1)
    assert done.returncode == -number and len(done.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hook", "page.html"]
    assert page.read_text() == "what was there"


def test_only_the_command_itself_answers_to_signals(ended):
    assert ended["signals"].status == 0, ended["signals"].errors


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
@pytest.mark.parametrize(
    ("arguments", "redirected", "status", "says"),
    [
        ("--help", ">/dev/full", 2, "cannot write to standard output: No space left on device"),
        ("explain dot", ">/dev/full 2>/dev/full", 2, ""),
        ("explain", ">&-", 0, ""),
        ("explain dots", "2>&-", 2, ""),
    ],
)
def test_an_output_that_takes_nothing(arguments, redirected, status, says):
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m clearhead {arguments} {redirected}'],
        capture_output=True, text=True, env=surroundings,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr == (f"clearhead: {says}\n" if says else "")


def test_an_interrupt(capsys, monkeypatch):
    from clearhead.cli import report

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "run", interrupt)
    status, _, err = run(capsys, "report", "x")
    assert (status, err) == (130, "clearhead: interrupted\n")


def test_a_terminal_of_ascii(ended):
    done = ended["ascii"]
    assert done.status == 0 and done.out.isascii() and "scores" in done.out, done.errors


@pytest.mark.parametrize("extra", [["--generate", "6"], ["--target", "das tier"]], ids=" ".join)
def test_nothing_of_transformers_is_seen(extra, tmp_path):
    folder = saved(tmp_path / "model", "T5", T5)
    command = [sys.executable, "-m", "clearhead.cli", "report", "the animal", *extra]
    done = subprocess.run(
        [*command, "--model", folder, "-o", tmp_path / "page.html"], capture_output=True, text=True, check=True
    )
    assert not done.stderr
    assert not {"Loading", "LOAD", "Warning", "warning", "%|"} & set(done.stdout.split())


SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}


def saved(folder, name, options, head="Model"):
    """A small random model, with the tokenizer of the small BERT."""
    from clearhead.models.loading import bundled

    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled(), local_files_only=True)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=len(tokenizer), pad_token_id=0, **options)
    getattr(transformers, name + head)(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_an_encoder_decoder_reads_a_target_or_what_it_generates(tmp_path, capsys):
    folder, page = saved(tmp_path / "model", "T5", T5, "ForConditionalGeneration"), tmp_path / "page.html"
    status, out, err = run(capsys, "report", "The animal.", "--model", folder, "--target", "Das Tier.", "-o", page)
    assert status == 0 and "the decoder reads the given target" in flat(out), err
    meta = meta_of(page)
    assert meta["title"].endswith(": the decoder reads the given target")
    encoder, own, cross = meta["layers"]
    words = meta["texts"]
    assert words[encoder["queryText"]] == words[cross["keyText"]] == ["[CLS]", "the", "animal", ".", "[SEP]"]
    assert words[own["queryText"]][:3] == ["[PAD]", "[CLS]", "das"] and words[cross["queryText"]][0] == "[PAD]"
    status, out, err = run(capsys, "report", "The animal.", "--model", folder, "--generate", 7, "-o", page)
    assert status == 0 and "T5ForConditionalGeneration generated: " in out, err
    meta = meta_of(page)
    assert meta["title"].endswith(": the decoder reads what the model generated")
    assert meta["layers"][1]["queries"] <= 8
    status, out, err = run(capsys, "report", "The animal.", "--model", folder, "-o", page)
    assert status == 0 and "the decoder reads what the model generated" in flat(out), err
    status, out, err = run(capsys, "report", "A", "--model", folder, "--generate", 7, "--target", "b", "-o", page)
    assert status == 2 and "--generate and --target" in err


def flat(text):
    return " ".join(text.split())


def test_words_of_encoder_and_decoder_of_one_length_are_not_mixed_up(tmp_path, capsys):
    folder, page = saved(tmp_path / "model", "T5", T5), tmp_path / "page.html"
    target = "one two three"  # and the start token, [CLS] and [SEP]
    status, _, err = run(capsys, "report", "Five words and more", "--model", folder, "--target", target, "-o", page)
    assert status == 0, err
    meta = meta_of(page)
    encoder, own = meta["layers"][:2]
    assert encoder["queries"] == own["queries"] == 6
    assert meta["texts"][encoder["queryText"]][1] == "five" and meta["texts"][own["queryText"]][2] == "one"


def test_a_generation_is_one_matrix_of_the_models_own_weights(tmp_path):
    from clearhead.cli.texts import watched
    from clearhead.models.loading import load

    options = SIZES | {"num_key_value_heads": 2, "eos_token_id": None}
    folder = saved(tmp_path / "model", "Llama", options, "ForCausalLM")
    model, tokenizer = load(folder, True)
    read = watched(model, tokenizer, "The animal.", 6)
    eager, _ = load(folder, True)
    eager.set_attn_implementation("eager")
    ids = tokenizer("The animal.", return_tensors="pt")["input_ids"]
    output = eager.generate(
        ids, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_attentions=True
    )
    assert read.words == tokenizer.convert_ids_to_tokens(output.sequences[0].tolist())
    assert read.said == f"the last 6 of {len(read.words)} tokens are what the model generated"
    for i, call in enumerate(read.recording.calls):
        at = 0
        for row in (step[i] for step in output.attentions):
            length, keys = row.shape[2:]
            torch.testing.assert_close(call.weights[:, :, at : at + length, :keys], row, atol=1e-5, rtol=1e-4)
            at += length
        assert at == len(read.words) - 1  # the last token was never read


def test_a_model_that_generates_nothing_says_so(tmp_path, capsys):
    page = tmp_path / "page.html"
    status, _, err = run(capsys, "report", "A text.", "--generate", 3, "-o", page)
    assert status == 2 and "lack" in err
    folder = saved(tmp_path / "bert", "Bert", SIZES, "ForMaskedLM")
    status, _, err = run(capsys, "report", "A text.", "--generate", 3, "--model", folder, "-o", page)
    assert status == 2 and "fills in masked words" in err
    status, _, err = run(capsys, "report", "A text.", "--target", "b", "-o", page)
    assert status == 2 and "BertModel has one text alone" in err
    options = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 12}
    folder = saved(tmp_path / "gpt2", "GPT2", options, "LMHeadModel")
    status, _, err = run(capsys, "report", "A text.", "--generate", 9, "--model", folder, "-o", page)
    assert status == 2 and "has 5 tokens and --generate asks for 9 more" in err and "at most 12" in err
    status, out, err = run(capsys, "report", "A text.", "--generate", 7, "--model", folder, "-o", page)
    assert status == 0 and "12 tokens" in out, err


LIMITS = {
    "Bert": (SIZES | {"max_position_embeddings": 9}, 9),
    "Roberta": (SIZES | {"max_position_embeddings": 11, "bos_token_id": 1, "eos_token_id": 2}, 10),
    "GPT2": ({"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 9}, 9),
    "OPT": ({"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 32, "num_hidden_layers": 1}
            | {"num_attention_heads": 4, "max_position_embeddings": 9}, 9),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_the_limit_of_a_table_of_positions_is_where_the_model_breaks(name, tmp_path, capsys):
    options, most = LIMITS[name]
    folder, page = saved(tmp_path / "model", name, options), tmp_path / "page.html"
    status, _, err = run(capsys, "report", "a " * (most - 2), "--model", folder, "-o", page)
    assert status == 0, err
    status, _, err = run(capsys, "report", "a " * (most - 1), "--model", folder, "-o", page)
    assert status == 2 and f"has {most + 1} tokens" in err and f"at most {most}" in err


def test_a_model_that_computes_positions_takes_any_length(tmp_path, capsys):
    folder = saved(tmp_path / "model", "Llama", SIZES | {"max_position_embeddings": 8})
    status, _, err = run(capsys, "report", "a " * 700, "--model", folder, "--layers", "0", "--heads", "0",
                         "-o", tmp_path / "page.html")  # fmt: skip
    assert status == 0, err


def test_hostile_text(tmp_path, capsys):
    hostile = "\x1b[31mred\x07 [bold]x[/bold] \u202e </script><script>alert(1)</script> " + "a" * 300 + " \0 $x$"
    page = tmp_path / "page.html"
    status, out, err = run(capsys, "report", hostile, "--layers", "0", "-o", page)
    assert status == 0 and "\x1b" not in out and "\u202e" not in out, err
    assert "alert(1)</script>" not in page.read_text(encoding="utf-8")
    folder = saved(tmp_path / "llama", "Llama", SIZES, "ForCausalLM")
    status, out, err = run(capsys, "report", hostile, "--generate", 3, "--model", folder, "-o", page)
    assert status == 0 and "\x1b" not in out, err


@pytest.mark.parametrize("kind", ["Llama", "T5"])
def test_other_models_from_a_folder(tmp_path, capsys, kind):
    options = T5 if kind == "T5" else SIZES | {"num_key_value_heads": 2}
    saved(tmp_path / "model", kind, options)
    status, out, err = run(capsys, "report", "A text.", "--model", tmp_path / "model", "-o", tmp_path / "page.html")
    assert status == 0, err
    assert ("cross" in out) == (kind == "T5")
    for path in (tmp_path / "model").glob("*token*"):
        path.unlink()
    status, _, err = run(capsys, "report", "A text.", "--model", tmp_path / "model", "-o", tmp_path / "other.html")
    assert status == 2 and "holds no tokenizer" in err and not (tmp_path / "other.html").exists()


ERRORS = {
    "an empty text": (["  "], ["text is empty"]),
    "a file that is not there": (["--file", "nowhere.txt"], ["cannot read", "nowhere.txt", "No such file"]),
    "layers that are no numbers": (["x", "--layers", "first"], ["'first'", "numbered from 0"]),
    "layers that are not there": (["x", "--layers", "0,9"], ["no layer 9", "(L5)", "numbered from 0"]),
    "a head that is not there": (["x", "--heads", "0,12"], ["--heads is [12]", "12 heads", "numbered from 0"]),
    "a pattern of no module": (["x", "--layers", "*nowhere*"], ["*nowhere*", "encoder.layer.0"]),
    "nothing to generate": (["x", "--generate", "0"], ["--generate is 0"]),
    "a layer to open that is not there": (["x", "--layer", "9"], ["--layer", "no layer 9", "numbered from 0"]),
    "a layer to open that is left out": (["x", "--layers", "2,4", "--layer", "3"], ["--layer: 3", "'L2', 'L4'"]),
    "a head to open that is not there": (["x", "--layer", "1", "--head", "12"], ["--head is 12", "has 12 heads"]),
    "a head to open that is left out": (["x", "--heads", "3-4", "--head", "0"], ["--head is 0", "heads 3, 4"]),
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
    "weights that are none": (write(WEIGHTS, b"\x08\0\0\0\0\0\0\0{}      "), "lack"),
    "weights of other shapes": (configure(hidden_size=96), "other shapes than its config.json says"),
    "a smaller vocabulary": (configure(vocab_size=100), "other shapes than its config.json says"),
    "layers that are not there": (configure(num_hidden_layers=8), "lack 32 tensors"),
    "a folder for the weights": (a_directory(WEIGHTS), "no file named model.safetensors"),
    "a configuration that is a list": (write("config.json", b"[1]"), "cannot load"),
    "a configuration of nothing": (write("config.json", b"{}"), "model_type"),
    "a configuration that is cut": (cut("config.json", 40), "not a valid JSON"),
    "a model that is unknown": (configure(model_type="nobody"), "nobody"),
    "no layers": (configure(num_hidden_layers=0), "made no attention call"),
    "a tokenizer of nothing": (write("tokenizer.json", b"{}"), "cannot load"),
    "a vocabulary in no UTF-8": (only_vocabulary(b"[PAD]\n[UNK]\n\xe9\n"), "UTF-8"),
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
    models = {
        "words": transformers.BertModel(transformers.BertConfig(vocab_size=50, **SIZES)),
        "images": transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=4, **SIZES)),
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


@pytest.mark.parametrize(
    "arguments", [["a", "--layers", "1" * 5000], ["a", "--model", "x" * 5000]], ids=["layers", "model"]
)
def test_arguments_that_are_too_long(arguments, capsys):
    assert cli.main(["report", *arguments]) == 2
    assert capsys.readouterr().err.startswith("clearhead: ")


def test_the_examples_are_listed(capsys):
    status, out, _ = run(capsys, "explain")
    assert status == 0
    assert len(out.splitlines()) == 13 and out.endswith(": clearhead explain NAME -o page.html\n")
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


@pytest.mark.parametrize("given", [["dot"], ["--text", "A word", "--from", "word"]])
def test_the_title_and_the_digits_of_an_explanation(given, capsys):
    status, out, err = run(capsys, "explain", *given, "--title", "For my class", "--digits", "2")
    assert status == 0, err
    assert out.splitlines()[0] == "For my class"
    numbers = [word for word in out.split() if re.fullmatch(r"-?0\.[1-9]\d*", word)]
    assert len(numbers) > 5 and all(len(number.split(".")[1]) == 2 for number in numbers)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dots"], "no example is called 'dots'"),
        (["dot", "-o", "dot.docx"], "Pass a path that ends in .html, .md"),
        (["dot", "--digits", "0"], "digits is 0; expected a whole number, 1 or more"),
        (["dot", "--title", " "], "title is ' '; pass a text"),
        (["dot", "--text", "A word", "--from", "word"], "beside --text"),
        (["--text", "A word"], "--from is missing"),
        (["--text", " ", "--from", "word"], "the text is empty"),
        (["--text", "A word", "--from", "cat"], "no token of the text: [CLS] a word [SEP]"),
        (["--text", "A word, a dog", "--from", "A"], "--from is 'A', which stands at the places 1, 4 of the text"),
        (["--text", "A word", "--from", "word", "--to", "99"], "--to is '99'"),
        (["--text", "A word", "--from", "word", "--layer", "99"], "there is no layer 99"),
        (["--text", "A word", "--from", "word", "--head", "99"], "out of range"),
    ],
)
def test_bad_input_to_explain_is_one_line(arguments, words, capsys):
    status, out, err = run(capsys, "explain", *arguments)
    assert (status, out) == (2, "")
    assert words in err
