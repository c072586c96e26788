"""What a user asked for at sbatch, and what the site has set for those who did not ask."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from gpucr_hpc import wire
from gpucr_hpc.config import AgentConfig
from gpucr_hpc.engine.openfiles import FilesPolicy
from gpucr_hpc.errors import UsageError
from gpucr_hpc.units import parse_duration


@dataclass(frozen=True)
class Policy:
    """How a job is protected.

    interval_s: seconds from one checkpoint by the clock to the next, 0 for none. files: what happens at a restore to
    files that grew after the checkpoint. on_timeout: whether the job is checkpointed and requeued before its time
    limit, at most `rounds` times. restore_from: the checkpoint of another job from which this one goes on, "" for none.
    hide_io_uring: whether its programs are told that the kernel has no io_uring, of which nothing can be saved.
    """

    interval_s: float = 0.0
    files: FilesPolicy = FilesPolicy.ROLLBACK
    on_timeout: bool = False
    rounds: int = 0
    restore_from: str = ""
    hide_io_uring: bool = False

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> Policy:
        """Read back what as_dict made; fields that an older agent did not write have their defaults."""
        known = {field.name for field in dataclasses.fields(cls)}
        fields = {key: value for key, value in table.items() if key in known}
        return cls(**fields | {"files": FilesPolicy(fields.get("files", FilesPolicy.ROLLBACK))})


def options_of(hello: wire.Frame) -> dict[str, str]:
    """The options of sbatch that only the agent understands."""
    return dict(text.partition("=")[::2] for text in hello.all("OPTION"))


def policy_of(hello: wire.Frame, config: AgentConfig) -> Policy:
    """Policy from a batch supervisor's HELLO; raise UsageError for an option that is none.

    An interval below the site's shortest is raised to it; what a user does not say, the site says.
    """
    options = options_of(hello)
    interval_s = parse_duration(hello.get("INTERVAL") or config.checkpoint_interval)
    if interval_s > 0:
        interval_s = max(interval_s, parse_duration(config.checkpoint_interval_min))
    try:
        rounds = int(options.get("rounds") or config.timeout_rounds)
        files = FilesPolicy(options.get("files") or FilesPolicy.ROLLBACK)
    except ValueError as error:
        raise UsageError(reason=f"an option of sbatch: {error}") from None
    return Policy(
        interval_s=interval_s,
        files=files,
        on_timeout=options.get("timeout") == "yes",
        rounds=min(rounds, config.timeout_rounds),
        restore_from=options.get("restore", ""),
        hide_io_uring=(options.get("io_uring") or config.io_uring) == "hide",
    )


def cut_short(hello: wire.Frame, config: AgentConfig) -> str:
    """A line for the user who asked for more than the site allows; empty when he gets what he asked for."""
    options, got, lines = options_of(hello), policy_of(hello, config), []
    if hello.get("INTERVAL") and got.interval_s > parse_duration(hello.get("INTERVAL")) > 0:
        lines.append(f"the site's shortest interval is {config.checkpoint_interval_min}: it is taken")
    if options.get("rounds") and got.rounds < int(options["rounds"]):
        lines.append(f"the site allows {got.rounds} rounds of --checkpoint-on-timeout: they are taken")
    return "; ".join(lines)
