"""``python -m flexops``: the command line, where the ``flexops`` script is not on PATH."""

from .cli import main

main()
