"""The process that writes and reads images: one per checkpoint or restore, as the store's user.

Root is squashed on most parallel file systems, so the agent does not touch the store itself. The worker binds CRIU's
socket as root, then becomes the store's user for good. It obeys records on a socket pair: JSON {"do": verb, ...}, some
with a descriptor, answered by {"ok": ...} or {"error": {...}}. When the agent dies the socket ends, and the worker
removes what is not published and exits; CRIU loses its stream and undoes the dump.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpucr_hpc.engine import bypass, copier, fill, fillplan, hugepages, inspection, pagemap, sealed, sharedfiles, stream
from gpucr_hpc.engine.renumber import renumber
from gpucr_hpc.engine.worker_files import UserFileVerbs
from gpucr_hpc.engine.worker_store import StoreVerbs
from gpucr_hpc.errors import GpucrError, ImageError, IntegrityError, UsageError
from gpucr_hpc.image.base import Base
from gpucr_hpc.image.extents import Extent
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.image.writer import ImageWriter
from gpucr_hpc.model import ImageEntry
from gpucr_hpc.store.base import Staging
from gpucr_hpc.store.posix import PosixStore
from gpucr_hpc.wire import receive_record, send_record

_FIRST_VICTIM = "1000"  # /proc/PID/oom_score_adj
_SWITCH_S = 0.0005  # who reads a pipe must not wait 5 ms, the interpreter's default, behind a thread that computes


class Worker(StoreVerbs, UserFileVerbs):
    """State of one worker: a store, and at most one image that it writes or reads. Each do_ is a verb of the orders."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._listener: socket.socket | None = None
        self._memory: bypass.Bypass | None = None
        self._store: PosixStore | None = None
        self._staging: Staging | None = None
        self._writer: ImageWriter | None = None
        self._reader: ImageReader | None = None
        self._capture: stream.Capture | None = None
        self._serve: stream.Serve | None = None
        self._parts: list[fillplan.Part] = []
        self._copier: copier.Copier | None = None
        self._early = sealed.SealedMemory()

    def run(self) -> None:
        """Obey until the agent closes the socket."""
        while (received := receive_record(self._control)) is not None:
            data, fds = received
            order = json.loads(data)
            verb: Callable[..., Any] = getattr(self, "do_" + order.pop("do"))
            try:
                answer = {"ok": verb(*fds, **order)}
            except GpucrError as error:
                answer = {"error": {"id": type(error).__name__, "fields": _plain(error.fields)}}
            except Exception as error:
                answer = {"error": {"id": "GpucrError", "fields": {"reason": repr(error)}}}
            finally:
                for fd in fds:
                    os.close(fd)
            with contextlib.suppress(OSError):
                send_record(self._control, json.dumps(answer).encode())
        try:
            self.do_abort()
        except GpucrError as error:  # nobody is there to be told; an orphan is found later
            print(f"gpucr worker: not removed: {error}", file=sys.stderr)

    @property
    def store(self) -> PosixStore:
        assert self._store is not None, "open comes first"
        return self._store

    def do_open(
        self, root: str, uid: int, gid: int, listen: str | None = None, name: str = "", expendable: bool = False
    ) -> None:
        """Bind CRIU's socket in directory `listen`, become the store's user, open the store.

        expendable: a node that is short of memory ends this process rather than any other.
        """
        if listen is not None:
            self._listener = stream.listen(Path(listen), name)
            if name == stream.CAPTURE_SOCKET:
                self._memory = bypass.Bypass(Path(listen))
        if expendable:
            Path("/proc/self/oom_score_adj").write_text(_FIRST_VICTIM)
        if os.geteuid() == 0 and uid != 0:
            os.setgroups([gid])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        self._store = PosixStore(root)

    def do_capture(
        self,
        job: str,
        checkpoint: str,
        node_rank: int,
        key: str,
        begin: bool,
        packs: int,
        base: dict[str, Any] | None = None,
        room_bytes: int = 0,
        expected_bytes: int = 0,
    ) -> str | None:
        """Begin an image; CRIU may connect from now on. begin: the checkpoint too, else another node began it.
        room_bytes, expected_bytes: as ImageWriter has them.

        base: checkpoint, entry and key of the job's last image; what is the same there is not written again. Returns
        why it could not be used, if it could not.
        """
        assert self._listener is not None
        self._staging = self.store.begin(job, checkpoint) if begin else self.store.attach(job, checkpoint)
        found, problem = None, None
        if base is not None:
            try:
                found = self._base(self._staging, job, DataKey.from_hex(key), **base)
            except GpucrError as error:
                problem = str(error)
        self._writer = ImageWriter(
            self._staging.create,
            checkpoint=checkpoint,
            node_rank=node_rank,
            key=DataKey.from_hex(key),
            packs=packs,
            base=found,
            room_bytes=room_bytes,
            expected_bytes=expected_bytes,
        )
        if self._memory is not None:
            self._memory.start()
        self._capture = stream.Capture(self._listener, self._writer, self._memory)
        self._capture.start()
        return problem

    def _base(self, staging: Staging, job: str, own: DataKey, checkpoint: str, entry: dict[str, Any], key: str) -> Base:
        if not own.same_ids(DataKey.from_hex(key)):
            raise UsageError(reason=f"checkpoint {checkpoint} was sealed under another site key")
        with self._open_image(job, checkpoint, entry, key) as earlier:
            return Base(earlier, functools.partial(staging.link, checkpoint), staging.remove)

    def do_copier(self, window: int, *sockets: int, pids: list[int]) -> None:
        """Memory of these processes goes through gpucr-copier until the next drain or fill, or one more of it."""
        if self._copier is not None:
            self._copier.close()
        self._copier = copier.Copier(window, sockets, pids)
        if self._memory is not None:
            self._memory.copier, self._memory.sealed = self._copier, self._early
        if self._writer is not None:
            self._writer.adopt(self._copier.window, self._copier.pool_begins)

    def do_early(self, pid: int, ranges: list[tuple[int, int]]) -> None:
        """Seal memory (begin and end) of a process that runs on; what of it does not change is not sealed again. pid:
        inside the namespace. When this returns it has been read."""
        assert self._writer is not None
        assert self._copier is not None
        read = copier.or_zeros(self._copier.memory(pid))
        with self._writer.stream(self._early.name(), pages=True, early=True) as file:
            file.copy_extents(Extent(read, begin, end - begin) for begin, end in ranges)
        self._early.add(pid, ranges, file)

    def do_add(self, fd: int, name: str) -> int:
        """Take everything that a pipe gives as one more file of the image; return its size in bytes."""
        assert self._writer is not None
        with self._writer.stream(name) as file:
            return file.copy_fd(fd)

    def do_drain(self, timeout_s: float) -> list[str]:
        assert self._capture is not None
        assert self._memory is not None
        names = self._capture.drain(timeout_s)
        self._memory.close()  # a job that goes on is nobody's to read
        return names

    def do_frozen_at(self) -> float | None:
        """Monotonic clock, in seconds, when every task had stopped."""
        assert self._capture is not None
        return self._capture.began

    def do_beside(self) -> int:
        """Bytes of memory that CRIU did not give."""
        assert self._memory is not None
        return self._memory.size_bytes

    def do_locate(self, pages: dict[str, list[int]]) -> list[tuple[str, int, str, int]]:
        """Where pages lie in the image. pages: pid inside the namespace to addresses; (pages file, offset, pid,
        address) of each that is in it."""
        assert self._capture is not None
        found = []
        for pid, addresses in pages.items():
            mapped = self._capture.pagemaps.get(int(pid))
            for address in addresses if mapped is not None else ():
                assert mapped is not None
                offset = mapped.offset(address)
                if offset is not None:
                    found.append((f"pages-{mapped.pages_id}.img", offset, pid, address))
        return found

    def do_progress(self) -> dict[str, int]:
        assert self._writer is not None
        return {"bytes_plain": self._writer.bytes_plain, "bytes_stored": self._writer.bytes_stored}

    def do_seal(self) -> dict[str, Any]:
        """Finish the image: everything is on stable storage when this returns its entry for the manifest.

        The agent that goes away meanwhile is heard: what nobody will publish is not written to its end.
        """
        assert self._writer is not None
        with self._while_agent_lives(self._writer.give_up):
            return self._writer.finish().as_dict()

    @contextlib.contextmanager
    def _while_agent_lives(self, give_up: Callable[[], None]) -> Iterator[None]:
        """Call give_up from another thread when the agent goes away during the block."""
        done, finish = os.pipe()

        def watch() -> None:
            poll = select.poll()
            poll.register(self._control, select.POLLRDHUP)
            poll.register(done, 0)
            if done not in dict(poll.poll()):
                give_up()

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield
        finally:
            os.close(finish)
            watching.join()
            os.close(done)

    def do_publish(self, manifest: str) -> None:
        """The commit: after this the checkpoint exists, before it it does not."""
        assert self._staging is not None
        self._staging.publish(base64.b64decode(manifest))
        self._staging = self._writer = None

    def do_abort(self) -> None:
        """Leave nothing of an unpublished checkpoint."""
        if self._capture is not None:
            self._capture.abort()
        if self._writer is not None:
            self._writer.abort()
        if self._memory is not None:
            self._memory.close()
        if self._staging is not None:
            self._staging.abort()
        self._staging = self._writer = self._capture = self._memory = None

    def do_serve(
        self,
        job: str,
        checkpoint: str,
        entry: dict[str, Any],
        key: str,
        holder: list[int],
        sizes: dict[str, int] | None = None,
        huge_pages: bool = False,
    ) -> None:
        """Open an image and check what can be checked without reading it whole; CRIU may connect from now on.

        holder: its number in the image, and the one that it comes back with. sizes: in bytes, of files that several
        nodes write to. huge_pages: large memory that is full is to ask for them.
        """
        self._load(job, checkpoint, entry, key)
        assert self._listener is not None
        assert self._reader is not None
        if self._reader.entry.format > 1 and self._reader.ids is None:
            raise IntegrityError(path=checkpoint, reason="no id key in its slot: it cannot be restored")
        patches = {}
        if pagemap.PATCHES_STREAM in self._reader.names():
            patches = pagemap.decode_patches(self._reader.read(pagemap.PATCHES_STREAM))
        self._parts = fillplan.make(self._reader, patches)
        renumbered = renumber(self._reader, *holder)
        changed = sharedfiles.fitted(self._reader, sizes or {})
        if huge_pages:
            changed |= hugepages.advised(self._reader, self._parts)
        self._serve = stream.Serve(self._listener, self._reader, patches, self._parts, renumbered, changed)
        self._serve.start()

    def do_to_fill(self) -> list[int]:
        """Processes, by their pids inside the namespace, of which CRIU does not restore all memory."""
        return [part.pid for part in self._parts]

    def do_fill(self, *memories: int, pids: list[int], processors: list[int]) -> int:
        """Write what CRIU does not restore of some processes; bytes. memories: /proc/PID/mem of each, open for writing.
        processors: those of the job."""
        assert self._reader is not None
        parts, stopped = [part for part in self._parts if part.pid in pids], threading.Event()
        through, self._copier = self._copier, None
        try:
            with self._while_agent_lives(stopped.set):
                files = dict(zip(pids, memories, strict=True))
                return fill.fill(self._reader, parts, files, stopped, processors, through)
        finally:
            if through is not None:
                through.close()

    def do_cause(self) -> None:
        """Raise what in the image or the store broke the stream, if anything did: CRIU only knows that it broke."""
        for stream_end in (self._capture, self._serve):
            failure = stream_end.failure if stream_end is not None else None
            if isinstance(failure, GpucrError) and type(failure) is not ImageError:  # that one is about CRIU's socket
                raise failure

    def do_verify(self, job: str, checkpoint: str, entry: dict[str, Any], key: str, deep: bool) -> None:
        """Check an image; deep reads every byte."""
        with self._open_image(job, checkpoint, entry, key) as reader:
            reader.verify(deep=deep)

    def do_inspect(self, job: str, checkpoint: str, entry: dict[str, Any], key: str) -> dict[str, Any]:
        """What an image holds: processes, descriptors, memory by kind; no page of memory is opened."""
        with self._open_image(job, checkpoint, entry, key) as reader:
            return inspection.describe(reader)

    def do_search(
        self, job: str, checkpoint: str, entry: dict[str, Any], key: str, pattern: str, context: int, limit: int
    ) -> list[dict[str, Any]]:
        """Where a pattern (hex) lies in the memory of an image, with `context` bytes around; `limit` places at most."""
        with self._open_image(job, checkpoint, entry, key) as reader:
            return inspection.search(reader, bytes.fromhex(pattern), context, limit)

    def _load(self, job: str, checkpoint: str, entry: dict[str, Any], key: str) -> None:
        self._reader = self._open_image(job, checkpoint, entry, key)

    def _open_image(self, job: str, checkpoint: str, entry: dict[str, Any], key: str) -> ImageReader:
        return ImageReader(
            lambda name: self.store.open(job, checkpoint, name),
            ImageEntry.from_dict(entry),
            checkpoint=checkpoint,
            key=DataKey.from_hex(key),
        )

    def do_extract(self, fd: int, name: str) -> None:
        """Write one file of the image into a pipe."""
        assert self._reader is not None
        self._reader.copy_to_fd(name, fd)


def _plain(fields: dict[str, object]) -> dict[str, str | int | float]:
    return {k: v if isinstance(v, int | float) else str(v) for k, v in fields.items()}


def main() -> None:
    """Entry of the process; argv[1] is the descriptor of the control socket."""
    sys.setswitchinterval(_SWITCH_S)
    os.umask(0o077)
    Worker(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
