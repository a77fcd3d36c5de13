"""``flexops doctor``: what this machine has, what of it is wrong, and the command that fixes it.

probes (facts) -> checks (judgement: ok, warn or fail, found, required, fix) -> report (text or
JSON)

It must report where everything else fails. So: nothing but the standard library is imported; every
probe and every check is guarded; torch is only imported in other processes. ``python -m
flexops.doctor`` needs no torch, no typer and no rich. From Python:
``flexops.doctor.examination.examine()``.
"""
