"""The programs of test_cases.py with what cannot be saved, and the reason that is said. As those of case_programs.py;
each lets go when the file `gone` is there, says so, and waits for `go`."""

from case_programs import C_HEAD

REFUSED: dict[str, tuple[str, str, str]] = {}

# C13: an idle io_uring ring.
REFUSED["io-uring"] = (
    "c",
    C_HEAD
    + r"""
int main(void)
{
    char params[120] = { 0 };
    int ring = (int)syscall(425, 4, params);

    MUST(ring >= 0);
    ready();
    wait_file("gone");
    close(ring);
    printf("let go\n");
    fflush(stdout);
    wait_file("go");
    printf("ok\n");
}
""",
    "io_uring ring",
)

# A mount namespace of its own; a user needs a user namespace for it, a set-user-id program such as Apptainer's none.
REFUSED["mounts"] = (
    "python",
    """
    import ctypes, os, subprocess, sys, time
    inner = "echo ready; until [ -e gone ]; do sleep 0.1; done"
    subprocess.run(["unshare", "--map-root-user", "--mount", "sh", "-c", inner], check=True)
    print("let go", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.05)
    print("ok")
    """,
    "has a mnt namespace of its own",
)

# C40: an open device node (any that a user may open and CRIU cannot save).
REFUSED["device"] = (
    "python",
    """
    import os, time
    tun = os.open("/dev/net/tun", os.O_RDWR)
    print("ready", flush=True)
    while not os.path.exists("gone"):
        time.sleep(0.05)
    os.close(tun)
    print("let go", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.05)
    print("ok")
    """,
    "/dev/net/tun",
)

# A child from before its parent's setsid, the parent an orphan: CRIU cannot make the two sessions again, and says so at
# the restore.
REFUSED["session"] = (
    "c",
    C_HEAD
    + r"""
int main(void)
{
    pid_t between = fork();

    if (!between) {
        if (fork()) _exit(0);
        pid_t before = fork();
        if (!before) { wait_file("gone"); _exit(0); }
        MUST(setsid() > 0);
        fclose(fopen("left", "w"));
        MUST(waitpid(before, NULL, 0) == before);
        fclose(fopen("reaped", "w"));
        for (;;) pause();
    }
    MUST(waitpid(between, NULL, 0) == between);
    wait_file("left");
    ready();
    wait_file("reaped");
    printf("let go\n");
    fflush(stdout);
    wait_file("go");
    printf("ok\n");
}
""",
    "is in a session that its parent has left",
)

# A POSIX message queue, which lives in a file system of the kernel's own.
REFUSED["message-queue"] = (
    "c",
    C_HEAD
    + r"""
#include <mqueue.h>
int main(void)
{
    mqd_t queue = mq_open("/gpucr-case", O_RDWR | O_CREAT, 0600, NULL);

    MUST(queue >= 0 && mq_unlink("/gpucr-case") == 0);
    ready();
    wait_file("gone");
    mq_close(queue);
    printf("let go\n");
    fflush(stdout);
    wait_file("go");
    printf("ok\n");
}
""",
    "is a POSIX message queue",
)
