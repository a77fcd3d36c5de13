"""The version; ``flexops_tools.release`` changes it here."""

__version__ = "0.2.0"
