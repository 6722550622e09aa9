"""`python -m clearhead`: the command, where a launcher such as torchrun asks for a module."""

from clearhead.cli import main

if __name__ == "__main__":  # tools import every module
    raise SystemExit(main())
