"""Judgements: pure functions of explicit facts. What each is called with, and in which order they
are reported, is ``SECTIONS`` in ``judgement``."""
