"""Ranks that share a folder, processes that are killed, folders of other surveys, and bad input."""

import json
import multiprocessing
import random
import time

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch

KEEP = ["first", "previous", ch.reductions.Entropy()]


class Reader(torch.nn.Module):
    """Two heads over letters. `pause`: seconds of a pass."""

    def __init__(self, pause=0.0, seed=0):
        super().__init__()
        self.table = torch.nn.Embedding(128, 8)
        generator = torch.Generator().manual_seed(seed)
        self.table.weight = torch.nn.Parameter(torch.randn(128, 8, generator=generator))
        self.pause = pause

    def forward(self, input_ids, attention_mask):
        time.sleep(self.pause)
        x = self.table(input_ids).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=attention_mask[:, None, None].bool())


def letters(texts, **options):
    return {"input_ids": [list(text.encode())[: options.get("max_length")] for text in texts]}


def corpus(count=120):
    draw = random.Random(1)
    return ["".join(draw.choice("abcdef ") for _ in range(draw.randint(2, 30))) + "." for _ in range(count)]


def run(state=None, rank=(0, 1), pause=0.0, **options):
    options = {"keep": KEEP, "batch": 64, "wait": 60.0} | options
    return ch.models.survey(Reader(pause).eval(), corpus(), letters, state=state, rank=rank, **options)


def child(state, rank, pause):
    torch.set_num_threads(1)
    run(state, rank, pause)


def started(state, rank, pause):
    process = multiprocessing.get_context("fork").Process(target=child, args=(state, rank, pause))
    process.start()
    return process


@pytest.fixture(scope="module")
def whole():
    return run()


def test_one_rank_and_two_give_the_same_bits(tmp_path, whole):
    other = started(tmp_path / "two", (1, 2), 0.0)
    both = run(tmp_path / "two", (0, 2))
    other.join()
    assert other.exitcode == 0
    assert both.batches == whole.batches > 20
    assert both.digest == whole.digest == run(tmp_path / "one").digest
    assert both.table() == whole.table()


def test_what_was_left_unfinished_is_computed_again(tmp_path, whole):
    run(tmp_path)
    files = sorted(tmp_path.glob("batch-*"))
    (tmp_path / f".{files[4].name}.1.ab.part").write_bytes(b"half")
    kept = files[5].stat().st_mtime_ns
    files[6].unlink()
    assert run(tmp_path).digest == whole.digest
    assert files[5].stat().st_mtime_ns == kept
    assert not list(tmp_path.glob(".*.part"))


def test_the_state_of_another_survey_is_left_alone(tmp_path):
    run(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    model = Reader().eval()
    with pytest.raises(ch.ClearheadError, match=r"differs in keep: .* there, .* here"):
        run(tmp_path, keep=["first"])
    with pytest.raises(ch.ClearheadError, match="differs in batch: 64 there, 65 here"):
        run(tmp_path, batch=65)
    with pytest.raises(ch.ClearheadError, match="differs in weights"):
        ch.models.survey(Reader(seed=1).eval(), corpus(), letters, keep=KEEP, batch=64, state=tmp_path)
    with pytest.raises(ch.ClearheadError, match="is of other texts, or of texts in another order"):
        ch.models.survey(model, [*corpus()[1:], "other."], letters, keep=KEEP, batch=64, state=tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_state_of_a_reduction_with_other_numbers_is_refused(tmp_path):
    """PyTorch prints the first and last three of more than 1000 numbers."""
    texts, groups = ["a" * 1100] * 2, torch.zeros(1100, dtype=torch.long)
    other = groups.clone()
    other[500] = 1
    groups[600] = 1
    given = {"state": tmp_path, "batch": 2200}
    mass = lambda each: ch.models.survey(Reader().eval(), texts, letters, keep=[ch.reductions.Mass(each)], **given)
    assert mass(groups).digest == mass(groups.clone()).digest
    with pytest.raises(ch.ClearheadError, match=r"differs in keep: .*1100.* there, .*1100.* here"):
        mass(other)


def test_the_state_of_more_texts_is_told(tmp_path):
    model, texts = Reader().eval(), ["ab."] * 1024
    ch.models.survey(model, [*texts, "more."], letters, keep="first", state=tmp_path)
    with pytest.raises(ch.ClearheadError, match="and these texts make 1 batches"):
        ch.models.survey(model, texts, letters, keep="first", state=tmp_path)


def test_a_rank_that_does_not_come_is_told(tmp_path):
    with pytest.raises(ch.ClearheadError, match=r"batches of other ranks are missing \(1, 3, 5"):
        run(tmp_path, (0, 2), wait=0.0)


def test_ranks_are_those_of_the_surroundings(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ch.ClearheadError, match=r"missing \(0, 2"):
        run(tmp_path, None, wait=0.0)
    with pytest.raises(ch.ClearheadError, match="2 ranks share a folder"):
        run(None, None)


def test_texts_are_read_once_and_a_window_at_a_time():
    read = []

    def stream():
        for number in range(2500):
            read.append(number)
            yield {"text": f"text {number}", "id": number}

    largest = 0

    def counting(texts):
        nonlocal largest
        largest = max(largest, len(texts))
        return letters(texts)

    found = ch.models.survey(Reader().eval(), stream(), counting, keep="first", batch=10_000)
    assert (found.texts, len(read), largest) == (2500, 2500, 1024)


BAD = {
    "one text": ({"texts": "a text"}, "texts is a str"),
    "no tokens": ({"tokenizer": lambda texts: {"input_ids": [[] for _ in texts]}}, "makes no tokens of text 0"),
    "a tokenizer of one": ({"tokenizer": lambda texts: {"input_ids": [[1]]}}, "made 1 rows of 2 texts"),
    "no tokenizer": ({"tokenizer": None}, "tokenizer is a NoneType"),
    "no ids": ({"tokenizer": lambda texts: texts}, "cannot read the texts"),
    "classes without words": ({"keep": "word classes"}, "reads the vocabulary"),
    "another statistic": ({"keep": "entrophy"}, "expected some of 'previous'"),
    "nothing": ({"keep": []}, "keep is"),
    "an output": ({"keep": ch.reductions.Output(torch.zeros(1, 2))}, "whose values are of one call"),
    "a map": (
        {"keep": ch.reductions.Pool(2), "texts": ["a", "abcd"], "batch": 1},
        "depends on the length of the texts",
    ),
    "a rank": ({"rank": (2, 2)}, "rank is"),
    "no model": ({"model": "bert"}, "takes a torch.nn.Module"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error(name):
    given, message = BAD[name]
    usual = {"model": Reader().eval(), "texts": ["ab", "cde"], "tokenizer": letters, "keep": ["first"]}
    with pytest.raises(ch.ClearheadError, match=message):
        ch.models.survey(**usual | given)


def test_a_state_that_is_a_file_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ch.ClearheadError, match="which is no folder"):
        run(tmp_path / "file")


def test_the_table_as_a_file_has_every_digit(tmp_path, whole):
    import csv

    with whole.write(tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["first"]) for row in rows] == [row["first"] for row in whole.table()]
    with pytest.raises(ch.ClearheadError, match="cannot write the table"):
        whole.write(tmp_path / "none" / "t.csv")


def command(capsys, *arguments):
    from clearhead.cli import main

    status = main(["survey", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_the_command_reads_lines_and_objects(tmp_path, capsys):
    texts = ["A map of the pump.", "Water, and 2 pumps."]
    (tmp_path / "t.txt").write_text("\n\n".join(texts))
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in texts))
    wanted = ("--keep", "first, word classes", "--state", tmp_path / "state")
    one = command(capsys, "--file", tmp_path / "t.txt", "-o", tmp_path / "a.csv", *wanted)
    page = ("--page", tmp_path / "p.html")
    other = command(capsys, "--file", tmp_path / "t.jsonl", "--field", "body", "-o", tmp_path / "b.csv", *wanted, *page)
    assert one[0] == other[0] == 0 and one[2] == other[2] == ""
    assert one[1].splitlines()[0] == other[1].splitlines()[0] and "2 texts, 16 tokens" in one[1]
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    assert (tmp_path / "p.html").stat().st_size > 50_000
    status, _, said = command(capsys, "--file", tmp_path / "t.jsonl", "-o", tmp_path / "c.csv")
    assert status == 2 and "line 1 of" in said and "has 'body'" in said
    status, _, said = command(capsys, "--file", tmp_path / "none.txt", "-o", tmp_path / "c.csv")
    assert status == 2 and "cannot read the texts" in said
