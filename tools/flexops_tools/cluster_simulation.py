"""What a cluster does to a remote cache: many nodes start at once with empty caches, against an
object store on this machine.

    python -m flexops_tools.cluster_simulation processes [--stop]
        8 nodes (cache directories) of 8 processes each; real kernels, by NVRTC
    python -m flexops_tools.cluster_simulation processes --image IMAGE --packages DIRECTORY
        the nodes are containers
    python -m flexops_tools.cluster_simulation nodes [--count 1000]
        nodes are threads of one process; compiling is a sleep, the rest is the real code

``--stop`` stops the store as soon as half of the kernels are there. ``--torch``: a process imports
torch first, as every real one does. IMAGE has Python and torch, DIRECTORY what is to be importable
beside it: ``pip install --target DIRECTORY obstore nvidia-cuda-nvrtc``. It exits 1 if an artifact
was compiled twice although the store was there, or if a process failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]  # also in a container that has only Python
TYPES = (
    "float",
    "double",
    "int",
    "long",
    "short",
    "unsigned",
    "char",
    "bool",
    "long long",
    "unsigned long",
    "unsigned short",
    "unsigned char",
)
SOURCE = (
    "template <class T> __global__ void fill(T* x, T value) { x[blockIdx.x * blockDim.x +"
    " threadIdx.x] = value; }\n"
)
NODES, PER_NODE = 8, 8
KERNEL_BYTES, COMPILE_SECONDS = 8000, 0.25


class Store:
    """As much of S3 as a client needs, in memory: objects, conditional puts, an answer's latency,
    and counts of what was asked."""

    def __init__(self, latency: float) -> None:
        self.latency, self.objects = latency, dict[str, bytes]()
        self.counts = {"GET": 0, "PUT": 0, "sent": 0, "received": 0}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *rest = head.decode().split("\r\n")
                method, path, _ = first.split(" ")
                headers = {
                    name.lower(): value
                    for name, _, value in (line.partition(": ") for line in rest if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if path == "/-/counts":
                    status = "200 OK"
                    answer = json.dumps({**self.counts, "objects": sorted(self.objects)}).encode()
                else:
                    await asyncio.sleep(self.latency)
                    status, answer = self.answer(method, path, headers, body)
                tag = hashlib.md5(self.objects.get(path, b"")).hexdigest()
                dates = "Last-Modified: Mon, 23 Nov 2026 00:00:00 GMT"
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Length: {len(answer)}\r\nETag:"
                    f' "{tag}"\r\n{dates}\r\n\r\n'.encode()
                    + answer
                )
                await writer.drain()
        writer.close()

    def answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[str, bytes]:
        there = self.objects.get(path)
        self.counts[method] = self.counts.get(method, 0) + 1
        if method == "PUT":
            self.counts["received"] += len(body)
            tag = f'"{hashlib.md5(there or b"").hexdigest()}"'
            if (there is not None and headers.get("if-none-match") == "*") or headers.get(
                "if-match", tag
            ) != tag:
                return "412 Precondition Failed", b""
            self.objects[path] = body
            return "200 OK", b""
        self.counts["sent"] += len(there or b"")
        return ("404 Not Found", b"") if there is None else ("200 OK", there)


def run_store(port: int, latency: float) -> None:
    async def main() -> None:
        server = await asyncio.start_server(
            Store(latency).serve, "127.0.0.1", port, backlog=4096, limit=1 << 22
        )
        await server.serve_forever()

    asyncio.run(main())


class Running:
    """The store as a process of its own."""

    def __init__(self, latency: float) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = multiprocessing.get_context("spawn").Process(
            target=run_store, args=(self.port, latency), daemon=True
        )
        self.process.start()
        while not self.counts():
            time.sleep(0.05)

    def counts(self) -> dict[str, Any]:
        import urllib.request

        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/counts", timeout=20) as answer,
        ):
            found: dict[str, Any] = json.load(answer)
            return found
        return {}

    def environment(self) -> dict[str, str]:
        keys = {
            "AWS_ACCESS_KEY_ID": "simulated",
            "AWS_SECRET_ACCESS_KEY": "simulated",
            "AWS_REGION": "us-east-1",
        }
        return {
            **keys,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "FLEXOPS_CACHE_REMOTE": "s3://bucket/cache",
            "FLEXOPS_CACHE_REMOTE_WRITE": "1",
        }


def be_one_process(with_torch: bool) -> None:
    """A process of a node: it requests every kernel, one after the other, as launches do."""
    if with_torch:
        import flexops  # noqa: F401  (and torch)
    else:
        sys.modules["torch"] = None  # type: ignore[assignment]
    from flexops import settings
    from flexops.build.compile import device_code
    from flexops.build.describe import layout
    from flexops.build.load import loader
    from flexops.build.plan import kernel_plan
    from flexops.build.store import counters
    from flexops.compute_capability import parse_arch_list
    from flexops.toolchain import nvrtc
    from flexops.toolchain.context import SearchContext
    from flexops.toolchain.installed_torch import package_dirs

    compiler = nvrtc.find(SearchContext(site_dirs=package_dirs(()))).usable[0].value
    cache, architecture = loader.open_cache(settings.current()), parse_arch_list("9.0")[0]
    started = time.monotonic()
    for name in TYPES:
        plan = kernel_plan.TextKernel("fill", SOURCE, f"fill<{name}>", layout.csrc_root()).plan(
            architecture, compiler
        )
        device_code.obtain([plan], cache)[0].require()
    print(json.dumps({"seconds": time.monotonic() - started, "counters": counters.cache_stats()}))


def be_one_node(options: list[str]) -> None:
    """The processes of a node, started at once; prints a line of JSON for each."""
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "one", *options], stdout=subprocess.PIPE, text=True
        )
        for _ in range(PER_NODE)
    ]
    for process in started:
        print(
            (
                process.communicate(timeout=900)[0].strip().splitlines()[-1]
                if process.wait() == 0
                else "null"
            ),
            flush=True,
        )


class Nodes:
    """Where the nodes run: as processes of this machine with a cache directory each, or as
    containers."""

    def __init__(
        self,
        folder: Path,
        environment: dict[str, str],
        options: list[str],
        image: str,
        packages: str,
    ) -> None:
        self.folder = folder
        self.environment = environment
        self.options = options
        self.image = image
        self.packages = packages

    def start(self) -> list[dict[str, Any]]:
        """Start all of them at once; what their processes said."""
        run = self._container if self.image else self._process
        outputs = [
            finish() for finish in [run(self.folder / f"node{number}") for number in range(NODES)]
        ]
        said = [
            json.loads(line)
            for output in outputs
            for line in output.splitlines()
            if line.startswith(("{", "null"))
        ]
        if len(said) != NODES * PER_NODE or None in said:
            sys.exit("a process failed:\n" + "\n".join(outputs)[-4000:])
        return said

    def _process(self, cache: Path) -> Callable[[], str]:
        variables = {**os.environ, **self.environment, "FLEXOPS_CACHE_DIR": str(cache)}
        node = subprocess.Popen(
            [sys.executable, __file__, "node", *self.options],
            env=variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        return lambda: node.communicate(timeout=1800)[0]

    def _container(self, cache: Path) -> Callable[[], str]:
        from flexops_tools.images import engine

        cache.mkdir(exist_ok=True)
        mounts = {
            str(ROOT / part): {"bind": f"/src/{part}", "mode": "ro"}
            for part in ("flexops", "csrc", "tools")
        }
        container = engine.connect().containers.run(
            self.image,
            ["python", "/src/tools/flexops_tools/cluster_simulation.py", "node", *self.options],
            entrypoint="",
            user="0:0",
            detach=True,
            network_mode="host",
            environment={
                **self.environment,
                "FLEXOPS_CACHE_DIR": "/cache",
                "PYTHONPATH": "/src:/packages",
            },
            volumes={
                **mounts,
                self.packages: {"bind": "/packages", "mode": "ro"},
                str(cache): {"bind": "/cache", "mode": "rw"},
            },
        )

        def finish() -> str:
            container.wait(timeout=1800)
            output: str = container.logs().decode()
            container.remove()
            return output

        return finish


def processes(
    latency: float, timeout: float, stop: bool, options: list[str], image: str, packages: str
) -> None:
    store = Running(latency)
    environment = {
        **store.environment(),
        "FLEXOPS_CACHE_REMOTE_TIMEOUT": str(timeout),
        "FLEXOPS_LOG": "quiet",
    }
    with tempfile.TemporaryDirectory() as folder:
        nodes = Nodes(Path(folder), environment, options, image, packages)
        if stop:
            threading.Thread(target=_stop_in_the_middle, args=(store,), daemon=True).start()
        started = time.monotonic()
        cold = nodes.start()
        cold_seconds, counts = time.monotonic() - started, store.counts()
        started = time.monotonic()
        warm = nodes.start()
        warm_seconds = time.monotonic() - started
    compiled = sum(int(one["counters"]["compiler"]["hits"]) for one in cold)
    fetched = sum(int(one["counters"]["remote"]["hits"]) for one in cold)
    print(
        f"{len(cold)} processes on {NODES} nodes, {len(TYPES)} kernels: compiled {compiled},"
        f" fetched {fetched}"
    )
    print(
        f"to the last process: cold {cold_seconds:.1f} s, warm {warm_seconds:.1f} s,"
        f" {cold_seconds / warm_seconds:.2f} times; kernels alone, the slowest process:"
        f" {max(one['seconds'] for one in cold):.1f} s and"
        f" {max(one['seconds'] for one in warm):.2f} s"
    )
    shown = {name: counts[name] for name in ("GET", "PUT", "sent", "received")}
    print(f"store: {'stopped' if stop else shown}")
    touched = not stop and store.counts()["GET"] != counts["GET"]
    store.process.kill()
    if (
        touched
        or (compiled != len(TYPES) and not stop)
        or any(one["counters"]["compiler"]["hits"] for one in warm)
    ):
        sys.exit("an artifact was compiled twice, or a warm start touched the store")


def _stop_in_the_middle(store: Running) -> None:
    while (
        sum(name.endswith(".tar.gz") for name in store.counts().get("objects", ()))
        < len(TYPES) // 2
    ):
        time.sleep(0.05)
    store.process.kill()


class InProcess:
    """Stands for the worker of ``remote``: the same client code, without a process for each of a
    thousand nodes."""

    alive = True
    bucket: Any = None

    def __init__(self, url: str, limit: float, plain: bool) -> None:
        from flexops.build.store import remote_worker

        InProcess.bucket = InProcess.bucket or remote_worker.Bucket(url, limit, plain)

    def ask(self, asked: dict[str, Any], _limit: float) -> dict[str, Any]:
        from flexops.build.store import remote_worker

        try:
            return remote_worker._answer(self.bucket, asked)
        except Exception as error:
            return {"error": str(error)}

    def stop(self) -> None:
        """Nothing to stop."""


def nodes(count: int, kernels: int, latency: float, timeout: float) -> None:
    store = Running(latency)
    os.environ.update(store.environment())
    sys.modules["torch"] = None  # type: ignore[assignment]
    from flexops.build.compile import device_code, kernel_compiler
    from flexops.build.plan import kernel_plan
    from flexops.build.store import remote
    from flexops.build.store.cache import BuildCache
    from flexops.compute_capability import parse_arch_list
    from flexops.toolchain.model import Version
    from flexops.toolchain.nvrtc import DeviceCompiler

    compiler = DeviceCompiler("nvrtc", Path("/none"), Version((13, 0)), "simulated")
    architecture = parse_arch_list("9.0")[0]
    names = [f"simulated{number}" for number in range(kernels)]
    keys = {name: hashlib.sha1(name.encode()).hexdigest() for name in names}
    plans = [
        kernel_plan.KernelPlan(name, keys[name], name, "", architecture, compiler, (), {})
        for name in names
    ]
    compiled, seconds, failed = [], [], []

    def nap(_self: Any, plan: Any, output: Path, _limit: float) -> tuple[str, dict[str, int]]:
        time.sleep(COMPILE_SECONDS)
        output.write_bytes(hashlib.shake_256(plan.name.encode()).digest(KERNEL_BYTES))
        compiled.append(plan.name)
        return plan.name, {}

    kernel_compiler.Worker.compile = nap  # type: ignore[method-assign, assignment]
    remote._worker = InProcess  # type: ignore[assignment]
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as folder:
        gate = threading.Barrier(count + 1)

        def node(number: int) -> None:
            cache = BuildCache(
                Path(folder, str(number)),
                remote=remote.Remote("s3://bucket/cache", write=True, limit=timeout),
            )
            gate.wait()
            started = time.monotonic()
            try:
                for result in device_code.obtain(plans, cache):
                    result.require()
            except Exception as error:
                failed.append(error)
            seconds.append(time.monotonic() - started)

        threads = [threading.Thread(target=node, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        gate.wait()
        for thread in threads:
            thread.join()
    counts = store.counts()
    store.process.kill()
    seconds.sort()
    print(
        f"{count} nodes, {kernels} kernels of {KERNEL_BYTES} bytes and {COMPILE_SECONDS} s:"
        f" compiled {len(compiled)}, failed {len(failed)}"
    )
    print(
        f"seconds to the first, median and last node: {seconds[0]:.1f}, {seconds[count // 2]:.1f},"
        f" {seconds[-1]:.1f} (latency of the store {latency:g} s)"
    )
    print(
        f"requests: {counts['GET']} GET, {counts['PUT']} PUT,"
        f" {(counts['GET'] + counts['PUT']) / count:.1f} a node; bytes: {counts['sent']} out,"
        f" {counts['received']} in, {counts['sent'] / count:.0f} a node"
    )
    if failed or len(compiled) != kernels:
        sys.exit(f"{failed[:1]}, compiled {len(compiled)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("processes", "nodes", "node", "one"))
    parser.add_argument("--count", type=int, default=1000, help="nodes")
    parser.add_argument("--kernels", type=int, default=5)
    parser.add_argument(
        "--latency", type=float, default=0.02, help="seconds that the store takes for an answer"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        help="FLEXOPS_CACHE_REMOTE_TIMEOUT: all nodes share this machine's processors",
    )
    parser.add_argument("--stop", action="store_true", help="stop the store in the middle")
    parser.add_argument("--torch", action="store_true", help="processes import torch")
    parser.add_argument("--image", default="", help="the nodes are containers of this image")
    parser.add_argument(
        "--packages", default="", help="a directory of packages for these containers"
    )
    asked = parser.parse_args()
    options = ["--torch"] if asked.torch else []
    if asked.part == "one":
        be_one_process(asked.torch)
    elif asked.part == "node":
        be_one_node(options)
    elif asked.part == "processes":
        processes(
            asked.latency,
            5.0 if asked.stop else asked.timeout,
            asked.stop,
            options,
            asked.image,
            asked.packages,
        )
    else:
        nodes(asked.count, asked.kernels, asked.latency, asked.timeout)


if __name__ == "__main__":
    main()
