"""The fixtures of ``remote_machines``, for the tests of the remote cache."""

from __future__ import annotations

from remote_machines import bad, in_step, machines, opened, patient, s3_address, wait

__all__ = ["bad", "in_step", "machines", "opened", "patient", "s3_address", "wait"]
