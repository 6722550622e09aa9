"""An explanation's script, run, beside the explanation itself."""

import contextlib
import io

import torch


def run(explanation):
    """What the explanation's script computes, by name, and what it prints."""
    space, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(explanation.script(), space)
    return space, printed.getvalue()


def check_script(explanation):
    """Every step has a name of its own, and the script computes and prints it. The explanation's text, which fits."""
    names = [step.name for step in explanation.steps]
    assert len(set(names)) == len(names)
    space, printed = run(explanation)
    for name in names:
        mine = explanation[name]
        assert space[name].shape == mine.shape, name
        torch.testing.assert_close(space[name].to(mine.dtype), mine, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert f"\n{name}\n" in f"\n{printed}"
    text = str(explanation)
    assert max(map(len, text.splitlines())) <= 80
    return text
