"""One dump of one capsule: freeze, stream into a worker, stop at the point of no return, then end or resume.

CRIU runs its action script at `post-dump`, when every image file is written and the tasks are still frozen. The hook
waits for us: if we answer 0 the tasks are resumed; with anything else, or when this agent dies, CRIU undoes the dump
and the tasks run on. So a tree that shall leave is ended inside the hook, after the commit and still frozen.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpucr_hpc import wire
from gpucr_hpc.capsule.capsule import PRIVATE_DIRECTORIES, Capsule
from gpucr_hpc.capsule.processes import Process, namespace_processes
from gpucr_hpc.capsule.rundir import RunDir
from gpucr_hpc.config import EngineConfig
from gpucr_hpc.engine import bypass, copier, criu, large, pagemap
from gpucr_hpc.engine.worker_client import WorkerClient, pipe
from gpucr_hpc.errors import DumpFailed
from gpucr_hpc.faults import Point, reach
from gpucr_hpc.log import Log
from gpucr_hpc.proc import clean_env, run_async

FILES_STREAM = "private-files.tar"
LOG_DIRECTORY = Path("/var/log/gpucr")
_UNDO_LIMIT_S = 60.0

log = Log(__name__)


@dataclass(frozen=True)
class Frozen:
    """A captured, still frozen tree. streams: names in the image; processes: what was in the namespace; frozen_at:
    seconds of the monotonic clock when every task had stopped; beside_bytes: memory that was read beside CRIU."""

    streams: list[str]
    processes: list[Process]
    frozen_at: float
    beside_bytes: int = 0


class Dump:
    """A dump under way. Call `capture`, then exactly one of `resume`, `end` and `undo`."""

    def __init__(
        self, capsule: Capsule, run_dir: RunDir, worker: WorkerClient, config: EngineConfig, *, beside: bool = True
    ) -> None:
        """beside: large memory may be read beside CRIU, where that is worth it."""
        self._capsule, self._run_dir, self._worker, self._config = capsule, run_dir, worker, config
        self._beside = beside
        self._criu: asyncio.subprocess.Process | None = None
        self._server: asyncio.Server | None = None
        self._hooks: dict[str, wire.Channel] = {}
        self._arrived = asyncio.Event()
        self._ended: asyncio.Future[tuple[bytes, bytes]] | None = None
        self._copier = contextlib.AsyncExitStack()
        self._copied: Callable[[], int] | None = None
        self._copied_before = 0
        self._measured: asyncio.Future[large.Memory] | None = None
        self._log = run_dir.work / "dump.log"

    async def expect_more(self) -> None:
        """To be called before a driver adds large memory to the tree: what can be done for its capture now is done."""
        pids = [p.pid for p in namespace_processes(self._capsule.init_pid)]
        self._measured = asyncio.ensure_future(asyncio.to_thread(large.measure, pids))
        await self.start_copier()

    async def start_copier(self) -> None:
        """Let the worker read large memory of the tree's processes until it is captured, also before; twice is fine."""
        if self._copied is None:
            processes = namespace_processes(self._capsule.init_pid)
            known = {p.nspid: p.pid for p in processes if large.has_some(p.pid)}
            self._copied = await self._copier.enter_async_context(copier.started(self._worker, known, write=False))
        self._copied_before = self._copied()

    @property
    def beside_bytes(self) -> int:
        """Memory that gpucr-copier has read for the capture so far."""
        return self._copied() - self._copied_before if self._copied is not None else 0

    async def capture(self) -> Frozen:
        """Freeze the tree and stream it into the worker; on return it is still frozen.

        Raises DumpFailed or an error of the worker, which is MemoryUnreadable when only reading beside CRIU failed;
        `undo` is to be called then.
        """
        capsule = self._capsule
        self._log.unlink(missing_ok=True)  # of an earlier dump: its words would explain this one's failure
        await self._listen()
        env = {"GPUCR_HOOK_SOCKET": str(self._run_dir.images / "hook.sock")}
        plugins = None
        pids = [p.pid for p in namespace_processes(capsule.init_pid)] if self._beside else []
        rest = None if self._measured is None else (await self._measured).rest
        if await asyncio.to_thread(large.wanted, pids, rest):
            await self.start_copier()
            plugins = large.plugin_folder(self._run_dir.work)
            env["GPUCR_MEMORY_SOCKET"] = str(self._run_dir.images / bypass.SOCKET)
        argv = criu.enter_argv(
            capsule,
            criu.dump_argv(self._config, capsule.root, self._run_dir.images, self._run_dir.work, plugins),
        )
        self._criu = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=clean_env(env),
            start_new_session=True,
        )
        ended = self._ended = asyncio.ensure_future(self._criu.communicate())
        arrived = asyncio.ensure_future(self._arrived.wait())
        try:
            await reach(Point.CRIU_STARTED, capsule.job)
            done, _ = await asyncio.wait(
                {ended, arrived}, timeout=self._config.dump_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            arrived.cancel()
        if not done:
            await self._worker.abandon()  # without its stream CRIU fails and undoes
            raise await self._failure(f"not done within {self._config.dump_timeout_s:.0f} s")
        if ended in done and not self._arrived.is_set():
            await self._worker.call("cause")  # a full store, say: CRIU only sees its stream break
            raise await self._failure("")
        streams = await self._worker.call("drain", timeout_s=self._config.dump_timeout_s)
        await self._copier.aclose()
        await self._take_private_files()
        processes = self._check_complete(streams)
        await self._take_injected_pages(processes)
        frozen_at = await self._worker.call("frozen_at")
        beside = 0 if plugins is None else await self._worker.call("beside")
        log.info("memory captured", job=capsule.job, beside_bytes=beside)
        return Frozen(streams, processes, frozen_at, beside)

    async def resume(self) -> None:
        """Let the tree run on. Raises DumpFailed when CRIU then fails."""
        assert self._criu is not None
        assert self._ended is not None
        await self._answer(0)
        await asyncio.shield(self._ended)  # `undo` waits for it, too
        await self._close()
        if self._criu.returncode != 0:
            raise await self._failure("CRIU failed when it let the tasks go")

    async def end(self) -> None:
        """After the commit: end the tree without letting it run again. CRIU lives in the same pid namespace and
        dies with it, in its hook."""
        assert self._ended is not None
        await self._capsule.kill()
        await self._ended
        await self._close()

    async def undo(self) -> None:
        """Make the tree run on as before the dump. A CRIU that still streams ends when its worker is gone."""
        await self._answer(1)
        if self._ended is not None:
            await self._wait_undone()
        await self._close()

    async def _wait_undone(self) -> None:
        assert self._ended is not None
        try:
            await asyncio.wait_for(asyncio.shield(self._ended), _UNDO_LIMIT_S)
        except TimeoutError:
            # Killing a CRIU that holds tasks can leave its code inside them; it is the last resort.
            log.error("criu does not end, killed", job=self._capsule.job)
            assert self._criu is not None
            with contextlib.suppress(ProcessLookupError):  # it has ended in this moment
                self._criu.kill()
            await self._ended

    async def _listen(self) -> None:
        path = self._run_dir.images / "hook.sock"
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(wire.ends_quietly(self._hook), str(path))
        path.chmod(0o666)  # the hook has the user's real id, and a shell between may drop the effective one

    async def _hook(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = wire.Channel(reader, writer)
        frame = await channel.receive()
        if frame is None or frame.type is not wire.Type.HOOK or channel.peer.uid not in (0, self._capsule.uid):
            channel.close()
            return
        if frame.get("ACTION") == "post-dump" and not self._arrived.is_set():
            self._hooks["post-dump"] = channel
            self._arrived.set()
            return
        await channel.send(wire.make(wire.Type.HOOKRESULT, STATUS=0))
        channel.close()

    async def _answer(self, status: int) -> None:
        channel = self._hooks.pop("post-dump", None)
        if channel is not None:
            await channel.send(wire.make(wire.Type.HOOKRESULT, STATUS=status))
            channel.close()

    async def _close(self) -> None:
        await self._copier.aclose()
        # The accepted end of a hook's connection belongs to the job's network and would keep it alive.
        for channel in self._hooks.values():
            channel.close()
        self._hooks.clear()
        if self._server is not None:
            self._server.close()
            self._server = None
        (self._run_dir.images / "hook.sock").unlink(missing_ok=True)

    async def _failure(self, reason: str) -> DumpFailed:
        """The error to raise, after CRIU has ended; its log is kept where an admin finds it."""
        await self._wait_undone()
        await self._close()
        assert self._ended is not None
        output = (await self._ended)[0].decode(errors="replace")
        said = criu.explain_file(self._log) if self._log.exists() else criu.explain(output)
        kept = keep_log(self._log, self._capsule.job)
        return DumpFailed(reason="; ".join(filter(None, [reason, said])), log=kept)

    async def _take_private_files(self) -> None:
        """Add the capsule's own /tmp and /dev/shm to the image; CRIU does not save files that have a name.

        Its link_remap files, which stand for open files whose name is gone, lie there too and go along; here they
        are removed again, since they belong to the image alone.
        """
        read, write = pipe()
        try:
            names = [directory.lstrip("/") for directory in PRIVATE_DIRECTORIES]
            tar = await asyncio.create_subprocess_exec(
                *("tar", "--create", "--sparse", "--xattrs", "--acls", "--numeric-owner", "--warning=no-file-ignored"),
                *("--directory", str(self._capsule.inside("/")), "--file", "-", *names),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write,
                stderr=asyncio.subprocess.PIPE,
                env=clean_env(),
            )
        finally:
            os.close(write)
        try:
            await self._worker.call("add", [read], name=FILES_STREAM)
        finally:
            os.close(read)
        _, said = await tar.communicate()
        if tar.returncode != 0:
            text = said.decode(errors="replace").strip()[-500:]
            raise DumpFailed(reason=f"cannot save the job's /tmp and /dev/shm: {text}", log="tar")
        remove_link_remaps(self._capsule)

    async def _take_injected_pages(self, processes: list[Process]) -> None:
        """Read again the pages in which CRIU's own instructions may have been when they were streamed (pagemap.py)."""
        by_pid = {str(p.nspid): p for p in processes}
        wanted = {}
        for nspid, process in by_pid.items():
            with contextlib.suppress(OSError):  # a zombie has no memory
                wanted[nspid] = pagemap.injected_pages(Path(f"/proc/{process.pid}/maps").read_text(errors="replace"))
        patches: pagemap.Patches = {}
        for file, offset, nspid, address in await self._worker.call("locate", pages=wanted):
            with open(f"/proc/{by_pid[nspid].pid}/mem", "rb", buffering=0) as memory:
                data = os.pread(memory.fileno(), pagemap.PAGE_BYTES, address)
            patches.setdefault(file, []).append((offset, data))
        await add_bytes(self._worker, pagemap.PATCHES_STREAM, pagemap.encode_patches(patches))

    def _check_complete(self, streams: list[str]) -> list[Process]:
        """Compare the image with what the namespace holds: a process that is not in the image would be lost."""
        saved = {name.removeprefix("core-").removesuffix(".img") for name in streams if name.startswith("core-")}
        processes = namespace_processes(self._capsule.init_pid)
        entered = {p.pid for p in processes if p.name in ("criu", "gpucr-hook", "gpucr-init")}
        missing = [
            p
            for p in processes[1:]
            if str(p.nspid) not in saved and p.pid not in entered and p.ppid not in entered and p.state != "Z"
        ]
        if missing:
            names = ", ".join(f"{p.name} (pid {p.nspid})" for p in missing)
            raise DumpFailed(reason=f"not in the image: {names}", log=self._log)
        return [p for p in processes[1:] if str(p.nspid) in saved]


async def add_bytes(worker: WorkerClient, name: str, content: bytes) -> None:
    """Put a small file of our own into the image that a worker writes."""
    read, write = pipe()

    def feed() -> None:
        # A worker that does not read on has said why.
        with contextlib.suppress(BrokenPipeError), open(write, "wb") as file:
            file.write(content)

    fed = asyncio.get_running_loop().run_in_executor(None, feed)
    try:
        with open(read, "rb"):
            await worker.call("add", [read], name=name)
    finally:
        await fed


def remove_link_remaps(capsule: Capsule) -> None:
    """Remove CRIU's stand-ins for nameless files from the capsule's private directories."""
    for directory in PRIVATE_DIRECTORIES:
        for place, _, names in os.walk(capsule.inside(directory)):  # programs make and remove directories meanwhile
            for name in fnmatch.filter(names, "link_remap.*"):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(place, name))


def keep_log(path: Path, job: str) -> Path:
    """Copy a log out of the run directory, which goes with the job; return the copy's path, or the original."""
    try:
        LOG_DIRECTORY.mkdir(mode=0o750, parents=True, exist_ok=True)
        kept = LOG_DIRECTORY / f"job{job}-{path.name}"
        shutil.copyfile(path, kept)
        kept.chmod(0o640)
    except OSError:
        return path
    return kept


async def put_private_files(capsule: Capsule, worker: WorkerClient) -> None:
    """Fill a new capsule's /tmp and /dev/shm from the image; raise DumpFailed's counterpart on failure."""
    read, write = pipe()
    try:
        tar = asyncio.ensure_future(
            run_async(
                [
                    *("tar", "--extract", "--preserve-permissions", "--xattrs", "--acls", "--numeric-owner"),
                    *("--directory", str(capsule.inside("/")), "--file", f"/dev/fd/{read}"),
                ],
                env=clean_env(),
                pass_fds=(read,),
            )
        )
        try:
            await worker.call("extract", [write], name=FILES_STREAM)
        finally:
            os.close(write)
            write = -1
        (await tar).check()
    finally:
        os.close(read)
        if write >= 0:
            os.close(write)
