"""Recipients, rotation of the site key, and what `gpucr inspect`, `verify` and `prune` say of real checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jobs import JobRun, bench, kill_agent
from programs import count

from gpucr_hpc.image.keys import SigningKey
from gpucr_hpc.lab.cluster import Lab

KEYS = "etc/gpucr/keys"
HOLDER = """
    import os, socket, time
    word = "-".join(["kept", "in", "memory", "5d20b7"]).encode()
    data = [word * 100 for _ in range(200)]
    log = open("notes.txt", "w")
    server = socket.create_server(("127.0.0.1", 5005))
    if os.fork() == 0:
        time.sleep(600)
    print("ready", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.1)
    os.system("pkill sleep; true")
    os._exit(0)
"""


def asked(job: JobRun, *argv: str, user: str = "") -> Any:
    return json.loads(job.gpucr(*argv, "--json", user=user).stdout)


def test_inspect_and_search(lab: Lab) -> None:
    """The owner sees processes, descriptors, sockets and memory; others nothing; root finds a word in memory."""
    on = bench(lab, "keys-inspect")
    job = on.submit(f"exec python3 {on.put('holder.py', HOLDER)}", name="job").says("ready\n")
    name = job.checkpoint()["checkpoint"]
    report = asked(job, "inspect", name)
    (image,) = report["images"]
    holders = [p for p in image["processes"] if p["argv"][-1:] == [f"{on.inside}/holder.py"]]
    assert len(holders) == 2
    assert holders[1]["parent"] == holders[0]["pid"]
    targets = list(holders[0]["descriptors"].values())
    assert f"{on.inside}/notes.txt" in targets
    assert "tcp 127.0.0.1:5005 LISTEN" in targets
    held = sum(sum(r["image_bytes"].values()) for p in image["processes"] for r in p["memory"])
    pages = sum(s["bytes"] for s in image["streams"] if s["name"].startswith("pages-"))
    assert held + sum(image["shared_memory"].values()) == pages
    assert "kept-in-memory" not in json.dumps(report)
    text = job.gpucr("inspect", name).stdout
    assert "holder.py" in text and "anonymous" in text
    assert job.gpucr("inspect", name, user="bob", check=False).status == 62
    assert job.gpucr("inspect", name, "--memory", "x", check=False).status == 2
    found = asked(job, "inspect", name, "--memory", "kept-in-memory-5d20b7", "--limit", "5", user="root")["places"]
    assert {p["pid"] for p in found} <= {p["pid"] for p in holders}
    assert len(found) == 5
    assert all(bytes.fromhex(p["bytes"])[p["before"] :].startswith(b"kept-in-memory-5d20b7") for p in found)
    (on.directory / "go").touch()
    job.end()


@contextmanager
def keys_kept(lab: Lab) -> Iterator[list[str]]:
    """Give the nodes their key directories back afterwards; the names of the nodes."""
    nodes = lab.nodes()[1:]
    saved = {node: (lab.root(node) / KEYS / "site.key").read_bytes() for node in nodes}
    try:
        yield nodes
    finally:
        for node in nodes:
            where = lab.root(node) / KEYS
            (where / "site.key").write_bytes(saved[node])
            for other in (where / "site.d").glob("*.key"):
                other.unlink()
            kill_agent(lab, node, "TERM")


def test_site_key_is_rotated_under_a_job(lab: Lab) -> None:
    """Staged everywhere, then current everywhere: a job moves before, between and after; its checkpoints are rewrapped,
    verified to the last byte, and the newest good one survives every prune."""
    on = bench(lab, "keys-rotate")
    job = on.submit(count("job"), name="job").says("line 2\n")
    job.checkpoint()
    job.move()
    with keys_kept(lab) as nodes:
        node = job.node
        staged = asked(job, "key", "rotate", "--stage", user="root")["next"]
        content = (lab.root(node) / KEYS / "site.d/next.key").read_bytes()
        for other in nodes:
            where = lab.root(other) / KEYS / "site.d"
            where.mkdir(mode=0o700, exist_ok=True)
            (where / "next.key").write_bytes(content)
            (where / "next.key").chmod(0o600)
            kill_agent(lab, other, "TERM")
        old = {asked_on(lab, other, "key", "rotate")["old"] for other in nodes}
        assert len(old) == 1
        for other in nodes:
            kill_agent(lab, other, "TERM")
        job.says(f"line {len(job.out.splitlines()) + 2}\n")
        job.checkpoint()
        job.move()
        listed = {k["id"]: k.get("checkpoints") for k in asked(job, "key", "list", "--store", user="root")["keys"]}
        assert listed[staged] >= 1
        results = asked(job, "key", "rewrap", "--job", str(job.id), user="root")["checkpoints"]
        assert all(r["problem"] is None and r["recipients"] == [staged] for r in results)
        verified = asked(job, "verify", "--job", str(job.id), "--deep")
        assert (verified["good"], len(verified["checkpoints"])) == (True, len(job.sets()))
        pruned = asked(job, "prune", str(job.id), "--keep-last", "0")
        assert (len(job.sets()), pruned["kept"]) == (1, 1)
        job.move()
        job.whole()


def asked_on(lab: Lab, node: str, *argv: str) -> Any:
    return json.loads(lab.exec(node, ["gpucr", *argv, "--json"], user="root").stdout)


def test_recipients_of_a_user(lab: Lab) -> None:
    """His file is read as he at the job's start; each checkpoint is sealed for him too, and his key opens it where he
    can read the store. A file that is no good is said in the output, and the job is protected all the same."""
    on = bench(lab, "keys-user")
    home = lab.state / "shared/home/alice/.config/gpucr"
    lab.exec("n1", ["mkdir", "-p", "/shared/home/alice/.config/gpucr"], user="alice")
    lab.exec("n1", ["gpucr", "key", "generate", "--recipient", f"{on.inside}/mine"], user="alice")
    file = "/shared/home/alice/.config/gpucr/recipients.pem"
    try:
        lab.exec("n1", ["cp", f"{on.inside}/mine.pem", file], user="alice")
        job = on.submit(count("one"), name="one").says("line 2\n")
        name = job.checkpoint()["checkpoint"]
        listed = asked(job, "key", "list", "--store", user="root")["keys"]
        assert any(k["kind"] == "unknown" and k["checkpoints"] >= 1 for k in listed)
        lab.exec("n1", ["cp", "-r", f"/shared/gpucr/{job.id}", f"{on.inside}/copy-{job.id}"], user="root")
        lab.exec("n1", ["sh", "-c", f"mkdir {on.inside}/store && mv {on.inside}/copy-* {on.inside}/store/{job.id} && "
                        f"chown -R alice {on.inside}/store"], user="root")  # fmt: skip
        signing = SigningKey((lab.root("n1") / KEYS / "signing.key").read_bytes())
        signer = on.put("signing.pub", signing.public.raw.hex())
        lab.exec("n1", ["chmod", "644", signer], user="root")
        argv = ["--key", f"{on.inside}/mine", "--signer", signer, "--checkpoint-dir", f"{on.inside}/store"]
        found = asked(job, "inspect", name, *argv, "--memory", "line ", "--limit", "1")["places"]
        assert len(found) == 1
        job.whole()
        (home / "recipients.pem").write_text("not PEM")
        other = on.submit(count("two"), name="two").says("line 2\n").says("recipients of checkpoints not used")
        other.checkpoint()
        other.whole()
    finally:
        (home / "recipients.pem").unlink(missing_ok=True)
