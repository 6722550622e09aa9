"""What is written is there whole or not at all, and what cannot be written or read is one error in words."""

import csv
import multiprocessing
import os
import random
import resource
import signal
import stat
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead import cli
from clearhead.base.output.written import replacing
from clearhead.explanation import Motion, Picture

pytest.importorskip("safetensors", reason="the extra [models] is not installed")
linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")


class Block(torch.nn.Module):
    def forward(self, input_ids, attention_mask=None):
        x = F.one_hot(input_ids, 128).float()[:, None]
        return F.scaled_dot_product_attention(x, x, x)


def letters(texts):
    return {"input_ids": [list(text.encode()) for text in texts]}


with ch.watch(block := Block().eval()) as SEEN:
    block(torch.arange(6)[None])
SURVEY = ch.models.survey(block, ["a cab", "a longer text"], letters, keep="previous")
EXPLANATION = ch.explain(torch.rand(2, 4), torch.rand(3, 4), torch.rand(3, 2))
EXPLANATION.html()  # reads the package's files, which another user may not be allowed to
MOTION = Motion("A square moves", [("At the left.", Picture(40)), ("At the right.", Picture(40))])
WRITERS = {
    "report": lambda path: SEEN.view().write(path),
    "recording": SEEN.write,
    "table": SURVEY.write,
    "page of a survey": SURVEY.write,
    "page of an explanation": EXPLANATION.write,
    "picture of an explanation": EXPLANATION.write,
    "motion": MOTION.write,
}
# of the names of their files, where the ending says the form
ENDINGS = {"table": ".csv", "page of a survey": ".html", "page of an explanation": ".html"}
ENDINGS |= {"picture of an explanation": ".pdf", "motion": ".html"}


FORMS = {"a notebook": ".ipynb", "numbers": ".json", "text": ".txt"}
COMMANDS = {"Markdown": ".md", "a program": ".py"}


def command(kind):
    """The command as a writer: its error is one line."""

    def write(path):
        import contextlib
        import io

        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            status = cli.main(["explain", "dot", "-o", os.fspath(path) + kind])
        if status:
            assert status == 2 and said.getvalue().count("\n") == 1
            raise ch.ClearheadError(said.getvalue().strip())

    return write


def is_whole(path):
    """By what stands at the end, or by reading it."""
    raw = path.read_bytes()
    if raw.startswith(b"layer,"):
        return len(list(csv.DictReader(raw.decode().splitlines()))) == 1
    if raw[:4] == b"%PDF":
        return raw.rstrip().endswith(b"%%EOF")
    if raw[:1] == b"<":
        return raw.rstrip().endswith(b"</html>")
    return len(ch.models.load_recording(path).calls) == 1


def loop(folder, ending):
    (folder / f"a{ending}").symlink_to(folder / f"b{ending}")
    (folder / f"b{ending}").symlink_to(folder / f"a{ending}")
    return folder / f"a{ending}"


def folder_there(folder, ending):
    (folder / f"there{ending}").mkdir()
    return folder / f"there{ending}"


def old(folder, ending=""):
    (folder / f"old{ending}").write_text("what was there")
    return folder / f"old{ending}"


def full_device(folder, ending):
    """Root gets one of its own: a writer that is wrong would replace the system's."""
    if os.geteuid() != 0:
        if ending:
            pytest.skip("the system's device has no ending")
        return "/dev/full"
    try:
        os.mknod(folder / f"full{ending}", stat.S_IFCHR | 0o666, os.makedev(1, 7))
        (folder / f"full{ending}").open("wb").close()
    except PermissionError:
        pytest.skip("this machine lets nobody make a device")
    return folder / f"full{ending}"


FAULTS = {
    "no folder": lambda folder, ending: folder / "none" / f"file{ending}",
    "a folder": folder_there,
    "a folder, said as one": lambda folder, ending: f"{folder_there(folder, ending)}/",
    "a file in place of a folder": lambda folder, ending: old(folder) / f"file{ending}",
    "a long name": lambda folder, ending: folder / ("x" * 300 + ending),
    "a NUL": lambda folder, ending: f"{folder}/\0{ending}",
    "nothing": lambda folder, ending: "",
    "no path": lambda folder, ending: None,
    "a number": lambda folder, ending: 3,
    "links in a circle": loop,
    "a device that is full": full_device,
    "a system's folder": lambda folder, ending: f"/proc/self/file{ending}",
}


def tree(folder):
    """What stands in a folder: files with what they hold, links with where they lead, others with their kind."""
    found = {}
    for path in folder.rglob("*"):
        kind = stat.S_IFMT(path.lstat().st_mode)
        of = path.read_bytes() if kind == stat.S_IFREG else os.readlink(path) if kind == stat.S_IFLNK else b""
        found[path] = kind, of
    return found


@linux
@pytest.mark.parametrize(("writer", "fault"), [(w, f) for w in WRITERS for f in FAULTS])
def test_what_cannot_be_written_is_one_error(writer, fault, tmp_path):
    path = FAULTS[fault](tmp_path, ENDINGS.get(writer, ""))
    before = tree(tmp_path)
    with pytest.raises(ch.ClearheadError, match="cannot write the") as error:
        WRITERS[writer](path)
    assert "\n" not in str(error.value) and repr(str(path))[:100] in str(error.value)
    assert tree(tmp_path) == before


def in_a_child(task):
    """What a task gives, or its error, in a process of its own."""

    def run(pipe):
        try:
            pipe.send(task())
        except BaseException as error:
            pipe.send(error if isinstance(error, ch.ClearheadError) else repr(error))

    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(its,))
    process.start()
    its.close()
    found = mine.recv() if mine.poll(60) else None
    process.join()
    return found


@linux
def test_a_disk_that_is_full_at_any_byte_leaves_the_old_file(tmp_path):
    draw = random.Random(0)
    writers = WRITERS | dict.fromkeys(FORMS, EXPLANATION.write) | {name: command("") for name in COMMANDS}
    for name in writers:
        folder = tmp_path / name
        folder.mkdir()
        suffix = (FORMS | COMMANDS | ENDINGS).get(name, "")
        path = folder / f"file{suffix}"
        writers[name](path)
        size, here = path.stat().st_size, path.read_bytes()
        path.write_bytes(b"what was there")
        for _ in range(3):
            most = draw.randrange(size)

            def limited(write=writers[name], path=path, most=most):
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
                return write(path)

            found = in_a_child(limited)
            assert isinstance(found, ch.ClearheadError) and "cannot" in str(found), (name, most, found)
            assert [*folder.iterdir()] == [path] and path.read_bytes() == b"what was there"
        writers[name](path)
        assert abs(len(path.read_bytes()) - len(here)) < 40  # a picture holds the time


@linux
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("writer", WRITERS)
def test_what_another_user_owns_stays(writer):
    import tempfile

    def write(path):
        os.seteuid(65534)
        WRITERS[writer](path)

    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        ending = ENDINGS.get(writer, "")
        there = old(Path(folder), ending)
        for path in (there, Path(folder, f"new{ending}")):
            found = in_a_child(lambda path=path: write(path))
            assert isinstance(found, ch.ClearheadError) and "Permission denied" in str(found)
        os.chmod(folder, 0o777)  # a file that may not be written to is not replaced either
        assert isinstance(in_a_child(lambda: write(there)), ch.ClearheadError)
        assert [*Path(folder).iterdir()] == [there] and there.read_text() == "what was there"


@pytest.mark.parametrize("writer", WRITERS)
def test_links_are_followed_and_modes_kept(writer, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    ending = ENDINGS.get(writer, "")
    dangling, link, kept = tmp_path / f"dangling{ending}", tmp_path / f"link{ending}", old(tmp_path)
    dangling.symlink_to(tmp_path / "elsewhere" / "new")
    link.symlink_to(kept)
    kept.chmod(0o640)
    for path in (dangling, link):
        WRITERS[writer](path)
        assert path.is_symlink() and is_whole(path)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o640
    names = {dangling.name, link.name, "old", "elsewhere", "new"}
    assert {path.name for path in tmp_path.rglob("*")} == names


def test_a_path_that_fails_is_not_made_by_trying_it(tmp_path, capsys):
    (tmp_path / "link").symlink_to(tmp_path / "new")
    assert cli.main(["explain", "--text", " ", "--from", "a", "-o", f"{tmp_path}/link.html"]) == 2
    assert cli.main(["report", " ", "-o", f"{tmp_path}/link"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["link"] and (tmp_path / "link").is_symlink()


def test_an_interrupt_in_a_write_leaves_the_old_file(tmp_path):
    path = old(tmp_path)
    with pytest.raises(KeyboardInterrupt), replacing(path, "page") as beside:
        beside.write_text("half")
        raise KeyboardInterrupt
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == "what was there"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["report", "--file", "a.txt", "-o", "a.txt"], "the file of --file"),
        (["report", "--file", "a.txt", "-o", "./link"], "the file of --file"),
        (["survey", "--file", "a.txt", "-o", "a.txt"], "the file of --file"),
        (["survey", "--file", "a.txt", "-o", "b", "--page", "b"], "the file of -o"),
        (["report", "a", "--model", "model", "-o", "model/config.json"], "the file of --model"),
    ],
)
def test_an_output_that_is_read_is_refused(arguments, says, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    for name in ("a.txt", "model/config.json"):
        Path(name).write_text("{}")
    Path("link").symlink_to("a.txt")
    before = tree(tmp_path)
    assert cli.main(arguments) == 2
    assert says in capsys.readouterr().err and tree(tmp_path) == before


def contents(folder):
    """Files that are no texts."""
    (folder / "folder").mkdir()
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "latin").write_bytes("café".encode("latin-1"))
    (folder / "wide").write_bytes("a text".encode("utf-16"))
    (folder / "empty").write_bytes(b"")
    (folder / "mark").write_bytes(b"\xef\xbb\xbf")
    loop(folder, "")
    return ["folder", "binary", "latin", "wide", "empty", "mark", "a", "none", "none/none", "\0", "x" * 300]


def test_what_cannot_be_read_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in contents(tmp_path):
        for command in (["report", "--file", name, "-o", "o"], ["survey", "--file", name, "-o", "o"],
                        ["report", "a", "--model", name, "-o", "o"]):  # fmt: skip
            before = tree(tmp_path)
            assert cli.main(command) == 2
            said = capsys.readouterr().err
            assert said.startswith("clearhead: ") and said.count("\n") == 1 and "Error" not in said, (command, said)
            assert tree(tmp_path) == before
        with pytest.raises(ch.ClearheadError, match="cannot read a recording"):
            ch.models.load_recording(name)


def test_a_byte_order_mark_is_no_word(tmp_path):
    from argparse import Namespace

    from clearhead.cli.texts import text_of

    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfa cat")
    assert text_of(Namespace(text=None, file=str(tmp_path / "text"))) == "a cat"
