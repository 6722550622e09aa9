"""The command `clearhead`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from clearhead.base.errors import ClearheadError
from clearhead.cli import explain, report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. A bad input is one clear line on standard error, and status 2."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except ClearheadError as error:
        print(f"clearhead: {error}", file=sys.stderr)
        return 2
    except (OSError, RecursionError) as error:  # of a disk that is full, a name too long, a file nested too deeply
        print(f"clearhead: {type(error).__name__}: {error!s:.200}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="clearhead", description="Look into attention, and into that of a model.")
    commands = parser.add_subparsers(dest="command", required=True)
    report.add(commands)
    explain.add(commands)
    return parser
