"""The threads that cut and seal, and how much may wait for them.

Who calls: streams hand parts over, writer ends it. A thread takes a part from its pipe, cuts it and seals it, all while
its bytes are in the processor's cache. Who wants the pipes read as soon as can be gives room for more parts; sealing
is then held back until the room is used up or everything has been read, since both would share the processors.
"""

from __future__ import annotations

import queue
import threading

from gpucr_hpc.image.parts import Part


class Crew:
    """`threads` threads. places: parts that may be in work or wait for it. hold: seal nothing before `begin`."""

    def __init__(self, threads: int, *, places: int, hold: bool, name: str) -> None:
        self.sealing = not hold
        self._count, self._places = places, threading.BoundedSemaphore(places)
        self._ending = threading.Lock()
        self._lock = threading.Lock()
        self._held: list[Part] = []
        self._ended = False
        self._work: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, part: Part) -> bool:
        """Hand a part over, after waiting for a place; whether it was taken: none is after `end`."""
        if not self._places.acquire(blocking=False):
            self.begin()
            self._places.acquire()
        small = part.is_small
        with self._lock:
            taken = not self._ended
            if taken and not small:
                if part.is_fetched and not self.sealing:
                    self._held.append(part)
                else:
                    self._work.put(part)
                return True
        if taken:
            part.seal()
        self._places.release()
        return taken

    def begin(self) -> None:
        """Seal from now on."""
        with self._lock:
            self.sealing = True
            held, self._held = self._held, []
            for part in held:
                self._work.put(part)

    def end(self) -> None:
        """Wait until all is done, also what others seal in `submit`; twice is fine."""
        self.begin()
        with self._lock:
            if not self._ended:
                self._ended = True
                for _ in self._threads:
                    self._work.put(None)
        for thread in self._threads:
            thread.join()
        with self._ending:
            for _ in range(self._count):
                self._places.acquire()
            for _ in range(self._count):
                self._places.release()

    def _run(self) -> None:
        while (part := self._work.get()) is not None:
            part.fetch()
            with self._lock:
                if not self.sealing:
                    self._held.append(part)
                    continue
            part.seal()
            self._places.release()
