"""What makes and measures releases of flexops; see tools/README.md."""


def with_extra(extra: str) -> str:
    """The command that installs what an extra names."""
    return f"pip install './tools[{extra}]'   # in the clone"
