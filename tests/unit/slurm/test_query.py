"""What slurmctld says, from answers recorded in the lab (Slurm 26.05) and the shape that 24.11 gives them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpucr_hpc.errors import JobUnknown, SlurmError
from gpucr_hpc.proc import Result
from gpucr_hpc.slurm import query

HERE = Path(__file__).parent
# What 24.11 writes with the same data_parser version: counts without {set, number} where it has them plain, no keys
# that came later.
OLD = {
    "job_id": 71,
    "user_id": 2001,
    "job_state": ["RUNNING"],
    "nodes": "n1",
    "node_count": {"set": True, "number": 1},
    "batch_host": "n1",
    "partition": "low",
    "restart_cnt": 2,
    "preempt_time": {"set": False, "infinite": False, "number": 0},
    "end_time": {"set": True, "infinite": True, "number": 0},
    "excluded_nodes": "",
    "cpus": 4,
    "het_job_id": {"set": True, "number": 0},
    "requeue": True,
}


def recorded(name: str) -> query.JobInfo:
    text = (HERE / f"job-26.05-{name}.json").read_text()
    return query.parse_job(str(json.loads(text)["jobs"][0]["job_id"]), text)


def old(**changes) -> query.JobInfo:
    return query.parse_job("71", json.dumps({"jobs": [OLD | changes]}))


def test_running():
    info = recorded("running")
    assert (True, False, False) == (info.running, info.being_preempted, info.requeued)
    assert (2001, "n1", 1, "n1", "low", 0, "n4", 1, False, True) == (
        info.uid, info.nodes, info.node_count, info.batch_host, info.partition, info.restarts, info.excluded_nodes,
        info.cpus, info.is_het, info.requeueable,
    )  # fmt: skip


def test_in_the_grace_time():
    info = recorded("preempted")
    assert (True, True, False) == (info.running, info.being_preempted, info.requeued)
    assert 60 == info.end_time - info.preempt_time, "the lab's GraceTime"


def test_requeued_and_still_ending():
    info = recorded("requeued")
    assert (False, False, True) == (info.running, info.being_preempted, info.requeued)


def test_older_slurm():
    info = old()
    assert (True, 2, 4, 0, 0) == (info.running, info.restarts, info.cpus, info.preempt_time, info.end_time)
    assert old(het_job_id={"set": True, "number": 70}).is_het
    assert old(preempt_time={"set": True, "number": 99}).being_preempted
    assert not old(preempt_time={"set": True, "number": 99}, job_state=["RUNNING", "COMPLETING"]).being_preempted
    assert not old(job_state=["PENDING"]).requeued


@pytest.mark.parametrize("text", ["", "{}", '{"jobs": ', "[]", "null"])
def test_unreadable_answer(text):
    with pytest.raises(SlurmError, match="unreadable answer about job 71"):
        query.parse_job("71", text)


@pytest.mark.parametrize("jobs", [[], [OLD | {"job_id": 72}]])
def test_other_job(jobs):
    with pytest.raises(JobUnknown, match="job 71"):
        query.parse_job("71", json.dumps({"jobs": jobs}))


@pytest.fixture
def scontrol(monkeypatch):
    """Answer every question with one result."""

    def install(stdout: str = "", status: int = 0, stderr: str = "") -> None:
        async def answer(*_: str) -> Result:
            return Result(("scontrol",), status, stdout, stderr, 0.0)

        monkeypatch.setattr(query, "_scontrol", answer)

    return install


def test_unknown_job_is_not_a_silent_slurmctld(scontrol):
    scontrol(status=1, stderr="slurm_load_jobs error: Invalid job id specified")
    with pytest.raises(JobUnknown):
        asyncio.run(query.job("71"))
    scontrol(status=1, stderr="Unable to contact slurm controller (connect failure)")
    with pytest.raises(SlurmError) as caught:
        asyncio.run(query.job("71"))
    assert type(caught.value) is SlurmError
    assert caught.value.retryable


def test_configuration(scontrol):
    scontrol("Configuration data as of 2026\nPreemptMode = REQUEUE\nSchedulerParameters = a=1,requeue_delay=1\n\nfoo\n")
    read = asyncio.run(query.config())
    assert "REQUEUE" == read["preemptmode"]
    assert "a=1,requeue_delay=1" == read["schedulerparameters"]


def test_enough_free_elsewhere(scontrol):
    """Another idle node of the partition with enough processors; the job's own does not count."""
    text = (HERE / "nodes-26.05.json").read_text()
    nodes = {"nodes": [n | {"state": ["IDLE"], "alloc_cpus": 0} for n in json.loads(text)["nodes"][:2]]}
    one, two = (n["name"] for n in nodes["nodes"])
    info = recorded("running")
    scontrol(json.dumps(nodes))
    assert asyncio.run(query.enough_free_elsewhere(info, [one]))
    assert not asyncio.run(query.enough_free_elsewhere(replace(info, cpus=64), [one]))
    assert not asyncio.run(query.enough_free_elsewhere(replace(info, partition="other"), [one]))
    for state in (["IDLE", "DRAIN"], ["DOWN"], ["IDLE", "NOT_RESPONDING"], ["ALLOCATED"]):
        nodes["nodes"][1]["state"] = state
        scontrol(json.dumps(nodes))
        assert not asyncio.run(query.enough_free_elsewhere(info, [one])), state
        assert asyncio.run(query.enough_free_elsewhere(info, [two])), "the first one is still idle"
    scontrol(status=1)
    assert not asyncio.run(query.enough_free_elsewhere(info, [one]))


def element(job: int, array: int, task: int | None) -> dict[str, object]:
    """As Slurm writes an element; task None: several that wait together."""
    number = {"set": task is not None, "infinite": False, "number": task or 0}
    return {"job_id": job, "array_job_id": {"set": True, "infinite": False, "number": array}, "array_task_id": number}


def test_element_of_an_array():
    """By the name that squeue shows; what is not there, or waits with others, has no job id."""
    text = json.dumps({"jobs": [element(15, 12, 0), element(16, 12, 7), element(12, 12, None)]})
    assert ["15", "16"] == [query.parse_element(12, task, text) for task in (0, 7)]
    for missing in (text, "", "{}", json.dumps({"jobs": [element(12, 12, None)]})):
        with pytest.raises(JobUnknown, match="job 12_8"):
            query.parse_element(12, 8, missing)
    with pytest.raises(JobUnknown):
        query.parse_element(12, 0, json.dumps({"jobs": [element(12, 12, None)]}))


@pytest.mark.parametrize("text", ["12", "", "12_", "12_x", "12_7_1", "٤_١", "12_7.batch"])
def test_other_names_are_left_as_they_are(text):
    """Whoever takes a job id refuses what is none."""
    assert text == asyncio.run(query.plain_id(text))
