"""Jobs that are moved again and again, several at once, and elements of an array."""

from __future__ import annotations

from jobs import JobRun, bench, each
from programs import TREE, count

from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.wait import wait_until


def daemon(job: JobRun) -> tuple[int, int]:
    """Pid inside the capsule and count of TREE's daemon."""
    pid, counted = job.file("daemon").split()
    return int(pid), int(counted)


def test_a_whole_tree_is_preempted_three_times(lab: Lab) -> None:
    """A daemon, a pool, a pipe, children in the background and threads go on, each from where it was."""
    on = bench(lab, "moves-tree")
    on.put("tree.py", TREE)
    script = """
        (trap 'exit 0' TERM; while :; do sleep 0.1; done) & background=$!
        setsid bash -c 'while [ ! -e stop ]; do sleep 0.1; done; echo own session > session.end' &
        python3 tree.py stop || exit
        while [ ! -e daemon.end -o ! -e session.end ]; do sleep 0.1; done
        kill $background; wait $background; echo "background $?"
        exit 7
    """
    job = on.submit(script, name="tree").says("round 3\n")
    pid, last = wait_until(lambda: job.file("daemon") and daemon(job), 20, "the daemon")
    for _ in range(3):
        job.preempt()
        rounds = job.out.count("round")
        wait_until(lambda last=last: daemon(job)[1] > last + 5, 20, "the daemon to count on")
        wait_until(lambda rounds=rounds: job.out.count("round") > rounds, 20, "the pool to go on")
        assert daemon(job)[0] == pid
        last = daemon(job)[1]
    (job.directory / "stop").touch()
    job.end(7)
    rounds = sum(line.startswith("round ") for line in job.out.splitlines())
    expected = [f"round {n}" for n in range(1, rounds + 1)]
    assert job.out.splitlines() == [*expected, "threads, pool and pipe are right", "background 0"]
    assert (int(job.file("daemon.end").split()[0]), job.file("session.end")) == (pid, "own session\n")
    assert job.restarts == 3


def test_five_rounds_on_demand(lab: Lab) -> None:
    """C29: the fifth checkpoint of a job is as good as its first, also with two that let it run on between."""
    job = bench(lab, "moves-five").submit(count("job"), name="job").says("line 3\n")
    for number in range(5):
        job.checkpoint()
        job.says(f"line {len(job.out.splitlines()) + 2}\n")
        job.move()
        assert job.restarts == number + 1
    job.whole()


def test_two_jobs_on_one_node_and_one_elsewhere(lab: Lab) -> None:
    """Jobs that leave one node at the same time do not meet; one on another node is not touched by it."""
    on = bench(lab, "moves-pair")
    busy = [on.submit(count(f"busy{n}"), "-c", "2", name=f"busy{n}") for n in range(3)]
    each([lambda job=job: job.says("line 1\n") for job in busy])
    a, b = (on.submit(count(name), name=name) for name in "ab")
    each([a.says, b.says] and [lambda job=job: job.says("line 3\n") for job in (a, b)])
    assert a.node == b.node
    busy[0].whole()
    each([a.preempt, lambda: b.back(1)])
    assert [job.restarts for job in busy] == [0, 0, 0]
    each([lambda job=job: job.checkpoint() for job in (a, b, *busy[1:])])
    each([lambda job=job: job.whole() for job in (a, b, *busy[1:])])


def test_one_element_of_an_array_is_preempted(lab: Lab) -> None:
    """C48: only the element on the node that is wanted moves."""
    on = bench(lab, "moves-array")
    script = count("arr-$SLURM_ARRAY_TASK_ID")
    whole = on.submit(script, "--array=0-2", "-c", "2", f"--output={on.inside}/arr-%a.out", name="arr")
    records = wait_until(lambda: [r for r in lab.jobs() if r["batch_host"]] * (len(lab.jobs()) == 3), 30, "3 elements")
    elements = {
        int(r["array_task_id"]["number"]): JobRun(lab, int(r["job_id"]), on.user, whole.directory, "") for r in records
    }
    for number, job in elements.items():
        job.name = f"arr-{number}"
        job.says("line 2\n")
    elements[1].preempt()
    assert [elements[n].restarts for n in range(3)] == [0, 1, 0]
    each([lambda job=job: job.whole() for job in elements.values()])
