"""The files of a survey's state: a bit that has changed, processes that end or meet at any point, full disks."""

import multiprocessing
import os
import random
import resource
import signal
import sys
import time

import pytest
import test_survey_state as surveys
import torch

import clearhead as ch

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, and audit events are those of POSIX")


@pytest.fixture(scope="module")
def whole():
    return surveys.run(batch=512)


def run(state, **options):
    return surveys.run(state, batch=512, **options)


def forked(task, *arguments):
    """A child that does this, and sends how it went."""

    def child(pipe):
        torch.set_num_threads(1)
        try:
            pipe.send(("done", task(*arguments)))
        except BaseException as error:
            pipe.send((type(error).__name__, str(error)))

    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(its,))
    process.start()
    its.close()
    return process, mine


def result(process, pipe):
    try:
        found = pipe.recv()
    except EOFError:
        found = ("killed", "")
    process.join()
    return found


def test_a_bit_that_has_changed_is_told_of(tmp_path, whole):
    run(tmp_path)
    files, draw = sorted(tmp_path.iterdir()), random.Random(0)
    for _ in range(150):
        path = draw.choice(files)
        raw = path.read_bytes()
        at, bit = draw.choice([draw.randrange(len(raw)), draw.randrange(8)]), draw.randrange(8)
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :])
        with pytest.raises(ch.ClearheadError, match="Delete that file") as error:
            run(tmp_path)
        assert path.name in str(error.value) and "\n" not in str(error.value)
        path.write_bytes(raw)
    path.unlink()
    assert run(tmp_path).digest == whole.digest


@pytest.mark.parametrize("kind", ["cut", "empty", "without a checksum", "of zeros"])
def test_a_damaged_file_is_computed_anew_once_it_is_deleted(kind, tmp_path, whole):
    from safetensors.torch import load, save

    run(tmp_path)
    path = sorted(tmp_path.iterdir())[1]
    raw = path.read_bytes()
    others = {"cut": raw[:100], "empty": b"", "of zeros": bytes(len(raw)), "without a checksum": save(load(raw))}
    path.write_bytes(others[kind])
    with pytest.raises(ch.ClearheadError, match=path.name):
        run(tmp_path)
    assert path.read_bytes() == others[kind]
    path.unlink()
    assert run(tmp_path).digest == whole.digest


def ended_at(state, number, how):
    """Ends this process at the event of that number that has to do with the folder."""
    left = [number]

    def hook(event, arguments):
        if event in ("open", "os.link", "os.rename", "os.remove", "os.mkdir") and str(state) in str(arguments[0]):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), how)

    sys.addaudithook(hook)
    return run(state).digest


@linux
@pytest.mark.parametrize("seed", range(8))
def test_a_process_that_is_killed_at_any_point_goes_on(seed, tmp_path, whole):
    state = tmp_path / "state"
    number = random.Random(seed).randrange(1, 24)
    found = result(*forked(ended_at, state, number, signal.SIGKILL))
    assert found[0] == "killed"
    assert run(state).digest == whole.digest
    assert not [path for path in state.iterdir() if not path.name.startswith("batch-")]


@linux
def test_processes_that_do_the_same_work_in_one_folder_all_end_right(tmp_path, whole):
    folder = tmp_path / "some" / "folder"
    children = [forked(lambda: run(folder).digest) for _ in range(4)]
    assert [result(*child) for child in children] == [("done", whole.digest)] * 4
    assert run(folder).digest == whole.digest


def other(state, texts):
    time.sleep(0.01)
    return ch.models.survey(
        surveys.Reader(0.002).eval(), texts, surveys.letters, keep=surveys.KEEP, batch=512, state=state
    ).digest


@linux
@pytest.mark.parametrize("attempt", range(3))
def test_two_surveys_in_one_folder_give_no_wrong_number(attempt, tmp_path):
    """One ends right, or, where both wrote at once, none; the others say why."""
    texts = surveys.corpus(), surveys.corpus()[::-1]
    right = [other(None, some) for some in texts]
    found = [result(*child) for child in [forked(other, tmp_path / "state", some) for some in texts]]
    for (kind, said), digest in zip(found, right, strict=True):
        assert (kind, said) == ("done", digest) or (kind == "ClearheadError" and "of other texts" in said)
    assert any(kind == "ClearheadError" for kind, _ in found)


@linux
def test_the_first_of_two_surveys_ends_right(tmp_path, whole):
    run(tmp_path)
    kind, said = result(*forked(other, tmp_path, surveys.corpus()[::-1]))
    assert kind == "ClearheadError" and "Pass another folder" in said
    assert run(tmp_path).digest == whole.digest


def full(state):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    return run(state).digest


def as_nobody(state):
    os.seteuid(65534)
    return run(state).digest


@linux
def test_a_disk_that_is_full_is_told_of_and_leaves_nothing_half_written(tmp_path, whole):
    kind, said = result(*forked(full, tmp_path))
    assert kind == "ClearheadError" and "cannot write" in said and "goes on" in said
    assert not list(tmp_path.iterdir())
    assert run(tmp_path).digest == whole.digest


@linux
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user(whole):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:  # pytest's own may not be entered by others
        os.chmod(folder, 0o755)
        kind, said = result(*forked(as_nobody, folder))
        assert kind == "ClearheadError" and "Permission denied" in said
        run(folder)
        assert result(*forked(as_nobody, folder)) == ("done", whole.digest)  # there is nothing to write
