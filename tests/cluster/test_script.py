"""What a user sees of a moved job: commands, exit status, output byte for byte, input, limits, environment."""

from __future__ import annotations

import re

from jobs import JobRun, bench, each

from gpucr_hpc.lab.cluster import Lab

# Variables that tell of place, time and number of a run, and so differ between any two jobs.
_OWN = re.compile(
    r"SLURM_JOB_?ID=|SLURM_JOB_(START|END)_TIME|SLURM_TASK_PID|SLURMD?_(JOB_)?NODE(NAME|LIST)=|SLURM_TOPOLOGY_ADDR="
    r"|SLURM_JOB_NAME=|SLURM_JOB_SLUID=|SLURM_OPEN_MODE=|SLURM_SPANK_GPUCR_|SLURM_SPANK__SLURM_SPANK_OPTION_gpucr|GPUCR_|_=|SLURM_NODELIST|SLURM_RESTART_COUNT|SLURM_JOB_USER|SLURM_OOM|SLURM_JOB_SUBMIT"
)

SURROUNDINGS = r"""
show() {
    echo "limits $(ulimit -n) $(ulimit -Hn) $(ulimit -c) $(ulimit -s) $(ulimit -u)"
    echo "umask $(umask) nice $(nice) cwd $(pwd) groups $(id -G | tr ' ' '\n' | sort | tr '\n' ' ')"
    echo "input $(readlink /proc/$$/fd/0 | grep -c null)"
    echo "affinity $(taskset -cp $$ | sed 's/.*: //' | tr , '\n' | wc -l)"
    cat /proc/$$/status | grep -E 'SigIgn|Seccomp:|NoNewPrivs|CapEff|Dumpable'
    touch made.$1; stat -c 'file %a %U' made.$1
    mkdir -p $HOME/x 2>&1; echo "home $HOME"
}
show 1
env | sort
echo "### go"
until [ -e go ]; do sleep 0.1; done
show 2
env | sort
"""


#: What tasks of protected jobs get besides (docs/user.md).
FOR_TASKS = {"GODEBUG=multipathtcp=0", "USE_LIBUV=0"}


def kept(text: str) -> list[str]:
    return [line for line in text.splitlines() if not _OWN.match(line)]


def moved(jobs: list[JobRun]) -> None:
    """Move all at once, then tell them to go on."""
    each([job.move for job in jobs])
    (jobs[0].directory / "go").touch()


def test_surroundings_are_those_of_a_plain_job(lab: Lab) -> None:
    """Limits, umask, nice, groups, cwd, signals, environment: before and after a move as without protection."""
    on = bench(lab, "script-env")
    prefix = "ulimit -n 512; ulimit -c 0; umask 0027; \n"
    env = ["--export=ALL,COLOUR=blue and green,EMPTY=", "--nice=5", "--propagate=NONE"]
    job = on.submit(prefix + SURROUNDINGS, *env, name="job").says("### go\n")
    moved([job])
    job.end()
    (on.directory / "go").unlink()
    plain = on.submit(prefix + SURROUNDINGS, *env, name="plain", protected=False).says("### go\n")
    (on.directory / "go").touch()
    plain.end()
    ours, theirs = set(kept(job.out)), set(kept(plain.out))
    assert (ours - theirs, theirs - ours) == (FOR_TASKS, set())
    before, after = (part.replace("made.2", "made.1") for part in job.out.split("### go\n"))
    assert after == before


def test_the_script_goes_on_with_further_commands(lab: Lab) -> None:
    """C44: twenty commands after the move, some of them long lines, functions, here documents and pipes."""
    on = bench(lab, "script-commands")
    more = [f'echo "command {n}" | sed s/command/Command/' for n in range(15)]
    more += ["cat <<X", "here $((1 + 1))", "X", "f() { echo in f $1; }", "f a", "(exit 4) || echo status $?"]
    more += ["a=(1 2 3); echo ${#a[@]}", "x" * 0 + "true && echo last", "exit 7"]
    script = "echo first\nuntil [ -e go ]; do sleep 0.1; done\n" + "\n".join(more) + "\n"
    job = on.submit(script, name="job").says("first\n")
    moved([job])
    job.end(7)
    assert job.out == on.undisturbed(script, name="plain", code=7).out


def test_exit_status(lab: Lab) -> None:
    """An exit code, death by signal of the script and of a child: as without protection."""
    on = bench(lab, "script-status")
    wait = "echo ready; until [ -e go ]; do sleep 0.1; done; "
    ends = {"seven": ("exit 7", 7), "segv": ("kill -SEGV $$", 128 + 11), "kill": ("kill -KILL $$", 128 + 9)}
    ends |= {"child": ("sh -c 'kill -TERM $$'", 128 + 15), "zero": ("exit 0", 0)}
    jobs = {name: on.submit(wait + end, name=name) for name, (end, _) in ends.items()}
    each([lambda job=job: job.says("ready\n") for job in jobs.values()])
    moved(list(jobs.values()))
    plain = {name: on.submit(end, name=f"plain-{name}", protected=False) for name, (end, _) in ends.items()}
    for name, (_, code) in ends.items():
        # A child's death is an exit code of the shell; the script's own is a signal to Slurm.
        jobs[name].end(code)
        plain[name].end(code)
        assert jobs[name].info["exit_code"] == plain[name].info["exit_code"]


def test_output_and_input_byte_for_byte(lab: Lab) -> None:
    """Numbered lines on both outputs keep their order; separate files; an input file is read once, on and on."""
    on = bench(lab, "script-bytes")
    on.put("input", "".join(f"input {n}\n" for n in range(400)))
    fast = "for i in $(seq 20000); do echo out $i; echo err $i >&2; [ $i != 400 ] || until [ -e go ]; do :; done; done"
    both = on.submit(fast, name="both")
    split = on.submit(fast, f"--error={on.inside}/split.err", name="split")
    slow = 'while read -r l; do echo "got $l"; [ "$l" != \'input 60\' ] || until [ -e go ]; do :; done; done'
    reader = on.submit(slow, f"--input={on.inside}/input", name="in")
    partial = on.submit("printf 'no line end'; until [ -e go ]; do sleep 0.1; done; echo ' until now'", name="partial")
    binary = on.submit("head -c 3000000 /dev/zero | tr '\\0' 'x'; until [ -e go ]; do sleep 0.1; done", name="big")
    reader.says("got input 20\n")
    each([lambda job=job: job.says("out 400\n") for job in (both, split)])
    jobs = [both, split, reader, partial, binary]
    partial.says("no line end")
    moved(jobs)
    for job in jobs:
        job.end()
    lines = [f"{kind} {n}" for n in range(1, 20001) for kind in ("out", "err")]
    assert both.out.splitlines() == lines
    assert split.out.splitlines() == lines[::2]
    assert split.err.splitlines() == lines[1::2]
    assert reader.out.splitlines() == [f"got input {n}" for n in range(400)]
    assert partial.out == "no line end until now\n"
    assert binary.out == "x" * 3000000
