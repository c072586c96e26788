"""Signals, time limit and Slurm's own commands on protected jobs, before and after a move."""

from __future__ import annotations

from jobs import JobRun, bench, each, take
from programs import count

from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.wait import wait_until

TRAPS = """
trap 'echo got USR1' USR1
trap 'echo got TERM; exit 9' TERM
echo ready
while :; do sleep 0.1; done
"""


def ctl(lab: Lab, *argv: str) -> None:
    lab.exec("ctl", list(argv))


def result(job: JobRun) -> tuple[str, list[str], object]:
    wait_until(lambda: job.over, 60, f"the end of job {job.id}")
    return job.out, job.info["job_state"], job.info["exit_code"]


def test_scancel_and_user_signals(lab: Lab) -> None:
    """USR1 by scancel -b and TERM by scancel reach the script's traps, before and after a restore; a script that
    ignores TERM is killed after KillWait."""
    on = bench(lab, "signals")
    plain = on.submit(TRAPS, name="plain", protected=False)
    before, after = (on.submit(TRAPS, name=name) for name in ("before", "after"))
    deaf = on.submit("trap '' TERM; echo ready; while :; do sleep 0.1; done", name="deaf")
    limit = on.submit(TRAPS, "--time=1", name="limit")
    jobs = [plain, before, after, deaf, limit]
    each([lambda job=job: job.says("ready\n") for job in jobs])
    each([after.move, limit.move, deaf.move])
    ctl(lab, "scancel", str(deaf.id))
    for job in (plain, before, after):
        ctl(lab, "scancel", "-s", "USR1", "-b", str(job.id))
        job.says("got USR1\n")
        ctl(lab, "scancel", str(job.id))
    results = [result(job) for job in (plain, before, after)]
    assert results[0][:2] == ("ready\ngot USR1\ngot TERM\n", ["CANCELLED"])
    assert results == [results[0]] * 3
    assert result(deaf)[1] == ["CANCELLED"]
    limit.says("got TERM\n", 150)
    assert result(limit)[:2] == ("ready\ngot TERM\n", ["TIMEOUT"])
    assert limit.restarts == 1


def test_the_users_own_signal_option(lab: Lab) -> None:
    """--signal in the script or on the command line: the preemption is heard through it, and the trap still gets
    the signal when somebody sends it."""
    on = bench(lab, "signals-own")
    body = "trap 'echo got USR1' USR1\necho ready\nuntil [ -e go ]; do sleep 0.1; done\necho end\n"
    script = on.submit("#!/bin/bash\n#SBATCH --signal=B:USR1@30\n" + body, "-c", "2", name="script")
    line = on.submit(body, "--signal=B:USR1@30", "-c", "2", name="line")
    each([lambda job=job: job.says("ready\n") for job in (script, line)])
    each([script.preempt, line.preempt])
    for job in (script, line):
        ctl(lab, "scancel", "-s", "USR1", "-b", str(job.id))
        job.says("got USR1\n")
    (on.directory / "go").touch()
    for job in (script, line):
        assert job.end().out == "ready\ngot USR1\nend\n"


def test_requeue_hold_suspend_by_hand(lab: Lab) -> None:
    """scontrol requeue saves and restores; a held job stays away until its release; suspend and resume are as ever."""
    on = bench(lab, "signals-hand")
    requeue, hold, suspend = (on.submit(count(n), name=n) for n in ("requeue", "hold", "suspend"))
    each([lambda job=job: job.says("line 3\n") for job in (requeue, hold, suspend)])
    ctl(lab, "scontrol", "hold", str(hold.id))
    hold.checkpoint("--requeue")
    ctl(lab, "scontrol", "suspend", str(suspend.id))
    ctl(lab, "scontrol", "requeue", str(requeue.id))
    requeue.back(1)
    lab.wait_job(hold.id, "PENDING")
    assert hold.info["priority"]["number"] == 0
    lines = suspend.out
    ctl(lab, "scontrol", "release", str(hold.id))
    hold.back(1)
    assert suspend.out == lines
    ctl(lab, "scontrol", "resume", str(suspend.id))
    suspend.says(f"line {len(lines.splitlines()) + 2}\n")
    suspend.move()
    each([job.whole for job in (requeue, hold, suspend)])


# Cannot be saved: a client waits for a server that never accepts it.
_HOLDS = """
import os, socket, sys, time
with open(sys.argv[1] + ".runs", "a") as runs:
    print("run", file=runs)
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.1)
print("end", flush=True)
sys.exit(int(sys.argv[1]))
"""


def test_a_job_that_ends_in_the_grace_time_is_not_run_again(lab: Lab) -> None:
    """C47: Slurm requeues it all the same; its second run ends at once with the status of the first."""
    on = bench(lab, "signals-grace")
    program = on.put("holds.py", _HOLDS)
    jobs = {n: on.submit(f"exec python3 {program} {n}", "-c", "2", name=f"exit{n}") for n in (0, 3)}
    highs = []
    for job in jobs.values():
        job.says("ready\n")
        highs.append(take(lab, job.node))
        job.says("the job runs on")
    (on.directory / "go").touch()
    for n, job in jobs.items():
        lab.wait_job(job.id, lambda j: int(j["restart_cnt"]) == 1, 60)
        job.end(n)
        assert job.out == "ready\nend\n"
        assert job.file(f"{n}.runs") == "run\n"
        assert "it is not run again" in job.raw
    ctl(lab, "scancel", *map(str, highs))
