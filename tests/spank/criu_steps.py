"""A step is dumped in the middle of its streams and restored in a new capsule; nothing is lost (root, CRIU).

Without pytest, since nodes do not have it: `python3 -m tests.spank.criu_steps [ROUNDS]`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from gpucr_hpc.wire import Type, make

from .capsule_lab import INIT, USER, alive, wait_until
from .step_lab import StepLab, next_step

LINES = 120000
# Input and output at once, slowly enough that every dump meets both.
TASK = (
    "for i in $(seq 60); do dd bs=8000 count=1 iflag=fullblock status=none; seq $i | tail -1 >&2; sleep 0.05; done; cat"
)
COMMON = (
    *("--no-default-config", "-v4", "--tcp-established", "--network-lock", "skip", "--manage-cgroups=ignore"),
    *("--ghost-limit", "1048576", "--file-locks"),
)
# As the agent's (gpucr_hpc/capsule/network.py): without it the end that is restored first gets a reset from the other.
LOCK = """table inet gpucr_lock {
  chain input { type filter hook input priority -400; policy drop; meta mark 0xc114 accept; }
  chain output { type filter hook output priority -400; policy drop; meta mark 0xc114 accept; }
}
"""
UNLOCK = "delete table inet gpucr_lock\n"
ENV = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]


class Network:
    """A network namespace with its loopback device up."""

    def __init__(self) -> None:
        ours = os.readlink("/proc/self/ns/net")
        self._keeper = subprocess.Popen(["unshare", "-n", "sh", "-c", "ip link set lo up && exec sleep 600"])
        path = f"/proc/{self._keeper.pid}"
        wait_until(lambda: os.readlink(f"{path}/ns/net") != ours and Path(f"{path}/comm").read_text() == "sleep\n")
        self.fd = os.open(f"{path}/ns/net", os.O_RDONLY)

    def rules(self, text: str) -> None:
        subprocess.run(["nsenter", f"--net=/proc/{self._keeper.pid}/ns/net", "nft", "-f", "-"], input=text.encode(), check=True)

    def close(self) -> None:
        os.close(self.fd)
        self._keeper.kill()
        self._keeper.wait()


def spaced_pid(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(x for x in status.splitlines() if x.startswith("NSpid")).split()[-1])


def pids(lab: StepLab) -> dict[int, str]:
    """pid inside -> comm of every process of the capsule."""
    found = {}
    ours = os.readlink(f"/proc/{lab.init_pid}/ns/pid")
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "ns/pid") == ours:
                found[spaced_pid(int(entry.name))] = (entry / "comm").read_text().strip()
        except OSError:
            continue
    return found


def dump(lab: StepLab, images: Path) -> tuple[int, int, int]:
    """Dump the tree and leave it stopped; pids of holder and shepherd, and the highest.

    Were CRIU to end the tree itself, it would die with it: it is in the same pid namespace.
    """
    there = pids(lab)
    holder = next(p for p, name in there.items() if name == "gpucr-holder")
    shepherd = next(p for p, name in there.items() if name == "gpucr-shepherd")
    argv = [str(INIT), "enter", "--init-pid", str(lab.init_pid), "--uid", str(USER), "--gid", str(USER), "--"]
    argv += ["criu", "dump", "-t", str(holder), "-D", str(images), "-o", "dump.log", "--link-remap", "--leave-stopped", *COMMON]
    run = subprocess.run(argv, capture_output=True, text=True)
    if run.returncode:
        raise AssertionError(run.stdout + run.stderr + tail(images / "dump.log"))
    return holder, shepherd, max(there)


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([*(x for x in lines if "Error" in x), *lines[-15:]])


def restore(lab: StepLab, images: Path, network: Network, tree: tuple[int, int, int]) -> None:
    holder, shepherd, highest = tree
    Path(lab.shepherd).unlink(missing_ok=True)
    ready = lab.capsule("--netns", str(network.fd), mode="restore", last_pid=highest + 64)
    assert Type.READY == ready.type, ready
    assert lab.control
    argv = [shutil.which("criu") or "criu", "restore", "-d", "-D", str(images), "-o", "restore.log", *COMMON]
    lab.control.send(make(Type.RESTORE, ("ARG", argv), ("ENV", ENV), OLD=holder, SHEPHERD=shepherd))
    result = lab.control.expect(Type.RESULT)
    assert 0 == result.int("STATUS"), result.get("MSG") + tail(images / "restore.log")
    adopted = lab.control.receive()
    assert Type.ADOPTED == adopted.type, adopted


def main(rounds: int) -> None:
    assert 0 == subprocess.run(["criu", "check", "--no-default-config"], capture_output=True).returncode
    with StepLab() as lab:
        images = [lab.dir / f"images{i}" for i in range(rounds)]
        network = Network()
        assert Type.READY == lab.capsule("--netns", str(network.fd)).type
        out, err = lab.dir / "out", lab.dir / "err"
        for file in (out, err):
            file.touch()
            os.chown(file, USER, USER)
        script = f"seq 1 {LINES} | srun sh -c '{TASK}' | cat; echo script over >&2"
        with out.open("ab") as stdout, err.open("ab") as stderr:
            batch, agent = lab.script(script, stdout=stdout, stderr=stderr)
            lab.take_control()
            step = next_step(lab)
            step.plan(2, label=1)
            for rank in range(2):
                step.task(rank, stdin=subprocess.PIPE)
            for round_number in range(rounds):
                time.sleep(0.4)
                print("tasks:", lab.detach_all())
                images[round_number].mkdir()
                network.rules(LOCK)
                begin = time.monotonic()
                tree = dump(lab, images[round_number])
                print(f"dump: {time.monotonic() - begin:.2f} s, {len(list(images[round_number].iterdir()))} files")
                init = lab.init_pid
                lab.kill_capsule()
                assert not alive(init)
                for task, peer in [(batch, agent), *step.supervisors.values()]:
                    peer.send(make(Type.RELEASE, STATUS=0))
                    task.wait()
                network.close()
                network = Network()
                network.rules(LOCK)
                begin = time.monotonic()
                restore(lab, images[round_number], network, tree)
                network.rules(UNLOCK)
                print(f"restore: {time.monotonic() - begin:.2f} s")
                control = lab.take_control()
                again = control.expect(Type.SRUN)  # KNOWN does not name it: run srun again
                assert step.key == again.get("KEY")
                batch = lab.task("sh", "-c", "true", stdout=stdout, stderr=stderr)
                agent, _ = lab.accept()
                agent.send(make(Type.ATTACH, SOCKET=lab.shepherd, TASK="batch.0", RESTORED=1))
                for rank in range(2):
                    step.attach_anew(rank)
        statuses: list[int] = []
        ends = [threading.Thread(target=lambda r=r: statuses.append(step.ended(r))) for r in range(2)]  # type: ignore[misc]
        for end in ends:
            end.start()
        for end in ends:
            end.join()
        assert [0, 0] == statuses, statuses
        step.say(Type.SRUNEND, STATUS=0)
        agent.expect(Type.ENDED)
        agent.send(make(Type.OK))
        assert 0 == batch.wait()
        lines = out.read_text().splitlines()
        assert 2 * LINES == len(lines), len(lines)
        for rank in range(2):
            assert list(range(1, LINES + 1)) == [int(x[3:]) for x in lines if x.startswith(f"{rank}: ")]
        said = err.read_text().splitlines()
        for rank in range(2):
            assert list(range(1, 61)) == [int(x[3:]) for x in said if x.startswith(f"{rank}: ")], said
        assert "script over" == said[-1]
        network.close()
    print(f"ok: {rounds} moves, {2 * LINES} lines in order, every byte")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
