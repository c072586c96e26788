"""CRIU's command line and its errors in words."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpucr_hpc.config import EngineConfig
from gpucr_hpc.engine import criu
from gpucr_hpc.errors import CriuUnusable

NOISE = """(00.001375) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
(00.001382) Running pre-dump scripts
"""
# Messages of CRIU 4.2.1, and a word of the sentence that a user shall read.
SNIPPETS = [
    ("files-ext.c:94", "Can't dump file 5 of that type [20666] (chr 195:255 /dev/nvidiactl)", "open file of a kind"),
    ("proc_parse.c:118", "handle_device_vma plugin failed: No such file or directory", "memory of a device"),
    ("proc_parse.c:663", "Can't handle non-regular mapping on 71's map 7f00", "memory of a device"),
    ("proc_parse.c:502", "Unknown shit 600 (anon_inode:[io_uring])", "io_uring"),
    ("sk-inet.c:185", "sk: In-flight connection (l) for 1b2c", "just being made"),
    ("sk-unix.c:501", "unix: Non-empty write queue on an in-flight socket 0x3c2", "waits for a server to accept"),
    ("sk-inet.c:416", "inet: Can't dump corked dgram socket 3ca7e1d", "holds a datagram back"),
    ("cr-dump.c:1390", "Can't dump the 7 thread with a pending SIGTRAP.", "blocks a SIGTRAP"),
    ("net.c:3822", "Unable to dump a socket from an external network namespace", "made outside the job"),
    ("sk-unix.c:874", "sk unix: External socket is used. Consider using --ext-unix-sk", "service outside the job"),
    ("sk-unix.c:880", "sk unix: Can't dump half of stream unix connection.", "service outside the job"),
    ("files-reg.c:1031", "Can't dump ghost file /x of 2097152 size, increase limit", "ghost_limit_bytes"),
    ("files-reg.c:2175", "File /shared/a.out has bad size 70 (expect 60)", "changed after the checkpoint"),
    ("files-reg.c:2294", "File /shared/a.out has bad mode 0100600 (expect 0100644)", "permissions"),
    ("files-reg.c:2353", "Can't open file shared/x on restore: No such file or directory", "not on this node"),
    ("namespaces.c:460", "Can't dump nested ipc namespace for 71", "namespaces of its own"),
    ("infect.c:262", "Unseizable non-zombie 71 found, state S, err -1/1", "debugger or tracer"),
    ("cr-dump.c:1655", "Timeout reached. Try to interrupt: 0", "did not stop in time"),
    ("cpu.c:223", "cpu: CPU instruction capabilities do not match run time", "processor lacks instructions"),
    ("cpu.c:297", "cpu: fpu: xsave size mismatch (2696 > 832)", "processor lacks register state"),
    ("soccr.c:499", "Can't bind inet socket back: Cannot assign requested address", "address of a socket"),
    ("cr-restore.c:1237", "Can't fork for 71: File exists", "process number was taken"),
    ("sk-inet.c:137", "Unsupported proto 262 for socket 1b2c", "multipathtcp=0"),
    ("img-streamer.c:75", "Unable to connect to image streamer socket: Connection refused", "stream of the image"),
]


@pytest.mark.parametrize(("place", "message", "word"), SNIPPETS, ids=[s[0] for s in SNIPPETS])
def test_error_in_words(place, message, word):
    """The meaning first, then CRIU's own words without their prefix; the noise before them is passed over."""
    text = criu.explain(
        f"{NOISE}(00.012345) Error (criu/{place}): {message}\n(00.02) Error (criu/cr-dump.c:1): failed\n"
    )
    meaning, dash, own = text.partition(" — ")
    assert " — " == dash, text
    assert word in text
    assert message == own
    assert word in meaning or word in message


def test_unknown_error_is_shown_as_it_is():
    assert "Something new" == criu.explain(f"{NOISE}(00.1) Error (criu/new.c:7): Something new\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "CRIU ended without a word"), ("\n \n", "CRIU ended without a word"), ("a\nlast line\n", "last line")],
)
def test_no_error_line(text, said):
    assert said == criu.explain(text)


def test_log_that_is_not_there(tmp_path):
    assert "CRIU wrote no log" == criu.explain_file(tmp_path / "none")
    (tmp_path / "log").write_bytes(b"(0.1) Error (criu/x.c:1): \xff odd\n")
    assert criu.explain_file(tmp_path / "log").endswith("odd")


def test_command_lines_agree():
    """What must be equal at a dump and a restore is; the tree runs on after a dump unless we end it."""
    config = EngineConfig(criu="/usr/sbin/criu", ghost_limit_bytes=5, freeze_timeout_s=7)
    dump = criu.dump_argv(config, 2, Path("/i"), Path("/w"))
    restore = criu.restore_argv(config, Path("/i"), Path("/w"))
    for argv in (dump, restore):
        assert {"--no-default-config", "--stream", "--tcp-established", "--file-locks"} <= set(argv)
        assert ("/i", "/w", "5") == tuple(argv[argv.index(o) + 1] for o in ("-D", "-W", "--ghost-limit"))
        assert "skip" == argv[argv.index("--network-lock") + 1], "the network is locked by us"
    assert ("2", "7", criu.HOOK_PROGRAM) == tuple(
        dump[dump.index(o) + 1] for o in ("-t", "--timeout", "--action-script")
    )
    assert {"--leave-running", "--link-remap"} <= set(dump)


def test_plugins_come_from_a_folder_of_ours():
    """No plugin of the site joins in; a restore has none."""
    config, work = EngineConfig(), Path("/w")
    dump = criu.dump_argv(config, 2, Path("/i"), work)
    with_plugin = criu.dump_argv(config, 2, Path("/i"), work, work / "plugins")
    restore = criu.restore_argv(config, Path("/i"), work)
    found = [argv[argv.index("--libdir") + 1] for argv in (dump, with_plugin, restore)]
    assert found == ["/w/libdir", "/w/plugins", "/w/libdir"]


def fake(directory: Path, version: str, status: int = 0) -> EngineConfig:
    path = directory / "criu"
    lines = ["#!/bin/sh", f'[ "$1" = --version ] && {{ echo "Version: {version}"; exit 0; }}', "echo 'Error (x): no'"]
    path.write_text("\n".join([*lines, f"exit {status}\n"]))
    path.chmod(0o755)
    return EngineConfig(criu=str(path))


def test_version_and_features(tmp_path):
    assert ((4, 2, 1), (4, 3, 0)) == tuple(
        asyncio.run(criu.inspect(fake(tmp_path, version))).version for version in ("4.2.1", "4.3")
    )


@pytest.mark.parametrize(
    ("version", "status", "reason"),
    [("4.1.1", 0, "version 4.1.1 is too old, 4.2.1 is"), ("none", 0, "no version in the output"), ("4.3", 1, "no")],
)
def test_criu_that_cannot_be_used(tmp_path, version, status, reason):
    with pytest.raises(CriuUnusable, match=reason):
        asyncio.run(criu.inspect(fake(tmp_path, version, status)))


def test_no_criu(tmp_path):
    with pytest.raises(CriuUnusable, match="is not installed"):
        asyncio.run(criu.inspect(EngineConfig(criu=str(tmp_path / "none"))))
