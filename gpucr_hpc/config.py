"""Configuration: /etc/gpucr/gpucr.toml into frozen dataclasses; an unknown key is refused.

Every value has a default, so an empty or missing file is valid.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpucr_hpc.errors import ConfigError, UsageError
from gpucr_hpc.units import parse_duration

DEFAULT_PATH = Path("/etc/gpucr/gpucr.toml")


@dataclass(frozen=True)
class StoreConfig:
    """Where checkpoints are kept.

    root: directory on the parallel file system. allowed_roots: directories below which a user may place a
    store of his own with --checkpoint-dir. user: account that owns and writes `root` (root is squashed on
    most parallel file systems). keep_last: complete checkpoints kept of a job that runs on.
    full_every: 1 writes every checkpoint in full; n lets up to n - 1 in a row refer to earlier ones for what did not
    change. packs: files that the image of one node is spread over, 1 to 100; more where the file system puts each file
    on one of many storage targets.
    """

    root: str = "/var/lib/gpucr/store"
    allowed_roots: tuple[str, ...] = ()
    user: str = "root"
    keep_last: int = 2
    full_every: int = 10
    packs: int = 8


@dataclass(frozen=True)
class KeysConfig:
    """site: 32-byte key that wraps the data keys of new checkpoints. others: directory of further site keys (*.key)
    that are opened: earlier ones, and the next one. signing: Ed25519 private key that signs manifests.

    trusted: directory of Ed25519 public keys (*.pub) whose manifests are accepted besides our own. recipients: PEM
    files of certificates and public keys; who has a private key to one of them can read every new checkpoint.
    user_recipients: file in a user's home directory with recipients for his own jobs' checkpoints; "" for none.
    """

    site: str = "/etc/gpucr/keys/site.key"
    others: str = "/etc/gpucr/keys/site.d"
    signing: str = "/etc/gpucr/keys/signing.key"
    trusted: str = "/etc/gpucr/keys/trusted"
    recipients: tuple[str, ...] = ()
    user_recipients: str = ".config/gpucr/recipients.pem"


@dataclass(frozen=True)
class AgentConfig:
    """run_dir: sockets and per-job state, on a tmpfs. operators: users who may see and checkpoint
    others' jobs.

    checkpoint_interval: time from one checkpoint of a job to the next where its user gives no
    --checkpoint-interval, "0" for none. checkpoint_interval_min: the shortest that a user gets.
    timeout_margin_s: seconds before the time limit at which a job with --checkpoint-on-timeout leaves, to
    which twice the duration of its last checkpoint is added. timeout_rounds: how often it may do so at most.

    io_uring: of jobs whose user gives no --checkpoint-io-uring: "keep" it, or "hide" it, so that programs which would
    use it do without and can be saved.

    metrics_port: TCP port on 127.0.0.1 at which Prometheus finds figures, 0 for none.

    when_unprotected: what happens to a job that asked for protection and cannot have it: "run" it with a
    line in its output, or "fail" it. on_restore_failure: "hold" the job (no work lost), or run it from
    "scratch". log_level: "debug", "info", "warning" or "error".
    """

    run_dir: str = "/run/gpucr"
    operators: tuple[str, ...] = ()
    checkpoint_interval: str = "0"
    checkpoint_interval_min: str = "1m"
    timeout_margin_s: float = 60.0
    timeout_rounds: int = 1000
    io_uring: str = "keep"
    metrics_port: int = 0
    when_unprotected: str = "run"
    on_restore_failure: str = "hold"
    log_level: str = "info"


@dataclass(frozen=True)
class EngineConfig:
    """criu: CRIU's program. ghost_limit_bytes: largest deleted file taken along. freeze_timeout_s: time for the
    tree to stop. dump_timeout_s: longest time for a checkpoint, after which the job runs on without one.
    room_percent: share of a node's free memory in which what was read from a job waits to be sealed, where the job goes
    on after its checkpoint; it goes on as soon as the rest is sealed. pipe_limit_bytes: the agent raises the node's
    fs.pipe-max-size to so much when it starts, so that jobs stand still shorter; 0: it leaves that alone. reconnecting:
    paths of Unix sockets of the node's services, * for any characters; jobs are hung up on before a checkpoint, and
    their clients connect anew. Those to other services are refused.
    """

    criu: str = "criu"
    ghost_limit_bytes: int = 64 << 30
    freeze_timeout_s: int = 30
    dump_timeout_s: float = 3600.0
    room_percent: int = 25
    pipe_limit_bytes: int = 8 << 20
    reconnecting: tuple[str, ...] = ("/var/lib/sss/pipes/*", "/run/systemd/journal/*", "/dev/log")


@dataclass(frozen=True)
class CudaConfig:
    """GPUs.

    driver: how it is called: by "bindings" (the package cuda-bindings), "ctypes", or the first that is there
    ("auto"); "off" takes no care of GPUs. lock_timeout_ms: how long one try waits for work on a GPU to come to
    rest; short, since a rank that waits in a collective for a locked one never does. copy_limit_s: time limit of a
    copy between GPU and host. copy_limit_s_per_gib: seconds added to it for each GiB that is copied. memory_wait_s:
    how long a restore waits for GPU memory that another program holds. nccl_limit_s: how long the ranks of NCCL may
    take to come to a common point before a checkpoint, and to make their communicators again after it.
    stop_threads: whether GPU processes are dumped stopped, so that none of their threads runs before GPU memory is
    back; without it a JAX process dies at its restore.
    """

    driver: str = "auto"
    lock_timeout_ms: int = 500
    copy_limit_s: float = 60.0
    copy_limit_s_per_gib: float = 8.0
    memory_wait_s: float = 30.0
    nccl_limit_s: float = 20.0
    stop_threads: bool = True


@dataclass(frozen=True)
class NetworkConfig:
    """The network of a job's capsules; equal on every node.

    subnet: addresses of capsules, by node rank. vni_base: VXLAN network identifiers start here, the job id is
    added (modulo 2^24). vxlan_port: UDP port of the tunnels. mtu: of the capsules' interface; 0: the node's
    interface's less 50 for the tunnel. congestion_control: TCP's in jobs of several nodes, the first that the
    node's kernel lets them use, where a program asks for none; empty: the node's. nat: let jobs reach the site's
    network through their node.
    agent_port: TCP port on which agents talk to each other.
    """

    subnet: str = "10.200.0.0/16"
    vni_base: int = 0x470000
    vxlan_port: int = 8474
    mtu: int = 0
    congestion_control: tuple[str, ...] = ("cubic", "reno")
    nat: bool = True
    agent_port: int = 6827


@dataclass(frozen=True)
class Config:
    """The whole configuration of one node."""

    store: StoreConfig = field(default_factory=StoreConfig)
    keys: KeysConfig = field(default_factory=KeysConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    cuda: CudaConfig = field(default_factory=CudaConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)


_CHOICES = {
    "driver": ("auto", "bindings", "ctypes", "off"),
    "when_unprotected": ("run", "fail"),
    "io_uring": ("keep", "hide"),
    "on_restore_failure": ("hold", "scratch"),
    "log_level": ("debug", "info", "warning", "error"),
}
_RANGES = {"full_every": (1, 250), "packs": (1, 100), "room_percent": (0, 90)}


_DURATIONS = ("checkpoint_interval", "checkpoint_interval_min")


def load(path: Path | None = None) -> Config:
    """Read a configuration; the path comes from the argument, then GPUCR_CONFIG, then the default.

    A missing default file gives the defaults. Raises ConfigError with the file's name otherwise.
    """
    named = path or (Path(os.environ["GPUCR_CONFIG"]) if "GPUCR_CONFIG" in os.environ else None)
    where = named or DEFAULT_PATH
    try:
        with where.open("rb") as file:
            table = tomllib.load(file)
    except FileNotFoundError:
        if named is None:
            return Config()
        raise ConfigError(path=where, reason="no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(path=where, reason=error) from None
    return parse(table, where)


def parse(table: dict[str, Any], where: Path) -> Config:
    """Turn a decoded TOML table into a Config; raise ConfigError for unknown keys and wrong types."""
    sections = {f.name: f.default_factory for f in dataclasses.fields(Config)}
    unknown = set(table) - set(sections)
    if unknown:
        raise ConfigError(path=where, reason=f"unknown section [{sorted(unknown)[0]}]")
    built = {name: _section(factory, table.get(name, {}), name, where) for name, factory in sections.items()}
    return Config(**built)


def _section(factory: Any, table: Any, name: str, where: Path) -> Any:
    if not isinstance(table, dict):
        raise ConfigError(path=where, reason=f"[{name}] must be a table")
    default = factory()
    values: dict[str, Any] = {}
    known = {f.name for f in dataclasses.fields(default)}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(path=where, reason=f"unknown key {name}.{key}")
        wanted = type(getattr(default, key))
        if wanted is tuple and isinstance(value, list) and all(isinstance(v, str) for v in value):
            values[key] = tuple(value)
        elif wanted is float and isinstance(value, int) and not isinstance(value, bool):
            values[key] = float(value)
        elif type(value) is wanted:
            values[key] = value
        else:
            raise ConfigError(path=where, reason=f"{name}.{key} must be of type {wanted.__name__}")
        if key in _DURATIONS:
            try:
                parse_duration(value)
            except UsageError as error:
                raise ConfigError(path=where, reason=f"{name}.{key}: {error}") from None
        if key in _CHOICES and value not in _CHOICES[key]:
            raise ConfigError(path=where, reason=f"{name}.{key} must be one of {', '.join(_CHOICES[key])}")
        lowest, highest = _RANGES.get(key, (value, value))
        if not lowest <= value <= highest:
            raise ConfigError(path=where, reason=f"{name}.{key} must be from {lowest} to {highest}")
    return dataclasses.replace(default, **values)
