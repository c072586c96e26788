"""The threads that cut and seal, and how much may wait for them.

Who calls: streams hand parts over, writer ends it. A thread takes a part from its pipe, cuts it and seals it, all while
its bytes are in the processor's cache. Who wants the pipes read as soon as can be gives room for more parts; sealing
is then held back until everything has been read, since both would share the processors. When the room is used up as
many are sealed as others need places.
"""

from __future__ import annotations

import queue
import threading
from collections import deque

from gpucr_hpc.image.parts import Part


class Crew:
    """`threads` threads. places: parts that may be in work or wait for it. hold: seal before `begin` only what others
    need the places of."""

    def __init__(self, threads: int, *, places: int, hold: bool, name: str) -> None:
        self.sealing = not hold
        self._free = self._places = places
        self._lock = threading.Lock()
        self._freed, self._idle = threading.Condition(self._lock), threading.Condition(self._lock)
        self._held: deque[Part] = deque()
        self._lacking = 0  # places that others wait for, beyond those of the parts that are being sealed
        self._ended = False
        self._work: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, part: Part) -> bool:
        """Hand a part over, after waiting for a place; whether it was taken: none is after `end`."""
        self._take_place()
        small = part.is_small
        with self._lock:
            taken = not self._ended
            if taken and not small:
                if part.is_fetched and self._holds:
                    self._held.append(part)
                else:
                    self._work.put(part)
                return True
        if taken:
            part.seal()
        self._give_place()
        return taken

    def begin(self) -> None:
        """Seal from now on."""
        with self._lock:
            self.sealing = True
            while self._held:
                self._work.put(self._held.popleft())

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
        with self._lock:
            while self._free < self._places:
                self._idle.wait()

    @property
    def _holds(self) -> bool:
        return not self.sealing and not self._lacking

    def _take_place(self) -> None:
        with self._lock:
            while not self._free:
                self._lacking += 1  # a thread seals whichever part it has in its hands next
                if self._held:
                    self._work.put(self._held.popleft())
                self._freed.wait()
            self._free -= 1

    def _give_place(self) -> None:
        with self._lock:
            self._free += 1
            self._freed.notify()
            if self._free == self._places:
                self._idle.notify_all()

    def _run(self) -> None:
        while (part := self._work.get()) is not None:
            part.fetch()
            with self._lock:
                if self._holds:
                    self._held.append(part)
                    continue
                self._lacking = max(0, self._lacking - 1)
            part.seal()
            self._give_place()
