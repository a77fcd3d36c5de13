"""A child process that talks to a remote cache, for ``remote``. Run as a script:

    python -I -S remote_worker.py

A client library that hangs, crashes, or starts threads that no fork survives is then a child's
trouble: it is killed, and its parent compiles. The first line of standard input names the store,
``{"path": sys.path, "url": "s3://...", "seconds": 10.0, "plain": false}``. Every other one is a
request, answered by one line:

    {"do": "get", "name": "...", "file": "...", "most": 1000}
        {"found": true, "tag": "..."}: the object is in the file; or {"found": false}
    {"do": "create", "name": "...", "file": "..."}
        {"made": false, "conditional": true}: there was one of that name, which stays
    {"do": "replace", "name": "...", "file": "...", "tag": "..."}
        {"made": true, "conditional": true}: with a tag, only if it is still that object
    {"do": "list"}
        {"objects": [["name", bytes, seconds since the epoch], ...]}
    {"do": "remove", "name": "..."}
        {}

``conditional`` is false where the client or the store has no such condition: the object was
looked up, then written. Every answer has ``seconds``, what the request took here.
``{"error": "..."}`` answers what failed, with the command that fixes it as ``fix``, or with
``missing``, for lack of that package. The process ends when nothing was asked for a minute.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import random
import re
import select
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_IDLE_SECONDS = 60.0
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
}
_NEAR = re.compile(r"http://([^/?#]*@)?(localhost|127\.0\.0\.1|\[::1\])(:\d*)?([/?#]|$)")
_ALLOW_PLAIN = "export FLEXOPS_CACHE_REMOTE_HTTP=1   # if this network is trusted"
_ENTRY_TYPE = "application/vnd.flexops.cache.v1"
_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_EMPTY = b"{}"
_HALF_WRITTEN = re.compile("416 Range Not Satisfiable|request or response body error")
"""How an object looks that a simple server is writing at this moment."""
_CAUSES = (
    (r"169\.254\.169\.254|metadata\.google|/computeMetadata/",
     "no credentials: none in the environment, and no service of the machine gives any"),
    (r'message: "([^"]+)"', r"\1"),
    (r'error: "(failed to lookup [^"]+)"', r"\1"),
    (r"InvalidCertificate\(\s*(?:Other\()?\s*(\w+)",
     r"its certificate is not accepted: \1 (SSL_CERT_FILE names a site's own authority)"),
    (r"InvalidContentType", "it does not speak TLS"),
    (r"source: TimedOut|kind: Timeout", "no answer within FLEXOPS_CACHE_REMOTE_TIMEOUT"),
)  # fmt: skip


class Problem(Exception):
    """What is wrong, and what fixes it."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


class Bucket:
    """An object store, a web server, or a directory, by obstore."""

    def __init__(self, url: str, seconds: float, plain: bool = False) -> None:
        from datetime import timedelta

        import obstore.store

        limit, start = timedelta(seconds=seconds), timedelta(milliseconds=50)
        if url.startswith("file://"):
            self.store: Any = obstore.store.from_url(url, mkdir=True)
        else:
            backoff = {"init_backoff": start, "max_backoff": limit, "base": 2}
            retry: Any = {"max_retries": 5, "retry_timeout": limit, "backoff": backoff}
            options: Any = {"timeout": limit, "connect_timeout": limit}
            options["allow_http"] = _may_be_plain(url, plain)
            url, options["default_headers"] = _without_password(url)
            self.store = obstore.store.from_url(url, client_options=options, retry_config=retry)
        self.library: Any = obstore
        self.conditional = not url.startswith(("http://", "https://"))

    def get(self, name: str, file: str, most: int) -> dict[str, object]:
        for nap in (0.05, 0.1, 0.2, 0.4, None):
            try:
                result = self.library.get(self.store, name)
                _write(file, result.stream(min_chunk_size=1 << 20), most)
                break
            except (self.library.exceptions.NotFoundError, FileNotFoundError) as error:
                return {"found": False, "why": _cause(str(error))}
            except Exception as error:
                if nap is None or not _HALF_WRITTEN.search(str(error)):
                    raise
                time.sleep(nap)
        tag = {key: result.meta[key] for key in ("e_tag", "version") if result.meta.get(key)}
        return {"found": True, "tag": json.dumps(tag)}

    def create(self, name: str, file: str) -> dict[str, object]:
        errors = self.library.exceptions
        if self.conditional:
            try:
                self.library.put(self.store, name, _read(file), mode="create")
                return {"made": True, "conditional": True}
            except (errors.AlreadyExistsError, FileExistsError):
                return {"made": False, "conditional": True}
            except Exception as error:
                if not _is_unknown(error, errors):
                    raise
                self.conditional = False
        return {"made": not self._exists(name) and self._put(name, file), "conditional": False}

    def replace(self, name: str, file: str, tag: str) -> dict[str, object]:
        errors, mode = self.library.exceptions, json.loads(tag) if tag else {}
        if mode and self.conditional:
            try:
                self.library.put(self.store, name, _read(file), mode=mode)
                return {"made": True, "conditional": True}
            except errors.PreconditionError:
                return {"made": False, "conditional": True}
            except Exception as error:  # a directory has no tags
                if not _is_unknown(error, errors):
                    raise
        return {"made": self._put(name, file), "conditional": False}

    def list(self) -> Iterator[tuple[str, int, float]]:
        for batch in self.library.list(self.store):
            for item in batch:
                yield item["path"], item["size"], item["last_modified"].timestamp()

    def remove(self, name: str) -> None:
        self.library.delete(self.store, name)

    def _exists(self, name: str) -> bool:
        try:
            self.library.head(self.store, name)
        except (self.library.exceptions.NotFoundError, FileNotFoundError):
            return False
        return True

    def _put(self, name: str, file: str) -> bool:
        self.library.put(self.store, name, _read(file))
        return True


def _may_be_plain(url: str, plain: bool) -> bool:
    """Whether the client may use HTTP without encryption: only if the user wrote an address that
    begins so, and never for ``https://``, which a redirect would otherwise lead away from TLS.
    """
    scheme = url.partition("://")[0]
    names = _ENDPOINTS.get(scheme, ())
    told = {name: os.environ.get(name, "") for name in names} if names else {"its URL": url}
    open_ones = {name: value for name, value in told.items() if value.startswith("http://")}
    for name, value in open_ones.items():
        if not plain and not _NEAR.match(value):
            what = f"{name} begins with http://, and another machine is not trusted without TLS"
            raise Problem(what, _ALLOW_PLAIN)
    return bool(open_ones)


def _without_password(url: str) -> tuple[str, dict[str, str]]:
    """A web server's URL, and the header with its user and password, which obstore leaves away."""
    scheme, _, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    login, at, host = place.rpartition("@")
    if not at or scheme not in ("http", "https"):
        return url, {}
    secret = base64.b64encode(urllib.parse.unquote(login).encode()).decode()
    return f"{scheme}://{host}{slash}{path}", {"Authorization": f"Basic {secret}"}


def _is_unknown(error: Exception, errors: Any) -> bool:
    """Whether a store or its client does not know conditional puts."""
    unknown = isinstance(error, (errors.NotSupportedError, NotImplementedError))
    return unknown or "501 Not Implemented" in str(error)


class Rejected(OSError):
    """A registry's answer that is an error, with its HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"it answers {status} {reason}")
        self.status = status


class Registry:
    """A repository of a container registry, by oras: an object is a manifest with one layer, and
    its name is the tag.

    A tag cannot be made on the condition that there is none.
    """

    def __init__(self, url: str, seconds: float, plain: bool = False) -> None:
        import oras.auth
        import oras.provider

        self.place, self.has_empty = url.removeprefix("oci://").rstrip("/"), False
        host = self.place.partition("/")[0]
        bare = plain or bool(_NEAR.match(f"http://{host}/"))
        certificates = os.environ.get("SSL_CERT_FILE") or True
        kind = oras.provider.Registry
        self.client = kind(insecure=bare, tls_verify=certificates)
        session = self.client.session
        session.request = functools.partial(session.request, timeout=seconds)
        if not bare:
            del session.adapters["http://"]  # a redirect does not lead away from TLS
        # oras repeats whatever fails for two minutes; the parent decides what is repeated
        self.client.do_request = functools.partial(kind.do_request.__wrapped__, self.client)
        ping = session.get(f"{self.client.prefix}://{host}/v2/", verify=certificates)
        asked = ping.headers.get("Www-Authenticate", "")
        basic = asked.lower().startswith("basic")
        if basic:
            self.client.auth = oras.auth.get_auth_backend("basic", session, bare, certificates)
        folder = os.environ.get("DOCKER_CONFIG")  # oras itself looks into ~/.docker only
        logins = [os.path.join(folder, "config.json")] if folder else None
        self.client.auth.load_configs(self._container("x"), logins)
        if basic:  # with the first request: a body that was rejected could not be sent again
            try:
                session.headers.update(self.client.auth.get_auth_header())
            except AttributeError:  # oras has no credentials for it
                fix = f"docker login {host}"
                raise Problem(f"{host} requires a user and password", fix) from None

    def get(self, name: str, file: str, most: int) -> dict[str, object]:
        return _repeated(lambda: self._get(name, file, most))

    def _get(self, name: str, file: str, most: int) -> dict[str, object]:
        container = self._container(name)
        answer = self._ask("GET", container.manifest_url(), headers={"Accept": _MANIFEST_TYPE})
        if answer.status_code == 404:
            return {"found": False}
        digest = self._right(answer).json()["layers"][0]["digest"]
        content = self._right(self.client.get_blob(container, digest, stream=True))
        _write(file, content.iter_content(1 << 20), most)
        if digest != f"sha256:{hashlib.sha256(_read(file)).hexdigest()}":
            raise OSError("the registry sent another blob than the one that was asked for")
        return {"found": True, "tag": answer.headers.get("Docker-Content-Digest", "")}

    def create(self, name: str, file: str) -> dict[str, object]:
        return _repeated(lambda: self._put(name, file, new=True))

    def replace(self, name: str, file: str, _tag: str) -> dict[str, object]:
        return _repeated(lambda: self._put(name, file, new=False))

    def _put(self, name: str, file: str, *, new: bool) -> dict[str, object]:
        """Put an object. If it must be new, look for one of that name before and after the upload:
        only one request lies between the last look and the put."""
        if new and self._has(name):
            return {"made": False, "conditional": False}
        manifest = self._upload(name, file)
        if new and self._has(name):
            return {"made": False, "conditional": False}
        headers = {"Content-Type": _MANIFEST_TYPE}
        url = self._container(name).manifest_url()
        try:
            self._right(self._ask("PUT", url, json=manifest, headers=headers))
        except Rejected:
            self.has_empty = False
            raise
        return {"made": True, "conditional": False}

    def _has(self, name: str) -> bool:
        url = self._container(name).manifest_url()
        answer = self._ask("HEAD", url, headers={"Accept": _MANIFEST_TYPE})
        return answer.status_code != 404 and bool(self._right(answer))

    def _upload(self, name: str, file: str) -> dict[str, object]:
        """Upload the content, and return the manifest that refers to it."""
        container = self._container(name)
        layer = _described(_read(file), _ENTRY_TYPE)
        config = _described(_EMPTY, "application/vnd.oci.empty.v1+json")
        self._right(self.client.upload_blob(file, container, layer))
        if not self.has_empty:
            with open(file + ".empty", "wb") as stream:
                stream.write(_EMPTY)
            self._right(self.client.upload_blob(stream.name, container, config))
            self.has_empty = True
        return {
            "schemaVersion": 2, "mediaType": _MANIFEST_TYPE, "artifactType": _ENTRY_TYPE,
            "config": config, "layers": [layer],
        }  # fmt: skip

    def list(self) -> Iterator[tuple[str, int, float]]:
        """Registries do not report how old a tag is: the time is 0."""
        for tag in self.client.get_tags(self._container("x")):
            parts = tag.rsplit(".", 3)
            if len(parts) == 4:
                container = self.client.get_container(f"{self.place}:{tag}")
                layers = self.client.get_manifest(container)["layers"]
                size = sum(layer["size"] for layer in layers)
                yield f"{parts[0]}/{'.'.join(parts[1:])}", size, 0.0

    def remove(self, name: str) -> None:
        container = self._container(name)
        self.client.delete_tag(container, container.tag)

    def _container(self, name: str) -> Any:
        return self.client.get_container(f"{self.place}:{name.replace('/', '.')}")

    def _ask(self, method: str, url: str, **options: Any) -> Any:
        return self.client.do_request(f"{self.client.prefix}://{url}", method, **options)

    def _right(self, answer: Any) -> Any:
        if answer.status_code >= 400:
            raise Rejected(answer.status_code, answer.reason)
        return answer


def _repeated(call: Callable[[], dict[str, object]]) -> dict[str, object]:
    """Repeat a request that a registry rejects because another client writes the same object:
    docker-registry answers 400 to a put, and 500 to a look-up."""
    for nap in (0.1, 0.4, 1.6, None):
        try:
            return call()
        except Rejected as error:
            if nap is None or not (error.status == 400 or error.status >= 500):
                raise
            time.sleep(nap * random.uniform(0.5, 1.5))
    raise AssertionError("the last attempt returns or raises")


def _described(content: bytes, kind: str) -> dict[str, object]:
    return {
        "mediaType": kind,
        "digest": f"sha256:{hashlib.sha256(content).hexdigest()}",
        "size": len(content),
    }


def _read(file: str) -> bytes:
    with open(file, "rb") as stream:
        return stream.read()


def _write(file: str, parts: Iterable[Any], most: int) -> None:
    with open(file, "wb") as stream:
        for part in parts:
            most -= stream.write(part)
            if most < 0:
                raise OSError("it is larger than it may be")


def _answer(store: Bucket | Registry, asked: dict[str, Any]) -> dict[str, object]:
    what, name = asked["do"], asked.get("name", "")
    if what == "get":
        return store.get(name, asked["file"], asked["most"])
    if what == "create":
        return store.create(name, asked["file"])
    if what == "replace":
        return store.replace(name, asked["file"], asked["tag"])
    if what == "list":
        return {"objects": list(store.list())}
    store.remove(name)
    return {}


def _failed(error: Exception) -> dict[str, object]:
    if isinstance(error, ModuleNotFoundError):
        return {"error": str(error), "missing": error.name or ""}
    fix = {"fix": error.fix} if isinstance(error, Problem) else {}
    return {"error": str(error) if fix else _cause(str(error)) or type(error).__name__, **fix}


def _cause(text: str) -> str:
    """What matters of what a client library wrote, which may be pages, and the store's own."""
    status = re.search(r"status code: (\d{3}[^:\n]*)", text)
    code = re.search(r"<Code>(.*?)</Code>(?:\s*<Message>(.*?)</Message>)?", text, re.DOTALL)
    for pattern, cause in _CAUSES if not (status and code) else ():
        if found := re.search(pattern, text):
            return found.expand(cause)
    if status:
        parts = (one for one in code.groups() if one) if code else ()
        return ": ".join([f"it answers {status[1]}", *parts])
    if "Cannot respond to request for authentication" in text:
        return "it does not accept these credentials, or none are known: docker login"
    return text.partition("\n\nDebug source")[0].strip().rpartition(" - ")[2]


def _lines() -> Iterator[str]:
    """What the parent writes: one line at a time, so that nothing of the next one is in a buffer
    while this waits."""
    while select.select([sys.stdin], [], [], _IDLE_SECONDS)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        yield line


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # client libraries print
    lines = _lines()
    where = json.loads(next(lines))
    sys.path[:] = where["path"]
    store: Bucket | Registry | None = None
    answer: dict[str, object] = {}
    try:
        kind = Registry if where["url"].startswith("oci://") else Bucket
        store = kind(where["url"], where["seconds"], where["plain"])
    except Exception as error:
        answer = _failed(error)
    print(json.dumps(answer), file=replies, flush=True)
    for line in lines if store else ():
        started = time.monotonic()
        try:
            answer = _answer(store, json.loads(line))  # type: ignore[arg-type, unused-ignore]
        except Exception as error:  # whatever a client raises is a reason not to have the object
            answer = _failed(error)
        answer["seconds"] = time.monotonic() - started
        print(json.dumps(answer), file=replies, flush=True)


if __name__ == "__main__":
    main()
