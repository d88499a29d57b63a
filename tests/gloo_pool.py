"""One pool of gloo workers for all multi-process tests of a session.

    def add_ranks(offset):                      # module level, in the test file
        value = torch.tensor([dist.get_rank() + offset])
        dist.all_reduce(value)
        return value.item()

    def test_sum(gloo_pool):
        assert gloo_pool.run(add_ranks, 1) == [10, 10, 10, 10]

The workers are forked at the first call, from a process that has imported torch once, and stay.
Each call runs in a fresh default process group of four ranks. They load the test file by its path
and register it under the name that pytest gave it, so classes defined there can be arguments and
results. A failure in one rank, or a call that is not done in time, kills all workers; the test gets
the traceback, or everybody's stack, and the next call starts new ones.
"""

import atexit
import faulthandler
import functools
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import ModuleType

import pytest

NUM_WORKERS = 4
START_SECONDS = 180


class WorkerError(Exception):
    """A worker raised, died or hung; the message holds its traceback."""


class GlooPool:
    """`num_workers` processes that run functions together."""

    def __init__(self, num_workers: int = NUM_WORKERS):
        self.num_workers = num_workers
        self._parent: subprocess.Popen | None = None
        self._connections: list[Connection] = []
        self._folder = Path()
        self._num_calls = 0

    def run(self, function, *args, timeout: float = 60.0) -> list:
        """Call a module-level function on every rank; returns results in rank order."""
        if "<locals>" in function.__qualname__ or function.__name__ == "<lambda>":
            raise TypeError(f"{function.__qualname__} is not at module level")
        if self._parent is None:
            self._start()
        self._num_calls += 1
        path = str(Path(function.__code__.co_filename).resolve())
        head = pickle.dumps((self._num_calls, path, function.__module__, function.__qualname__))
        body = pickle.dumps(args)
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(head)
                connection.send_bytes(body)
            except ConnectionError:
                self._fail(f"{function.__qualname__}: rank {rank} died before the call")
        return self._collect(timeout, function.__qualname__)

    def close(self) -> None:
        """Kill the workers, if any."""
        if self._parent is None:
            return
        os.killpg(self._parent.pid, signal.SIGKILL)
        self._parent.wait()
        for connection in self._connections:
            connection.close()
        self._parent, self._connections = None, []

    def _start(self) -> None:
        from torch.distributed import TCPStore

        # Held here, the store's port is free for sure, and survives dying workers.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = Path(tempfile.mkdtemp(prefix="gloo_pool_"))
        environ = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        pairs = [Pipe() for _ in range(self.num_workers)]
        descriptors = [theirs.fileno() for _, theirs in pairs]
        command = [sys.executable, __file__, str(self._folder), str(self._store.port)]
        with (self._folder / "parent.log").open("wb") as log:
            self._parent = subprocess.Popen(
                [*command, *map(str, descriptors)],
                env=environ,
                stdout=log,
                stderr=log,
                pass_fds=descriptors,
                start_new_session=True,  # a process group of its own, killed as a whole
            )
        for ours, theirs in pairs:
            theirs.close()
            self._connections.append(ours)
        self._collect(START_SECONDS, "start of the workers")

    def _collect(self, timeout: float, what: str) -> list:
        deadline = time.monotonic() + timeout
        results: dict[int, object] = {}
        while len(results) < self.num_workers:
            waiting = [c for r, c in enumerate(self._connections) if r not in results]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(set(range(self.num_workers)) - set(results))
                self._fail(f"{what}: ranks {missing} not done after {timeout:g} s", stacks=True)
            for connection in ready:
                rank = self._connections.index(connection)
                try:
                    succeeded, payload = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    self._fail(f"{what}: rank {rank} died")
                if not succeeded:
                    self._fail(f"{what}: rank {rank} raised\n{payload}")
                results[rank] = payload
        return [results[rank] for rank in range(self.num_workers)]

    def _fail(self, message: str, *, stacks: bool = False) -> None:
        if stacks:
            os.killpg(self._parent.pid, signal.SIGUSR1)
            time.sleep(0.5)
        logs = sorted(self._folder.glob("*.log"))
        self.close()
        raise WorkerError(
            "\n".join([message, *(f"--- {log.stem}\n{log.read_text()[-4000:]}" for log in logs)])
        )


@functools.cache
def shared_pool() -> GlooPool:
    """The session's pool: one, however many conftest files ask for it."""
    pool = GlooPool()
    atexit.register(pool.close)
    return pool


@pytest.fixture(scope="session")
def gloo_pool() -> GlooPool:
    """The session's pool of four gloo workers."""
    return shared_pool()


def _fork_workers(folder: Path, port: int, descriptors: list[int]) -> None:
    """Import torch, fork one worker a descriptor, wait for them."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint

    # Autograd imports it at its first backward, seconds that every worker would spend again.
    import torch.fx.experimental.symbolic_shapes

    assert dist.is_available() and torch.get_num_threads() == 1
    for rank, descriptor in enumerate(descriptors):
        if os.fork() == 0:
            for other in descriptors:
                if other not in (descriptor, -1):
                    os.close(other)
            log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            _serve(Connection(descriptor), rank, len(descriptors), port)
        os.close(descriptor)
        descriptors = [-1 if d == descriptor else d for d in descriptors]
    for _ in descriptors:
        os.wait()


def _serve(connection: Connection, rank: int, num_workers: int, port: int) -> None:
    """A worker's life: answer calls until the parent is gone."""
    import torch
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            call, path, module_name, name = pickle.loads(connection.recv_bytes())
            body = connection.recv_bytes()
        except (EOFError, ConnectionError):
            os._exit(0)
        try:
            function = getattr(_load(path, module_name), name)
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(str(call), store),
                rank=rank,
                world_size=num_workers,
                timeout=timedelta(seconds=60),
            )
            torch.manual_seed(0)
            result = pickle.dumps((True, function(*pickle.loads(body))))
            # A rank that leaves early closes connections that others may still be opening.
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            result = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(result)


def _load(path: str, module_name: str):
    if module_name not in sys.modules:
        parts = module_name.split(".")
        for end in range(1, len(parts)):  # unpickling imports the packages above it first
            parent = ".".join(parts[:end])
            sys.modules.setdefault(parent, ModuleType(parent))
        spec = importlib.util.spec_from_file_location(module_name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return sys.modules[module_name]


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    _fork_workers(Path(sys.argv[1]), int(sys.argv[2]), [int(d) for d in sys.argv[3:]])
