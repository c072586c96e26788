"""srun's command line is read as srun reads it."""

from __future__ import annotations

import pytest

from gpucr_hpc.errors import UsageError
from gpucr_hpc.slurm import srun_args


@pytest.mark.parametrize(
    ("text", "options", "command"),
    [
        ("hostname", [], ["hostname"]),
        ("-n4 ./a -n 5", [("ntasks", "4")], ["./a", "-n", "5"]),
        ("-n 4 -N2 -lu a b", [("ntasks", "4"), ("nodes", "2"), ("label", None), ("unbuffered", None)], ["a", "b"]),
        ("-lo out.txt a", [("label", None), ("output", "out.txt")], ["a"]),
        ("--output out --error=err a", [("output", "out"), ("error", "err")], ["a"]),
        ("--nodel n1 a", [("nodelist", "n1")], ["a"]),
        ("-K1 -I a", [("kill-on-bad-exit", "1"), ("immediate", None)], ["a"]),
        ("--kill-on-bad-exit a", [("kill-on-bad-exit", None)], ["a"]),
        ("--overlap -- -x", [("overlap", None)], ["-x"]),
        ("--some-plugin=3 a", [("some-plugin", "3")], ["a"]),
    ],
)
def test_options_end_where_the_program_begins(text: str, options: list[object], command: list[str]) -> None:
    """Short clusters, joined and separate values, abbreviations and optional values."""
    found = srun_args.parse(text.split())
    assert list(found.options) == options
    assert list(found.command) == command


def test_missing_value_is_refused() -> None:
    """An option at the end without its value is an error, as for srun."""
    with pytest.raises(UsageError, match="requires an argument"):
        srun_args.parse(["-n"])
    with pytest.raises(UsageError, match="invalid option"):
        srun_args.parse(["-@"])


def test_rewritten_line_reads_the_same() -> None:
    """argv() gives back what was parsed."""
    found = srun_args.parse(["-n", "4", "--mpi", "pmi2", "-l", "./a", "--b"])
    assert srun_args.parse(found.argv()) == found


def test_stdio_of_the_proxy_is_taken_from_the_real_srun() -> None:
    """A shared output file is written by the proxy, a file per task by its node."""
    shared = srun_args.parse(["-o", "all.txt", "-l", "-i", "none", "a"])
    plan = srun_args.stdio_plan(shared, "/home/u")
    assert plan == srun_args.StdioPlan(True, "none", "file:/home/u/all.txt", "file:/home/u/all.txt", False)
    assert srun_args.real_command(shared, str).argv() == ["a"]
    single = srun_args.parse(["-o", "t%t.txt", "a"])
    assert srun_args.stdio_plan(single, "/x").stdout == ""
    assert srun_args.real_command(single, str).argv() == ["--output=t%t.txt", "a"]


def test_files_of_the_job_are_one_for_all_tasks() -> None:
    """Only %t, %n, %N and %u make a file for each task (srun(1), filename pattern)."""
    env = {"SLURM_JOB_ID": "42", "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "7", "SLURM_JOB_NAME": "md"}
    args = srun_args.expanded(srun_args.parse(["-o", "%x-%A_%3a.%5j.100%%", "-i", "in.%j", "a"]), env)
    plan = srun_args.stdio_plan(args, "/w")
    assert (plan.stdout, plan.stdin) == ("file:/w/md-40_007.00042.100%", "file:/w/in.42")
    assert srun_args.real_command(args, str).argv() == ["a"]
    kept = srun_args.expanded(srun_args.parse(["-o", "%j.%3t", "-e", "e%%j", "a"]), env)
    assert kept.argv() == ["--output=%j.%3t", "--error=e%j", "a"]
    for pattern in ("%J.out", "step%2s", "%j.%s"):
        assert "use %j" in (srun_args.refusal(srun_args.parse(["-o", pattern, "a"])) or "")
    assert srun_args.refusal(srun_args.parse(["-o", "100%%s", "a"])) is None


def test_node_names_of_the_job_become_those_of_the_run() -> None:
    """mpirun names nodes as it knows them."""
    names = {"n1": "n3", "n2": "n4"}
    found = srun_args.real_command(srun_args.parse(["-w", "n1,n2", "-N", "2", "p"]), lambda n: names.get(n, n))
    assert found.argv() == ["--nodelist=n3,n4", "--nodes=2", "p"]


def test_relaunch_pins_geometry() -> None:
    """Placement options go, the host file's distribution comes, files are appended to."""
    args = srun_args.parse(["-N2", "--ntasks-per-node=2", "-c2", "--mpi=pmi2", "a", "b"])
    found = srun_args.relaunch_command(args, 4)
    assert found.argv() == [
        *("--cpus-per-task=2", "--mpi=pmi2", "--ntasks=4", "--distribution=arbitrary"),
        *("--open-mode=append", "a", "b"),
    ]


def test_environment_options_come_first() -> None:
    """SLURM_LABELIO and the like count unless the command line says otherwise."""
    env = {"SLURM_LABELIO": "1", "SLURM_STDOUTMODE": "x.txt"}
    found = srun_args.with_environment(srun_args.parse(["-o", "y.txt", "a"]), env)
    assert found.has("label")
    assert found.value("output") == "y.txt"


def test_run_variables_follow_the_run() -> None:
    """What describes the allocation is the new run's; what the user set stays."""
    env = srun_args.run_environment(
        {"SLURM_JOB_NODELIST": "n1", "SLURM_MPI_TYPE": "pmi2", "A": "1", "GPUCR_CAPSULE": "3"},
        {"SLURM_JOB_NODELIST": "n3", "SLURM_MPI_TYPE": "none"},
    )
    assert env == {"SLURM_JOB_NODELIST": "n3", "SLURM_MPI_TYPE": "pmi2", "A": "1"}


@pytest.mark.parametrize("text", ["--pty bash", "--mpi=pmix_v5 a", "a : b"])
def test_what_cannot_be_saved_is_refused(text: str) -> None:
    """With a reason, before anything starts."""
    assert srun_args.refusal(srun_args.parse(text.split()))
