"""Steps of a protected job: srun as ever, before and after a move, on one node and on two."""

from __future__ import annotations

import json

import pytest
from jobs import JobRun, bench

from gpucr_hpc.lab import migration
from gpucr_hpc.lab.nodes import CHECKOUT
from gpucr_hpc.lab.wait import wait_until

TWO = ("--nodes=2", "--ntasks-per-node=2")

# Everything that a script does with srun and that its user would miss; WAIT is a place to move it at.
SRUNS = r"""
    echo "== exit status"; srun -n 4 sh -c 'exit $((SLURM_PROCID == 2 ? 7 : 0))' 2>/dev/null; echo "status $?"
    echo "== label"; srun -l -n 4 sh -c 'echo "task $SLURM_PROCID"' | sort
    echo "== stdin to all"; printf 'a\nb\n' | srun -n 2 sh -c 'cat | wc -l'
    echo "== stdin to none"; srun -i none -n 2 sh -c 'cat | wc -l'
    echo "== two joined"; srun --overlap -n 1 seq 1 2000 | srun --overlap -n 1 sh -c 'awk "{s += \$1} END {print s}"'
    echo "== file"; srun -n 2 -o shared.txt echo one; sort shared.txt
    echo "== file per task"; srun -n 2 -o task-%t.txt sh -c 'echo "task $SLURM_PROCID"'; cat task-0.txt task-1.txt
    echo "== stderr"; srun -n 1 sh -c 'echo out; echo err >&2' 2>err.txt; cat err.txt
    echo "== background"; srun --overlap -n 1 sh -c 'sleep 0.3; echo first' & srun --overlap -n 1 echo second >/dev/null
    wait; echo "waited"
    echo "== multi-prog"; printf '0 echo zero\n1 echo one\n' >prog.conf; srun -n 2 --multi-prog prog.conf | sort
    echo "== export"; A=1 srun -n 1 --export=ALL,B=2 sh -c 'echo "$A$B"'
    echo "== no export"; A=1 srun -n 1 --export=NONE /bin/sh -c 'echo "A is ${A-not there}"; cat' </dev/null
    echo "== a list"; A=1 C=3 SLURM_EXPORT_ENV=A,B=2 srun -l -n 2 /bin/sh -c 'echo "$A$B${C-}"' | sort
    echo "== in /tmp"; mkdir -p /tmp/place; printf '#!/bin/sh\necho "in $PWD"\n' >/tmp/place/own
    chmod 755 /tmp/place/own
    (cd /tmp/place && srun -n 1 ./own; PATH="/tmp/place:$PATH" srun -n 1 own)
    echo "== file of the job"; srun -n 2 -o 'job-%j.txt' echo one; sort "job-$SLURM_JOB_ID.txt"
    echo "== version"; srun --version 2>/dev/null | cut -d' ' -f1
    echo "== given up"; timeout -s INT 1 srun -q -n 1 sleep 60 2>/dev/null; echo "status $?"
    echo "== absolute path"; $(command -v srun) -n 1 echo absolute
    echo "== missing program"; srun -n 1 /no/such/program 2>/dev/null || echo "failed"
    echo "== nodes"; srun --ntasks-per-node=1 -n "$SLURM_JOB_NUM_NODES" sh -c 'hostname; echo $SLURMD_NODENAME' | sort
"""


def own_lines(job: JobRun) -> str:
    """The output without what srun says of itself, which comes when it comes."""
    return "".join(line for line in job.out.splitlines(keepends=True) if not line.startswith("srun: "))


@pytest.mark.parametrize("options", [(), TWO], ids=["one node", "two nodes"])
def test_srun_is_as_ever(lab, options):
    """Every way to use srun gives what it gives without protection, before a move and after it."""
    at = bench(lab, f"sruns{len(options)}")
    options = options or ("--nodes=1", "--ntasks=2", "--overcommit")
    body = SRUNS.replace("-n 4", "-O -n 4") if options != TWO else SRUNS
    script = f"cd before\n{body}\ncd ../after\ntouch ../ready\nwhile [ ! -e ../go ]; do sleep 0.1; done\n{body}\n"
    for name in ("before", "after", "plain/before", "plain/after"):
        lab.exec("ctl", ["mkdir", "-p", f"{at.inside}/{name}"], user="alice")
    job = at.submit(script, *options)
    wait_until(lambda: (at.directory / "ready").exists() or job.over, 90, "the first half")
    job.move()
    (at.directory / "go").touch()
    job.end(timeout_s=120)
    (at.directory / "plain/go").touch()
    plain = at.submit(script, *options, f"--chdir={at.inside}/plain", name="plain").end(timeout_s=120)
    before, _, after = own_lines(job).partition("== exit status")[2].partition("== exit status")
    assert before == after, job.raw
    assert "status 7" in before
    # An undisturbed run has the same lines; only the names of its nodes are others.
    assert own_lines(job).split("== nodes")[0] == own_lines(plain).split("== nodes")[0]


def test_step_is_moved_in_the_middle(lab):
    """A step with input, output, labels and an exit status of its own goes on; a finished one is not run again."""
    at = bench(lab, "step")
    job = at.submit(
        r"""
        srun -n 4 sh -c 'echo ran >>once.$SLURM_PROCID'
        seq 1 400 | while read n; do echo $n; sleep 0.02; done |
            srun -n 4 -l sh -c 'while read n; do [ $((n % 100)) = 0 ] && echo "read $n"; done; exit $SLURM_PROCID' \
            >read.txt
        echo "status ${PIPESTATUS[2]}"
        srun -n 2 hostname | sort | uniq
        """,
        *TWO,
    ).running()
    wait_until(lambda: "read 100" in job.file("read.txt"), 60, "the first hundred")
    first = job.info["nodes"]
    job.move().end(timeout_s=90)
    assert job.info["nodes"] != first
    lines = sorted(job.file("read.txt").splitlines())
    assert lines == sorted(f"{task}: read {n}" for task in range(4) for n in (100, 200, 300, 400))
    assert "status 3\n" in job.out, job.raw
    assert [at.directory.joinpath(f"once.{task}").read_text() for task in range(4)] == ["ran\n"] * 4


def test_tasks_are_in_their_steps_groups(lab):
    """Before and after a move every task is in a control group of Slurm's step, not of the batch script."""
    at = bench(lab, "groups")
    script = "srun -n 2 -N 2 sh -c 'echo $$; while :; do cat /proc/self/cgroup >cg.$SLURM_PROCID; sleep 0.2; done'\n"
    job = at.submit(script, *TWO).running()
    groups = [at.directory / f"cg.{task}" for task in (0, 1)]
    wait_until(lambda: all(g.exists() and g.read_text() for g in groups), 60, "both tasks")
    assert all("step_0" in g.read_text() for g in groups)
    job.move()
    for group in groups:
        group.unlink()
    wait_until(lambda: all(g.exists() and g.read_text() for g in groups), 60, "both tasks again")
    assert all("step_0" in g.read_text() for g in groups), groups[1].read_text()
    job.cancel()
    job.end(128 + 15, state="CANCELLED")


@pytest.mark.parametrize(
    ("words", "reason"),
    [("--pty bash", "--pty is not possible"), ("--mpi=pmix true", "--mpi=pmix is not possible")],
)
def test_what_cannot_be_saved_is_refused(lab, words, reason):
    """With a word on standard error and a status, before anything starts; the script goes on."""
    at = bench(lab, "refused")
    job = at.submit(f"srun {words}\necho status $?\n").end()
    assert reason in job.raw
    assert "status 1\n" in job.out


def test_mpi_ranks_on_two_nodes(lab):
    """MPICH by srun --mpi=pmi2: preempted, restored on two other nodes, MPI_Finalize and later steps work."""
    at = bench(lab, "ring")
    at.put("ring.c", (CHECKOUT / "examples/ring.c").read_text())
    lab.exec("n1", ["sh", "-c", f"cd {at.inside} && mpicc -O2 -o ring ring.c"], user="alice")
    script = "srun --mpi=pmi2 ./ring 250 20000 | cat\necho status ${PIPESTATUS[0]}\nsrun -n 2 echo later\n"
    job = at.submit(script, *TWO)
    plain = at.submit(script.replace("20000", "1000"), *TWO, name="plain", protected=False)
    job.says("iteration 100")
    plain.end()
    job.preempt().end(timeout_s=120)
    (result,) = (line for line in job.out.splitlines() if line.startswith("RESULT"))
    assert result in plain.out
    assert job.out.endswith("status 0\nlater\nlater\n"), job.raw


def test_mpirun_in_the_script(lab):
    """Hydra starts its proxies by srun, with the job's own names for the nodes, before and after a move."""
    at = bench(lab, "hydra")
    at.put("ring.c", (CHECKOUT / "examples/ring.c").read_text())
    lab.exec("n1", ["sh", "-c", f"cd {at.inside} && mpicc -O2 -o ring ring.c"], user="alice")
    script = "mpirun.mpich -n 4 -ppn 2 ./ring 200 20000\necho status $?\nmpirun.mpich -n 2 -ppn 1 ./ring 5 1000\n"
    job = at.submit(script, *TWO).says("iteration 50")
    job.move().end(timeout_s=120)
    assert job.out.count("RESULT") == 2, job.raw
    assert "status 0\n" in job.out


def test_traffic_survives_many_moves(lab, capsys):
    """Ten moves under full-rate TCP between two nodes, without one reset, lost or doubled byte."""
    assert migration.main(["--rounds", "10", "--nodes", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["rounds"], report["failures"]) == (10, [])
    assert all(set(r["from"]).isdisjoint(r["to"]) for r in report["each"])


def test_checkpoint_while_some_tasks_have_ended(lab):
    """Their statuses are kept: the step goes on with the others, on other nodes, and ends with the highest."""
    at = bench(lab, "steps-some-ended")
    task = "echo rank $SLURM_PROCID; [ $SLURM_PROCID -lt 2 ] && exit $((5 + SLURM_PROCID))"
    task += "; until [ -e go ]; do sleep 0.1; done; echo last"
    job = at.submit(f"srun -N 2 -n 4 bash -c '{task}' 2>/dev/null; echo status $?", "-N", "2", "-n", "4", name="job")
    for rank in range(4):
        job.says(f"rank {rank}\n")
    wait_until(lambda: job.gpucr("checkpoint", str(job.id), check=False).status == 0, 30, "a checkpoint")
    job.move()
    (at.directory / "go").touch()
    job.end()
    assert sorted(job.out.splitlines()) == ["last", "last", *(f"rank {n}" for n in range(4)), "status 6"]
