"""Messages about a remote cache hold no secrets, and what is put there has names that every store
takes."""

from __future__ import annotations

import re

import pytest

from flexops.build.store.remote import entry_name
from flexops.redaction import redacted, scrubbed


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/prefix", "s3://bucket/prefix"),
        ("https://me:hunter2@host:8443/a/b?sig=hunter2#hunter2", "https://host:8443/a/b"),
        ("https://me@hunter2@host/a", "https://host/a"),
        ("https://host?sig=hunter2", "https://host"),
        ("file:///shared/x", "file:///shared/x"),
    ],
)
def test_a_url_in_public(url, said):
    assert redacted(url) == said


@pytest.mark.parametrize(
    "text",
    [
        "GET https://me:hunter2@host/x failed",
        "error sending request for url (https://host/x?X-Amz-Signature=hunter2&b=c)",
        "Authorization: hunter2",
        "Authorization: Bearer hunter2, Basic hunter2",
        "signature=hunter2; Credential=hunter2",
        "the token=hunter2 has expired",
        "it answers 403: key hunter2-from-the-environment",
    ],
)
def test_what_a_client_says_in_public(text, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-from-the-environment")
    assert "hunter2" not in scrubbed(text)


def test_it_is_one_line_of_bounded_length():
    assert scrubbed("several\n\n  lines\t" + "x" * 1000) == "several lines " + "x" * 286


@pytest.mark.parametrize(
    "name",
    [
        "rope-cpu",
        "mylib.scale-sm_90a-0123456789ab",
        "Name with blanks",
        "über",
        "x" * 250,
        "-dash",
        "a:b",
    ],
)
def test_names_are_those_that_a_registry_takes_too(name):
    tag = entry_name(name, "0" * 40).replace("/", ".")
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", tag)
    assert len({entry_name(name, "0" * 40), entry_name(name + "y", "0" * 40)}) == 2
