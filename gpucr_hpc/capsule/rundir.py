"""Paths of one job below the agent's run directory (a tmpfs, gone after a reboot like the job itself)."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: With it CRIU opens files as the job's user (spank_plugin/criu_files.c).
FILES_PLUGIN = Path("/usr/lib/gpucr/criu_files.so")


@dataclass(frozen=True)
class RunDir:
    """<run_dir>/jobs/<job>: `user/` belongs to the job's owner, everything else to root."""

    path: Path

    @classmethod
    def of(cls, run_dir: str, job: str) -> RunDir:
        """The directory of one job; the same path on every node, since CRIU binds its sockets again there."""
        return cls(Path(run_dir) / "jobs" / job)

    @classmethod
    def all(cls, run_dir: str) -> list[RunDir]:
        """The directories of every job known on this node."""
        jobs = Path(run_dir) / "jobs"
        return [cls(p) for p in sorted(jobs.iterdir())] if jobs.is_dir() else []

    @property
    def job(self) -> str:
        return self.path.name

    @property
    def user(self) -> str:
        """What belongs to the job's owner."""
        return str(self.path / "user")

    @property
    def shepherd_socket(self) -> str:
        return f"{self.user}/shepherd.sock"

    @property
    def images(self) -> Path:
        """CRIU's images directory: only the streamer's sockets, the hook's socket and statistics lie there."""
        return self.path / "img"

    @property
    def work(self) -> Path:
        """CRIU's work directory: its log."""
        return self.path / "work"

    @property
    def leaving(self) -> Path:
        """There while a committed job is being requeued: a hook that loses its agent then keeps the tree frozen."""
        return self.images / "leaving"

    @property
    def quiet(self) -> Path:
        """There, on the job's first node, while its ranks of NCCL may stand at a cut: a later agent lets them go on."""
        return self.path / "quiet"

    @property
    def steps(self) -> Path:
        """What the real sruns of the job's steps said, and their host files."""
        return self.path / "steps"

    def step_status(self, run: str) -> Path:
        """Result of one start of a real srun, written by its wrapper as the user: to be read as text from the user."""
        return self.path / "user" / f"{run}.status"

    @property
    def script(self) -> Path:
        """The batch script of the job whose checkpoint this one began with."""
        return self.path / "script"

    @property
    def hosts(self) -> Path:
        return self.path / "hosts"

    def make(self, uid: int, gid: int) -> None:
        """Create it afresh; what an earlier run of the same job left is removed first."""
        shutil.rmtree(self.path, ignore_errors=True)
        for directory, mode in (
            (self.path, 0o711),
            (self.images, 0o711),
            (self.work, 0o700),
            (self.steps, 0o711),
        ):
            directory.mkdir(parents=True)
            directory.chmod(mode)
        user = self.path / "user"
        user.mkdir(mode=0o700)
        os.chown(user, uid, gid)
        plugins = self.work / "libdir"
        plugins.mkdir()
        if FILES_PLUGIN.is_file():
            (plugins / FILES_PLUGIN.name).symlink_to(FILES_PLUGIN)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def save(self, state: dict[str, Any]) -> None:
        """Write the job's state for a later agent; rename makes it whole or old, never half."""
        temporary = self.path / "state.json.new"
        temporary.write_text(json.dumps(state))
        temporary.chmod(0o600)
        temporary.rename(self.path / "state.json")

    def save_gpus(self, gpus: dict[str, str]) -> None:
        """The map of cards of a restore under way: a later agent brings GPU memory back by it."""
        (self.path / "gpus.json").write_text(json.dumps(gpus))

    def load_gpus(self) -> dict[str, str]:
        """The map of the last restore, empty without."""
        try:
            found = json.loads((self.path / "gpus.json").read_text())
        except (OSError, ValueError):
            return {}
        return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}

    def load(self) -> dict[str, Any] | None:
        """The saved state, or None when there is none that can be read."""
        try:
            state = json.loads((self.path / "state.json").read_text())
        except (OSError, ValueError):
            return None
        return state if isinstance(state, dict) else None
