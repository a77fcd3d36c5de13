"""Artifacts for other machines: builds ahead of time, and what a recorded run needs."""
