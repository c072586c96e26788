"""Options, the site's own prolog, and nodes whose agent is away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from jobs import JobRun, agent_back, agent_pid, bench, configured, each, slurm_setting
from programs import count

from gpucr_hpc.lab import conf
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.nodes import USERS


def test_task_prolog(lab: Lab) -> None:
    """A prolog that forks, exports and prints: its variable is there before and after a move, its line once a run."""
    on = bench(lab, "options-prolog")
    lines = ["#!/bin/sh", "(true) | cat", 'echo "export SITE=blue moon"', 'echo "print hello of prolog"', ""]
    prolog = on.put("prolog.sh", "\n".join(lines))
    with slurm_setting(lab, f"TaskProlog={prolog}"):
        job = on.submit('echo "$SITE"; until [ -e go ]; do sleep 0.1; done; echo "$SITE"; exit 4').says("blue moon\n")
        job.move()
        (on.directory / "go").touch()
        job.end(4)
        assert job.out.count("hello of prolog\n") == 2
        assert job.out.replace("hello of prolog\n", "") == "blue moon\nblue moon\n"


@contextmanager
def agent_away(lab: Lab, node: str) -> Iterator[None]:
    """A node whose agent cannot start: its configuration is wrong."""
    path = lab.root(node) / "etc/gpucr/gpucr.toml"
    before, pid = path.read_text(), agent_pid(lab, node)
    path.write_text("broken = [")
    lab.exec(node, ["kill", "-KILL", str(pid)])
    try:
        yield
    finally:
        path.write_text(before)
        agent_back(lab, node)


def test_without_an_agent(lab: Lab) -> None:
    """A job without the option does not notice; one with it runs unprotected and says so, or is refused when the
    plugin is told when_unprotected=fail; --no-checkpoint is no business of ours."""
    on = bench(lab, "options-away")
    plug = lab.root("n1") / "etc/slurm/plugstack.conf"
    with agent_away(lab, "n1"):
        plain = on.submit("echo hello; exit 3", "-w", "n1", name="plain", protected=False)
        off = on.submit("echo hello; exit 3", "-w", "n1", "--no-checkpoint", name="off")
        wanted = on.submit("echo hello; exit 3", "-w", "n1", name="wanted")
        each([lambda job=job: job.end(3) for job in (plain, off, wanted)])
        assert plain.raw == off.raw == "hello\n"
        assert wanted.out == "hello\n"
        assert "agent not reachable at /run/gpucr/agent.sock" in wanted.raw
        assert "this job runs without protection" in wanted.raw
        plug.write_text(f"optional {conf.PLUGIN} when_unprotected=fail\n")
        try:
            refused = on.submit("echo hello", "-w", "n1", name="refused").end(1)
            assert refused.out == ""
            assert "this job shall not run without protection" in refused.raw
        finally:
            plug.write_text(conf.plugstack_conf(built=True))


def outcome(job: JobRun, code: int = 0) -> str:
    return job.end(code).raw


def test_checkpoint_dir(lab: Lab) -> None:
    """Below an allowed root the set lies there and is the user's; outside, or through a link that leads outside, it
    is refused with the reason, and the job runs without protection or fails, as the site has it."""
    on = bench(lab, "options-dir")
    own = on.directory / "sets"
    own.mkdir()
    os.chown(own, USERS[on.user], 100)
    (on.directory / "link").symlink_to("/var/tmp")
    job = on.submit(count("own"), f"--checkpoint-dir={on.inside}/sets", name="own").says("line 2\n")
    job.move()
    files = [path for path in own.rglob("*") if path.is_file()]
    assert any(path.name == "manifest" for path in files)
    assert {path.stat().st_uid for path in files} == {USERS[on.user]}
    assert not job.sets()
    assert str(job.id) in job.gpucr("list", "--checkpoint-dir", f"{on.inside}/sets").stdout
    job.whole()
    outside = {"far": "/var/tmp/sets", "link": f"{on.inside}/link/sets", "dots": f"{on.inside}/../../../x"}
    for name, place in outside.items():
        text = outcome(on.submit("echo hello", f"--checkpoint-dir={place}", name=name))
        assert f"--checkpoint-dir may not be {place}: allowed are directories below /shared/home" in text
        assert text.endswith("hello\n")
    with configured(lab, 'when_unprotected = "fail"'):
        text = outcome(on.submit("echo hello", "--checkpoint-dir=/var/tmp/sets", name="fails"), 1)
        assert "this job cannot be protected" in text
        assert "hello" not in text


def test_no_checkpoint_and_bad_options(lab: Lab) -> None:
    """--no-checkpoint wins over the script's own line; a malformed option is refused by sbatch with its name."""
    on = bench(lab, "options-off")
    script = "#!/bin/bash\n#SBATCH --checkpoint-on-preempt\necho ${GPUCR_CAPSULE:-none}\n"
    assert on.submit(script, "--no-checkpoint", name="off", protected=False).end().raw == "none\n"
    job = on.submit(script, name="on", protected=False).end()
    assert job.out == f"{job.id}\n"
    short = on.submit("echo hello", "--checkpoint-interval=100ms", name="short").end()
    assert short.raw == "gpucr: the site's shortest interval is 1s: it is taken\nhello\n"
    for bad in ("--checkpoint-dir=relative", "--checkpoint-interval=soon", "--checkpoint-nccl=fast"):
        asked = lab.exec("ctl", ["sbatch", bad, "--wrap", "true"], user=on.user, check=False)
        assert (asked.status != 0, bad.split("=")[0] in asked.stderr) == (True, True)


def test_nccl_over_sockets_is_the_users_choice(lab: Lab) -> None:
    """In the script and in its steps, only with `safe`, and never over what the user has set."""
    on = bench(lab, "options-nccl")
    show = "env | grep ^NCCL_ | sort; true"
    script = f"export NCCL_DEBUG=WARN; {show}; srun bash -c '{show}'"
    safe = ["NCCL_DEBUG=WARN", "NCCL_NVLS_ENABLE=0", "NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1"]
    assert on.submit(script, "--checkpoint-nccl=safe", name="safe").end().raw.split() == safe * 2
    assert on.submit(script, name="keep").end().raw.split() == safe[:1] * 2
    own = on.submit(script, "--checkpoint-nccl=safe", "--export=ALL,NCCL_P2P_DISABLE=0", name="own").end()
    assert own.raw.split()[2] == "NCCL_P2P_DISABLE=0"
