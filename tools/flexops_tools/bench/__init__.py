"""Measurements of what flexops claims: both sides of every comparison in one run."""
