"""srun's command line: read far enough to know its stdio, its nodes and where the program begins; and rewritten.

Slurm parses with getopt_long: options end at the first word that is none, long names may be abbreviated. Options
that this table does not know are taken to need a value only if written with "="; plugins' options are such.
Source: srun(1) and `srun --help` of Slurm 24.11 and 26.05.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpucr_hpc.errors import UsageError

_SHORT_FLAGS = "EHkKlOQsuvVXZhI"  # -I and -K take a value only when it is joined to them
_SHORT = {
    "A": "account", "b": "begin", "B": "extra-node-info", "c": "cpus-per-task", "C": "constraint",
    "d": "dependency", "D": "chdir", "e": "error", "E": "preserve-env", "G": "gpus", "H": "hold",
    "i": "input", "I": "immediate", "J": "job-name", "k": "no-kill", "K": "kill-on-bad-exit", "l": "label",
    "L": "licenses", "m": "distribution", "M": "clusters", "n": "ntasks", "N": "nodes", "o": "output",
    "O": "overcommit", "p": "partition", "q": "qos", "Q": "quiet", "r": "relative", "s": "oversubscribe",
    "S": "core-spec", "t": "time", "T": "threads", "u": "unbuffered", "v": "verbose", "V": "version",
    "w": "nodelist", "W": "wait", "x": "exclude", "X": "disable-status", "Z": "no-allocate", "h": "help",
}  # fmt: skip
_LONG_FLAGS = {
    "async", "contiguous", "disable-status", "exact", "help", "hold", "label", "multi-prog", "no-allocate",
    "overcommit", "overlap", "oversubscribe", "parsable", "preserve-env", "quiet", "quit-on-interrupt", "reboot",
    "resv-ports", "spread-job", "unbuffered", "usage", "use-min-nodes", "verbose", "version", "no-kill",
    "wait-for-children", "checkpoint-on-preempt", "checkpoint-on-timeout", "no-checkpoint", "external-launcher",
}  # fmt: skip
_LONG_OPTIONAL = {
    "compress", "exclusive", "immediate", "kill-on-bad-exit", "nice", "oom-kill-step", "propagate", "pty",
    "send-libs",
}  # fmt: skip
_LONG_VALUES = {
    "account", "acctg-freq", "bb", "bbf", "bcast", "bcast-exclude", "begin", "cluster-constraint", "clusters",
    "comment", "constraint", "container", "container-id", "container-type", "core-spec", "cores-per-socket",
    "cpu-bind", "cpu-freq", "cpus-per-gpu", "cpus-per-task", "chdir", "deadline", "delay-boot", "dependency",
    "distribution", "epilog", "error", "exclude", "export", "export-file", "extra-node-info", "gpu-bind",
    "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "het-group",
    "hint", "ignore-signals", "input", "job-name", "jobid", "licenses", "mail-type", "mail-user", "mcs-label",
    "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "mpi", "network", "nodelist", "nodefile", "nodes",
    "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "open-mode", "output",
    "partition", "power", "priority", "profile", "prolog", "qos", "relative", "reservation", "signal",
    "slurmd-debug", "sockets-per-node", "spread-segments", "stepmgr", "switches", "task-epilog", "task-prolog",
    "thread-spec", "threads", "threads-per-core", "time", "time-min", "tmp", "tres-bind", "tres-per-task", "wait",
    "wckey", "checkpoint-interval", "checkpoint-dir", "checkpoint-nccl", "checkpoint-files", "checkpoint-rounds",
    "checkpoint-io-uring", "restore-from",
}  # fmt: skip
_ALL = _LONG_FLAGS | _LONG_OPTIONAL | _LONG_VALUES

# What a relaunched step must not repeat: its tasks have their places already.
_PLACEMENT = {
    "nodes", "ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu", "nodelist",
    "exclude", "nodefile", "distribution", "relative", "spread-job", "use-min-nodes", "contiguous",
}  # fmt: skip
# What srun's environment variables say for options; the command line wins (srun(1), INPUT ENVIRONMENT VARIABLES).
_ENVIRONMENT = {
    "SLURM_LABELIO": "label", "SLURM_STDINMODE": "input", "SLURM_STDOUTMODE": "output",
    "SLURM_STDERRMODE": "error", "SLURM_OPEN_MODE": "open-mode",
}  # fmt: skip


@dataclass(frozen=True)
class SrunArgs:
    """options: (long name, value or None) in order; command: the program and its arguments."""

    options: tuple[tuple[str, str | None], ...]
    command: tuple[str, ...]

    def value(self, name: str) -> str | None:
        """The last value of an option; "" for a flag that is there, None when it is not."""
        found = [value or "" for option, value in self.options if option == name]
        return found[-1] if found else None

    def has(self, name: str) -> bool:
        return self.value(name) is not None

    def argv(self) -> list[str]:
        """The command line again, with long names."""
        words = [f"--{name}" if value is None else f"--{name}={value}" for name, value in self.options]
        return [*words, *self.command]


def parse(argv: list[str]) -> SrunArgs:
    """Read srun's arguments (without its own name); raise UsageError where srun would."""
    options: list[tuple[str, str | None]] = []
    words = iter(range(len(argv)))
    for at in words:
        word = argv[at]
        if word == "--":
            return SrunArgs(tuple(options), tuple(argv[at + 1 :]))
        if not word.startswith("-") or word == "-":
            return SrunArgs(tuple(options), tuple(argv[at:]))

        def next_word(word: str = word) -> str:
            following = next(words, None)
            if following is None:
                raise UsageError(reason=f"srun: option {word} requires an argument")
            return argv[following]

        if word.startswith("--"):
            options.append(_long(word[2:], next_word))
        else:
            options += _short(word[1:], next_word)
    return SrunArgs(tuple(options), ())


def _long(text: str, next_word: Callable[[], str]) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if name not in _ALL:
        matches = [known for known in _ALL if known.startswith(name)]
        name = matches[0] if len(matches) == 1 else name
    if equals:
        return name, value
    return name, next_word() if name in _LONG_VALUES else None


def _short(letters: str, next_word: Callable[[], str]) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    while letters:
        letter, letters = letters[0], letters[1:]
        name = _SHORT.get(letter)
        if name is None:
            raise UsageError(reason=f"srun: invalid option -- '{letter}'")
        if letter in "IK" and letters[:1].isdigit():
            return [*found, (name, letters)]
        if letter in _SHORT_FLAGS:
            found.append((name, None))
        else:
            return [*found, (name, letters or next_word())]
    return found


def with_environment(args: SrunArgs, env: Mapping[str, str]) -> SrunArgs:
    """Options that srun takes from its environment, put in front of those of the command line."""
    extra: list[tuple[str, str | None]] = []
    for variable, name in _ENVIRONMENT.items():
        if env.get(variable):
            if name != "label":
                extra.append((name, env[variable]))
            elif env[variable] != "0":
                extra.append((name, None))
    return SrunArgs((*extra, *args.options), args.command)


@dataclass(frozen=True)
class StdioPlan:
    """How the proxy treats the tasks' stdio; fields as in the frame PLAN (docs/protocol.md)."""

    label: bool
    stdin: str
    stdout: str
    stderr: str
    append: bool


# Filename patterns (srun(1)): of a task or its node; of the job; of the step, which has no number yet.
_OF_TASK, _OF_STEP = re.compile(r"%[0-9]*[tnNu]"), re.compile(r"%[0-9]*[Js]")
_OF_JOB = re.compile(r"%(%|([0-9]*)([jAax]))")
_STDIO = ("output", "error", "input")


def expanded(args: SrunArgs, env: Mapping[str, str]) -> SrunArgs:
    """Its files' names with the job's numbers, as srun would have them; those of tasks are left to the nodes."""
    job = env.get("SLURM_JOB_ID", "")
    known = {"j": job, "A": env.get("SLURM_ARRAY_JOB_ID", job), "a": env.get("SLURM_ARRAY_TASK_ID", "4294967294")}
    known["x"] = env.get("SLURM_JOB_NAME", "")

    def insert(found: re.Match[str]) -> str:
        return "%" if found[1] == "%" else known[found[3]].rjust(int(found[2] or 0), "0")

    options = [
        (name, _OF_JOB.sub(insert, value) if name in _STDIO and value and not has_pattern(value) else value)
        for name, value in args.options
    ]
    return SrunArgs(tuple(options), args.command)


def _target(value: str | None, cwd: str) -> str:
    """A stdout or stderr option: the proxy's own, none, or a file that all tasks share."""
    if value is None or value == "all":
        return ""
    if value == "none":
        return "none"
    if value.isdigit():
        return ""  # "taskid": only this task's output; the others' is not told apart here
    return f"file:{value if value.startswith('/') else f'{cwd}/{value}'}"


def has_pattern(value: str | None) -> bool:
    """Whether each task has a file of its own (srun(1), filename pattern); such files are opened on the nodes."""
    return value is not None and _OF_TASK.search(value.replace("%%", "")) is not None


def stdio_plan(args: SrunArgs, cwd: str) -> StdioPlan:
    """What the command line says about stdio. Files with a pattern per task are left to the nodes."""
    out, err, source = args.value("output"), args.value("error"), args.value("input")
    stdout = "" if has_pattern(out) else _target(out, cwd)
    stderr = stdout if err is None else ("" if has_pattern(err) else _target(err, cwd))
    if source is None or source == "all":
        stdin = "all"
    elif source == "none" or source.isdigit():
        stdin = source
    elif has_pattern(source):
        stdin = "none"
    else:
        stdin = f"file:{source if source.startswith('/') else f'{cwd}/{source}'}"
    return StdioPlan(args.has("label"), stdin, stdout, stderr, (args.value("open-mode") or "").startswith("a"))


def real_command(args: SrunArgs, physical: Callable[[str], str]) -> SrunArgs:
    """What the real srun is given: its stdio options without those that the proxy carries out, and node names of
    this run in place of the job's own. Lists must be expanded ("n1,n2"); `physical` maps one name."""
    options = []
    for name, value in args.options:
        if name == "label" or (name in _STDIO and not has_pattern(value)):
            continue
        if name in ("nodelist", "exclude") and value is not None:
            value = ",".join(physical(node) for node in value.split(","))
        options.append((name, value))
    return SrunArgs(tuple(options), args.command)


def relaunch_command(args: SrunArgs, tasks: int) -> SrunArgs:
    """The same step for tasks that are there already: placed by a host file, its files not cut off.

    Slurm 26.05 refuses a number of nodes beside the arbitrary distribution; the host file says it (NODE_VARIABLES).
    """
    kept = [(name, value) for name, value in args.options if name not in _PLACEMENT and name != "open-mode"]
    pinned = [("ntasks", str(tasks)), ("distribution", "arbitrary"), ("open-mode", "append")]
    return SrunArgs((*kept, *pinned), args.command)


def task_count(args: SrunArgs, env: Mapping[str, str]) -> int:
    """How many tasks the step will have, for stdin that must reach all of them; 0 when that cannot be told."""
    nodes = args.value("nodes") or env.get("SLURM_JOB_NUM_NODES") or "1"
    per_node = args.value("ntasks-per-node") or env.get("SLURM_NTASKS_PER_NODE") or ""
    tasks = args.value("ntasks")
    if tasks is None and args.value("nodes") is None:
        tasks = env.get("SLURM_NTASKS") or env.get("SLURM_NPROCS")
    if tasks is None and nodes.isdigit():
        tasks = str(int(nodes) * (int(per_node) if per_node.isdigit() else 1))
    return int(tasks) if tasks is not None and tasks.isdigit() else 0


def refusal(args: SrunArgs) -> str | None:
    """Why a step cannot run in a protected job, or None."""
    if args.has("pty"):
        return "--pty is not possible in a protected job: a terminal outside cannot be saved"
    if (args.value("mpi") or "").startswith("pmix"):
        return "--mpi=pmix is not possible in a protected job (its server is outside); use --mpi=pmi2 or mpirun"
    for name in _STDIO:
        if _OF_STEP.search((args.value(name) or "").replace("%%", "")):
            return f"--{name}: %J and %s are not known before the step runs, in a protected job; use %j"
    if ":" in args.command:
        return "heterogeneous steps are not possible in a protected job"
    return None


# Variables that describe the allocation of a run: a step that starts after a move must see those of its run.
RUN_VARIABLES = (
    "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_CPUS_PER_NODE",
    "SLURM_TASKS_PER_NODE", "SLURM_CPUS_ON_NODE", "SLURMD_NODENAME", "SLURM_TOPOLOGY_ADDR",
    "SLURM_TOPOLOGY_ADDR_PATTERN", "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME", "SLURM_RESTART_COUNT",
    "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_TASK_PID", "SLURM_STEPMGR", "SLURM_CONF", "SLURM_MEM_PER_NODE",
    "SLURM_JOB_GID", "SLURM_JOB_UID", "SLURM_JOBID", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


# What srun takes for a number of nodes or tasks per node; a host file has the word instead.
NODE_VARIABLES = (
    "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE", "SLURM_DISTRIBUTION", "SLURM_JOB_NODELIST", "SLURM_NODELIST",
)  # fmt: skip


def run_environment(users: Mapping[str, str], batch: Mapping[str, str]) -> dict[str, str]:
    """The real srun's environment: the user's, with the allocation's variables of this run."""
    env = {k: v for k, v in users.items() if k not in RUN_VARIABLES and not k.startswith(("GPUCR_", "SLURM_GPUCR_"))}
    env |= {k: batch[k] for k in RUN_VARIABLES if k in batch}
    env |= {k: v for k, v in batch.items() if k.startswith(("SLURM_SPANK_", "_SLURM_SPANK_", "GPUCR_COOKIE"))}
    return env
