"""What `scripts/measure_network` makes of its rounds."""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from gpucr_hpc.errors import LabError
from gpucr_hpc.lab.network import check_control, interval, read


@pytest.mark.parametrize("rounds", [20, 101, 200])
def test_interval_holds_the_true_median_as_often_as_it_says(rounds: int) -> None:
    """95 of 100, of a skewed distribution whose median is 1."""
    source = random.Random(rounds)
    held = 0
    for _ in range(2000):
        low, high = interval([source.lognormvariate(0, 0.5) for _ in range(rounds)])
        held += low <= 1 <= high
    assert 0.93 < held / 2000 < 0.98


def test_interval_lies_around_the_median() -> None:
    """Also for the fewest rounds that are measured."""
    for count in range(4, 40):
        values = [float(value) for value in range(count)]
        low, high = interval(values)
        assert low <= statistics.median(values) <= high
        assert low + high == count - 1


def test_rounds_are_read_without_the_first_ones(tmp_path: Path) -> None:
    output = tmp_path / "network-1.out"
    rounds = "".join(f"ROUND {n}e9 {n}e-10 {n}e-6\n" for n in range(1, 5))
    output.write_text(f"SEGMENT 1386\nCONTROL reno\n{rounds}END\n")
    assert read(output) == ([(3e9, 3e-10, 3e-6), (4e9, 4e-10, 4e-6)], "reno")


@pytest.mark.parametrize("text", ["ROUND 1 1 1\n", "gpucr: job 1 runs without protection\nROUND 1 1 1\nEND\n"])
def test_a_job_that_failed_or_was_not_protected_is_no_measurement(tmp_path: Path, text: str) -> None:
    output = tmp_path / "network-1.out"
    output.write_text(text)
    with pytest.raises(LabError):
        read(output)


def test_congestion_control_that_users_may_not_use_is_refused(tmp_path: Path) -> None:
    """Before any lab is started, with the line that allows it."""
    (tmp_path / "tcp_available_congestion_control").write_text("cubic reno\n")
    (tmp_path / "tcp_allowed_congestion_control").write_text("cubic\n")
    with pytest.raises(LabError, match="tcp_allowed_congestion_control='cubic reno'"):
        check_control("reno", by_users=True, sysctls=tmp_path)
    check_control("reno", by_users=False, sysctls=tmp_path)
    (tmp_path / "tcp_allowed_congestion_control").write_text("cubic reno\n")
    check_control("reno", by_users=True, sysctls=tmp_path)
    with pytest.raises(LabError, match=r"cannot use the congestion control nonesuch.* is cubic reno"):
        check_control("nonesuch", by_users=False, sysctls=tmp_path)


# Two pairs of namespaces; in the second one each packet meets 2,000 rules.
_TWO_PLACES = """
import json, os, subprocess
from pathlib import Path
from gpucr_hpc.lab.network_path import compare
def run(*argv, **more):
    subprocess.run(argv, check=True, text=True, **more)
def place(number):
    ends = [f"{end}{number}" for end in "ab"]
    for end in ends:
        run("ip", "netns", "add", end)
    run("ip", "-n", ends[0], *"link add eth0 type veth peer name eth0 netns".split(), ends[1])
    for host, end in enumerate(ends, start=1):
        run("ip", "-n", end, "addr", "add", f"192.0.2.{host}/24", "dev", "eth0")
        run("ip", "-n", end, "link", "set", "eth0", "up")
    return [Path("/run/netns", end) for end in ends]
places = {"outside": place(1), "inside": place(2)}
rules = "ip ttl 1 drop; " * 2000
chain = f"table ip t {{ chain c {{ type filter hook input priority 0; {rules} }}; }}"
run("ip", "netns", "exec", "a2", "nft", "-f", "-", input=chain)
before = os.stat("/proc/self/ns/net").st_ino
print(json.dumps(compare(places, 20, 1398, "reno")))
assert os.stat("/proc/self/ns/net").st_ino == before
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip (network namespaces)")
def test_one_thread_tells_which_way_is_dearer() -> None:
    """And where: in the sender's calls, in which the receiving end's rules are met."""
    own_run = 'mount -t tmpfs tmpfs /run && mkdir /run/netns && exec "$@"'
    argv = ["unshare", "--net", "--mount", "sh", "-c", own_run, "sh", sys.executable, "-c", _TWO_PLACES]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["inside_sending_ns"] > 1.5 * found["outside_sending_ns"] > 0
    assert len(found["outside_receiving_ns_of_pairs"]) == len(found["inside_receiving_ns_of_pairs"]) > 1
