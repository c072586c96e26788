"""What cgroup hierarchies a box has to mount again, read from /proc/self/mountinfo."""

from __future__ import annotations

from pathlib import Path

from gpucr_hpc.lab.box import Hierarchy, hierarchies

CONTROLLERS = {"cpu", "cpuacct", "freezer", "memory"}


def lines(*mounts: str) -> str:
    return "".join(f"{number} 1 0:{number} / {mount}\n" for number, mount in enumerate(mounts, 20))


def test_version_1_and_hybrid():
    """Controllers mounted together, a name without controllers, version 2 beside them; other mount options are left."""
    text = lines(
        "/ rw - ext4 /dev/vda1 rw",
        "/sys/fs/cgroup rw shared:9 - tmpfs tmpfs rw,mode=755",
        "/sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:10 master:2 - cgroup cgroup rw,cpu,cpuacct",
        "/sys/fs/cgroup/freezer rw - cgroup cgroup rw,xattr,freezer,release_agent=/x",
        "/sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd",
        "/sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate",
        "/elsewhere rw - cgroup cgroup rw,memory",
    )
    below = Path("/sys/fs/cgroup")
    assert [
        Hierarchy(below / "cpu,cpuacct", "cgroup", "cpu,cpuacct"),
        Hierarchy(below / "freezer", "cgroup", "freezer"),
        Hierarchy(below / "systemd", "cgroup", "none,name=systemd"),
        Hierarchy(below / "unified", "cgroup2", ""),
    ] == hierarchies(text, CONTROLLERS)


def test_version_2():
    text = lines("/sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot")
    assert [Hierarchy(Path("/sys/fs/cgroup"), "cgroup2", "")] == hierarchies(text, CONTROLLERS)


def test_none():
    assert hierarchies(lines("/ rw - ext4 /dev/vda1 rw"), CONTROLLERS) == []
