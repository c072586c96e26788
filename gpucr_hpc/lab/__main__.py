"""`scripts/lab`: the lab's command line. argparse, since the lab must run on a bare Debian."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from gpucr_hpc.errors import GpucrError, LabError
from gpucr_hpc.lab import conf
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.recipe import LAYERS

_LOGS = ("slurmctld.log", "slurmd.log", "agent.log")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lab", description="A real Slurm cluster of namespaces on this host (root).")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, *, node: bool = False) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        if node:
            command.add_argument("node", metavar="NODE", help="ctl, n1, n2, ...")
        return command

    build = add("build", "build the root file system and layers only (cached)")
    choices = [*LAYERS, "all"]
    build.add_argument("--layer", action="append", default=[], choices=choices, help="more programs for jobs")
    up = add("up", "start the cluster, building what is missing, and wait until Slurm can use it")
    up.add_argument("--nodes", type=int, default=4, metavar="N", help=f"compute nodes, 1-{conf.MAX_NODES} (4)")
    up.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="a line of slurm.conf; low.KEY, high.KEY, node.KEY: in the line of a partition or the nodes",
    )  # fmt: skip
    up.add_argument("--fresh", action="store_true", help="end a running lab first")
    up.add_argument("--layer", action="append", default=[], choices=list(LAYERS), help="more programs for jobs")
    up.add_argument("--no-plugin", action="store_true", help="do not build the C parts")
    add("down", "end the cluster and remove all of it but the cache")
    add("status", "show nodes, Slurm's states, daemons and jobs")
    add("refresh", "take over changes of the checkout: build the C parts, restart the agents")
    add("leftovers", "list what no job should leave behind in the nodes; exit 1 if there is something")
    run = add("exec", "run a command in a node", node=True)
    run.add_argument("--user", help="alice, bob, or another user of the node; root by default")
    run.add_argument("argv", nargs="*", metavar="-- CMD...")
    shell = add("shell", "an interactive shell in a node", node=True)
    shell.add_argument("--user")
    logs = add("logs", "show the logs of a node's daemons", node=True)
    logs.add_argument("--follow", "-f", action="store_true")
    add("kill", "power loss: all processes of a node at once, its network gone", node=True)
    add("start", "switch a killed node on again", node=True)
    return parser


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. Messages of `up` and the like go to stdout: they are the output."""
    # Python ignores SIGPIPE, and what `exec` becomes would inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # argparse would take options after NODE for the command's: what follows `--` is kept from it.
    words = list(sys.argv[1:] if args is None else args)
    cut = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:cut])
    if cut < len(words):
        if options.command != "exec":
            _parser().error("only `exec` takes a command after --")
        options.argv = [*options.argv, *words[cut + 1 :]]
    lab = Lab(say=lambda line: print(line, flush=True))
    try:
        return _run(lab, options)
    except GpucrError as error:
        print(f"lab: error: {error}", file=sys.stderr)
        if error.advice():
            print(f"lab: hint: {error.advice()}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _run(lab: Lab, options: argparse.Namespace) -> int:
    match options.command:
        case "build":
            print(lab.build())
            for name in LAYERS if "all" in options.layer else options.layer:
                print(lab.layer(name))
        case "up":
            plugin = not options.no_plugin
            lab.up(options.nodes, options.settings, fresh=options.fresh, with_plugin=plugin, layers=options.layer)
            print("lab is up: scripts/lab exec ctl --user alice -- sinfo")
        case "down":
            lab.down()
        case "status":
            return _status(lab)
        case "refresh":
            lab.refresh()
        case "leftovers":
            found = lab.leftovers(settle_s=0)
            print("\n".join(found) or "nothing is left over")
            return 1 if found else 0
        case "exec" | "shell":
            return _exec(lab, options)
        case "logs":
            _logs(lab, options.node, options.follow)
        case "kill":
            lab.kill(options.node)
            print(f"{options.node} is off")
        case "start":
            lab.start(options.node)
            print(f"{options.node} is on")
    return 0


def _exec(lab: Lab, options: argparse.Namespace) -> int:
    """Replace this process, so that terminal, signals and exit status are the command's."""
    argv = ["bash", "-l"]
    if options.command == "exec":
        argv = options.argv
        if not argv:
            raise LabError(reason="exec: no command; write `exec NODE -- CMD...`")
    full = lab.exec_argv(options.node, argv, options.user)
    os.execvp(full[0], full)  # noqa: S606


def _status(lab: Lab) -> int:
    running = lab.running()
    if running is None:
        print("lab is not up")
        return 1
    states = lab.node_states() if lab.pid(conf.CONTROLLER) else {}
    if running.settings:
        print("settings:", " ".join(running.settings))
    for name in lab.nodes():
        pid = lab.pid(name)
        daemons = " ".join(sorted(lab.daemons(name))) if pid else "-"
        state = states.get(name, "") if name != conf.CONTROLLER else ""
        where = f"{name:4} {conf.address(name):12} {'on' if pid else 'off':4}"
        print(f"{where} {state or '-':12} pid {pid or '-'}: {daemons}")
    if states:
        print(lab.exec(conf.CONTROLLER, ["squeue"]).stdout, end="")
    return 0


def _logs(lab: Lab, node: str, follow: bool) -> None:
    if node not in lab.nodes():
        raise LabError(reason=f"no node {node}; there are: {' '.join(lab.nodes()) or 'none, it is not up'}")
    directory = lab.log_dir(node)
    files = [str(directory / name) for name in _LOGS if (directory / name).exists()]
    files += [str(path) for path in sorted(directory.glob("*.stderr")) if path.stat().st_size]
    if files:
        how = ["-n", "40", "-F"] if follow else ["-n", "200"]
        os.execvp("tail", ["tail", *how, *files])  # noqa: S606
    print(f"{node} has no logs yet")


if __name__ == "__main__":
    sys.exit(main())
