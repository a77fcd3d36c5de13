"""A secret from the environment never appears in output, whatever characters it is made of."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from command_line import flexops_command
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from flexops import settings
from flexops.build.store import remote
from flexops.errors import FlexopsError
from flexops.redaction import redacted, scrubbed, split_credentials
from flexops.settings import Settings

ODD = st.text(alphabet="Zq9/?#@:%&=+$!'()*,;[]~|^`{}<>\"\\é", min_size=1, max_size=16)
PASSWORDS = ODD.map(lambda text: f"hun{text}ter2")
SCHEMES = st.sampled_from(["https", "http", "s3", "oci", "ftp"])
QUICK = hypothesis_settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def shows(output: str) -> bool:
    """Whether the output has the first or the last part of the password."""
    return "hun" in output or "ter2" in output


def said_of(url: str) -> str:
    """What the settings and a remote cache print of a URL, or the error that rejects it."""
    try:
        chosen = Settings.from_environ({"FLEXOPS_CACHE_REMOTE": url})
    except FlexopsError as error:
        return str(error)
    store = remote.of(chosen)
    assert store
    return f"{chosen!r} {chosen.cache_remote} {store.name}"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    settings.current.cache_clear()
    remote._of.cache_clear()


@QUICK
@given(scheme=SCHEMES, password=PASSWORDS)
@example(scheme="https", password="hun/ter2")
@example(scheme="https", password="hun?ter2")
@example(scheme="https", password="hun#ter2")
@example(scheme="https", password="hun@ter2/")
def test_no_setting_and_no_error_of_one_shows_a_password(scheme, password):
    for url in (f"{scheme}://me:{password}@localhost/x", f"{scheme}://localhost/x?sig={password}"):
        assert not shows(redacted(url))
        assert not shows(said_of(url))


@QUICK
@given(password=PASSWORDS, form=st.sampled_from(["{}", "GET https://h/{}/x failed", "a{}b"]))
@example(password="hun/ter2", form="error for url (https://me:{}@host/x)")
def test_no_message_of_a_client_shows_what_a_variable_holds(password, form):
    url = f"https://me:{quote(password, safe='')}@host/x"
    for variables in ({"FLEXOPS_CACHE_REMOTE": url}, {"AWS_SECRET_ACCESS_KEY": password}):
        for spelling in (password, quote(password, safe="")):
            assert not shows(scrubbed(form.format(spelling), variables))


@pytest.mark.parametrize("password", ["hun/ter2", "hun?ter2", "hun#ter2", "hun%2Fter2", "hunter2"])
@pytest.mark.parametrize(
    "command", ["cache info", "cache remote list", "warm --record {}", "new a"]
)
def test_no_command_shows_a_password(
    password, command, tmp_path, monkeypatch,
    logged
):  # fmt: skip

    monkeypatch.setenv("FLEXOPS_CACHE_REMOTE", f"https://me:{password}@localhost:1/x")
    monkeypatch.setenv("FLEXOPS_CACHE_REMOTE_TIMEOUT", "0.2")
    monkeypatch.setenv("FLEXOPS_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(str(tmp_path))
    settings.current.cache_clear()
    logging.getLogger().setLevel(logging.DEBUG)
    done = flexops_command(*command.format(tmp_path).split(), catch_exceptions=True)
    assert not shows(f"{done.output} {done.exception} {logged.getvalue()}")


def test_doctor_s_finding_shows_no_password():
    from flexops.doctor.checks import machine as checks
    from flexops.doctor.probes import machine as probes

    for password in ("hun/ter2", "hun?ter2", "hun#ter2"):
        variables = {"FLEXOPS_CACHE_REMOTE": f"http://me:{password}@host/x"}
        findings = list(checks.settings(probes.settings(variables)))
        assert findings[0].status == "fail"
        assert not shows(str(findings))


def test_paths_of_keys_are_no_secrets():
    variables = {"FLEXOPS_CACHE_SIGNING_KEY": "/keys/mine", "AWS_CONFIG_FILE": "/a/b"}
    assert scrubbed("/keys/mine and /a/b", variables) == "/keys/mine and /a/b"


@pytest.mark.parametrize("url", ["https://index.example/simple", "git@host:a/b", ""])
def test_a_url_without_credentials_is_whole(url):
    assert split_credentials(url) == (url, "")


def test_credentials_are_split_off():
    found = split_credentials("https://me:s3cret@index.example:8443/simple")
    assert found == ("https://index.example:8443/simple", "me:s3cret")


def test_a_password_that_cannot_be_split_off_is_an_error_without_it():
    with pytest.raises(FlexopsError, match="percent-encode") as caught:
        split_credentials("https://me:s3/cret@index.example/simple")
    assert "cret" not in str(caught.value)
