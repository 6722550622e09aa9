"""Try every architecture of transformers, and write docs/models.md.

.venv/bin/python tests/every_architecture.py                 # all, and what came out
.venv/bin/python tests/every_architecture.py llama whisper   # these
.venv/bin/python tests/every_architecture.py --write         # all, into docs/models.md
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import wait

SECONDS = 60  # of its processor's time; by the clock it may take MOST times that, on a machine that does other work too
MOST = 10
MEMORY = 8 << 30  # bytes that one trial may take, beyond what its libraries have
AT_ONCE = 2


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*")
    options.add_argument("--write", action="store_true")
    options.add_argument("--json", help="also write the outcomes to this file")
    asked = options.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    from zoo import document
    from zoo.registry import names

    unknown = sorted(set(asked.names) - set(names()))
    if unknown:
        options.error(f"transformers has no architecture named {', '.join(unknown)}")
    chosen = asked.names or names()
    outcomes = []
    for i, outcome in enumerate(tried(chosen)):
        outcomes.append(outcome)
        print(f"{i + 1}/{len(chosen)}", *outcome, sep=" | ", flush=True)
    outcomes.sort()
    print(document.counts([document.text_of(outcome) for outcome in outcomes]))
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(outcomes, file, indent=0)
    if asked.write:
        document.write(outcomes)
    return int(any(outcome.kind == "different" for outcome in outcomes))


def tried(names):
    """The outcome of each, in the order in which they end: each in a process of its own, for what it may do."""
    import torch
    import transformers
    from zoo.registry import model_class
    from zoo.trial import Outcome

    torch.set_num_threads(1)  # before the forks: a process that has started threads cannot be forked safely
    transformers.utils.logging.set_verbosity_error()
    model_class("bert")  # imports what all models share, once
    context = multiprocessing.get_context("fork")
    left, running = list(reversed(names)), {}
    while left or running:
        while left and len(running) < AT_ONCE:
            name = left.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=one, args=(name, sender), daemon=True)
            process.start()
            sender.close()
            running[receiver] = name, process, time.monotonic()
        for receiver in wait(list(running), timeout=0.5):
            name, process, _ = running.pop(receiver)
            try:
                told = receiver.recv()
            except EOFError:
                told = None
            process.join()
            late = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
            why = f"over {SECONDS} s" if late else f"its process ended with {process.exitcode}"
            yield Outcome(*told) if told else Outcome(name, "not built" if late else "different", [], 0, why)
        for receiver, (name, process, since) in list(running.items()):
            if time.monotonic() - since > MOST * SECONDS:
                process.kill()
                process.join()
                del running[receiver]
                yield Outcome(name, "not built", [], 0, f"over {SECONDS} s")


def one(name, sender):
    import resource  # not on every system

    from zoo.trial import Outcome, attempt, shortened

    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        outcome = attempt(name)
    except Exception as error:  # a defect of the trial, or of what is tried
        outcome = Outcome(name, "different", [], 0, shortened(error))
    sender.send(tuple(outcome))


if __name__ == "__main__":
    sys.exit(main())
