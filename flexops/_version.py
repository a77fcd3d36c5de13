"""The version; ``scripts/release.py`` changes it here."""

__version__ = "0.2.0"
