"""Package indexes: pip's settings, which uv does not read, and indexes that do not answer."""

from __future__ import annotations

import configparser
import os
import re
import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

SECONDS = 5.0
DEFAULT = "https://pypi.org/simple"
_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "client-cert": "SSL_CLIENT_CERT",
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
}
_UV_INDEXES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL")


def pip_settings(
    environ: Mapping[str, str] = os.environ, prefix: str = sys.prefix
) -> dict[str, str]:
    """What pip is configured to do, by its own rules: files from the system's to the user's, their
    section [install] before [global], then its variables. Lists are separated by white space."""
    home = environ.get("HOME") or os.path.expanduser("~")
    files = [
        *(f"{one}/pip/pip.conf" for one in environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")),
        "/etc/pip.conf",
        f"{home}/.pip/pip.conf",
        f"{environ.get('XDG_CONFIG_HOME') or home + '/.config'}/pip/pip.conf",
        f"{prefix}/pip.conf",
        environ.get("PIP_CONFIG_FILE", ""),
    ]
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}}
    for file in filter(None, files if files[-1] != os.devnull else []):
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            continue
        for section in filter(parser.has_section, found):
            found[section].update(parser.items(section))
    variables = {name[4:]: value for name, value in environ.items() if name.startswith("PIP_")}
    layers = (found["global"], found["install"], variables)
    return {
        name.lower().replace("_", "-"): " ".join(value.split())
        for layer in layers
        for name, value in layer.items()
        if value.strip()
    }


def for_uv(
    settings: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> tuple[list[str], dict[str, str]]:
    """The options and variables that make uv install from where pip would. Variables that the user
    has set for uv stay."""
    options = ["--no-index"] if _is_true(settings.get("no-index", "")) else []
    wanted = {_UV[name]: value for name, value in settings.items() if name in _UV}
    if "UV_FIND_LINKS" in wanted:
        wanted["UV_FIND_LINKS"] = ",".join(wanted["UV_FIND_LINKS"].split())
    if proxy := settings.get("proxy"):
        proxy = proxy if "://" in proxy else f"http://{proxy}"
        wanted.update(HTTP_PROXY=proxy, HTTPS_PROXY=proxy)
    if settings.get("keyring-provider") == "subprocess":
        wanted["UV_KEYRING_PROVIDER"] = "subprocess"
    if any(environ.get(name) for name in _UV_INDEXES):
        wanted = {name: value for name, value in wanted.items() if name not in _UV_INDEXES}
    # as pip: the best version that any index has, and the certificates of the system
    wanted["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if ssl.get_default_verify_paths().cafile:
        wanted["UV_SYSTEM_CERTS"] = "true"
    return options, {name: value for name, value in wanted.items() if not environ.get(name)}


def answering(urls: Iterable[str]) -> tuple[list[str], list[str]]:
    """Those that answer in a few seconds, and those that do not: an installer would ask each of
    them for minutes, for each package. All are asked at once."""
    urls = list(urls)
    good: set[str] = set()

    def ask(url: str) -> None:
        if _answers(url):
            good.add(url)

    # daemons: resolving a name has no timeout
    asking = [threading.Thread(target=ask, args=(url,), daemon=True) for url in urls]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(SECONDS)
    return [url for url in urls if url in good], [url for url in urls if url not in good]


def without_credentials(text: str) -> str:
    return re.sub(r"(\w+://)\S*@", r"\1", text)


def _answers(url: str) -> bool:
    """Whether a server is there. What it answers is the installer's business: it may have
    credentials and certificates that are not known here."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        return True
    page = parts._replace(
        netloc=parts.netloc.rpartition("@")[2], path=parts.path.rstrip("/") + "/pip/", fragment=""
    ).geturl()
    try:
        urllib.request.urlopen(page, timeout=SECONDS).close()
    except urllib.error.HTTPError as error:
        return error.code < 500
    except (OSError, ValueError) as error:
        return isinstance(getattr(error, "reason", error), ssl.SSLError)
    return True


def _is_true(text: str) -> bool:
    return text.lower() in ("1", "true", "yes", "on", "y", "t")
