"""The programs of test_cases.py that are moved. Each gets a name of its own for files outside its directory, says
`ready`, waits for the file `go` and ends with `ok`. C programs end at the first wrong thing, with its line."""

C_HEAD = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#define MUST(x) do { if (!(x)) { printf("line %d: %s: %s\n", __LINE__, #x, strerror(errno)); exit(1); } } while (0)
static void ready(void) { printf("ready\n"); fflush(stdout); }
static void pause_ms(long ms) { struct timespec t = { ms / 1000, ms % 1000 * 1000000 }; nanosleep(&t, NULL); }
static void wait_file(const char *name) { while (access(name, F_OK)) pause_ms(50); }
"""

WHOLE: dict[str, tuple[str, str]] = {}

# Names that are no UTF-8: of an open file that grows, of the working directory, of what is mapped.
WHOLE["names"] = (
    "python",
    """
    import mmap, os, sys, time
    place = os.fsencode(sys.argv[1]) + b".caf\\xe9 \\xff"
    os.makedirs(place, exist_ok=True)
    top = os.getcwd()
    os.chdir(place)
    file = open(b"na\\xefve.txt", "wb", buffering=0)
    file.write(b"before ")
    held = open(b"m\\xe4p", "w+b")
    held.truncate(4096)
    memory = mmap.mmap(held.fileno(), 4096)
    memory[:4] = b"kept"
    print("ready", flush=True)
    while not os.path.exists(os.path.join(top, "go")):
        time.sleep(0.05)
    file.write(b"after")
    assert open(b"na\\xefve.txt", "rb").read() == b"before after", "lines once"
    assert memory[:4] == b"kept" and os.getcwdb().endswith(b".caf\\xe9 \\xff")
    print("ok")
    """,
)

# C4: an open deleted file larger than CRIU's own limit.
WHOLE["deleted"] = (
    "python",
    """
    import os, sys, time
    name = sys.argv[1] + ".deleted"
    file = open(name, "w+b")
    block = bytes(range(256)) * 32
    for _ in range(1100):
        file.write(block)
    file.flush()
    os.unlink(name)
    print("ready", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.05)
    file.write(b"more")
    file.seek(0)
    assert file.read() == block * 1100 + b"more" and os.fstat(file.fileno()).st_nlink == 0
    print("ok")
    """,
)

# C7: named shared memory, by name and by mapping.
WHOLE["named-memory"] = (
    "python",
    """
    import os, time
    from multiprocessing import resource_tracker, shared_memory
    block = shared_memory.SharedMemory(create=True, size=1 << 20)
    block.buf[:] = bytes(range(256)) * 4096
    print("ready", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.05)
    other = shared_memory.SharedMemory(name=block.name)
    assert bytes(other.buf) == bytes(range(256)) * 4096
    block.buf[0] = 9
    assert other.buf[0] == 9
    other.close(), block.close(), block.unlink()
    print("ok")
    """,
)

# C8: SysV shared memory, semaphores and messages.
WHOLE["sysv"] = (
    "c",
    C_HEAD
    + r"""
int main(void)
{
    struct { long type; char text[8]; } m = { 5, "letter" }, got;
    int shm = shmget(IPC_PRIVATE, 1 << 20, 0600), sem = semget(IPC_PRIVATE, 2, 0600), q = msgget(IPC_PRIVATE, 0600);
    unsigned char *p = shmat(shm, NULL, 0);

    MUST(p != (void *)-1 && sem >= 0 && q >= 0);
    for (int i = 0; i < 1 << 20; i++) p[i] = (unsigned char)(i * 7);
    MUST(semctl(sem, 1, SETVAL, 3) == 0 && msgsnd(q, &m, 8, 0) == 0);
    pid_t child = fork();
    if (!child) { wait_file("go"); for (;;) { if (p[0] == 99) _exit(0); pause_ms(10); } }
    ready();
    wait_file("go");
    for (int i = 0; i < 1 << 20; i++) MUST(p[i] == (unsigned char)(i * 7));
    MUST(semctl(sem, 1, GETVAL) == 3 && msgrcv(q, &got, 8, 5, 0) == 8 && !strcmp(got.text, "letter"));
    p[0] = 99;
    MUST(waitpid(child, NULL, 0) == child);
    shmctl(shm, IPC_RMID, NULL); semctl(sem, 0, IPC_RMID); msgctl(q, IPC_RMID, NULL);
    printf("ok\n");
}
""",
)

# C10: processes that share one unlinked file of /dev/shm and count in turn.
WHOLE["shared-unlinked"] = (
    "c",
    C_HEAD
    + r"""
int main(int argc, char **argv)
{
    char name[200];
    volatile long *p;

    snprintf(name, sizeof(name), "/dev/shm/%s", argv[1]);
    int fd = open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    MUST(argc > 1 && fd >= 0 && ftruncate(fd, 1 << 20) == 0);
    p = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    MUST(p != MAP_FAILED && unlink(name) == 0);
    for (int who = 0; who < 4; who++)
        if (!fork())
            for (;;) {
                while (p[0] % 4 != who && !p[1]) pause_ms(1);
                if (p[1]) _exit(0);
                p[2 + who]++;
                p[0]++;
            }
    while (p[0] < 40) pause_ms(1);
    ready();
    wait_file("go");
    long seen = p[0];
    while (p[0] < seen + 40) pause_ms(1);
    p[1] = 1;
    for (int i = 0; i < 4; i++) MUST(wait(NULL) > 0);
    long sum = p[2] + p[3] + p[4] + p[5];
    MUST(sum == p[0] && p[2] - p[5] <= 1 && p[2] - p[5] >= 0);
    printf("ok\n");
}
""",
)

# C17: terabytes reserved, little touched.
WHOLE["reservation"] = (
    "c",
    C_HEAD
    + r"""
int main(void)
{
    size_t size = 4UL << 40;
    char *a = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *b = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    MUST(a != MAP_FAILED && b != MAP_FAILED);
    for (size_t i = 0; i < 10; i++) a[i * (size / 10)] = (char)(i + 1);
    ready();
    wait_file("go");
    for (size_t i = 0; i < 10; i++) MUST(a[i * (size / 10)] == (char)(i + 1) && a[i * (size / 10) + 5000] == 0);
    MUST(mprotect(b, 4096, PROT_READ | PROT_WRITE) == 0);
    b[0] = 1;
    printf("ok\n");
}
""",
)

# Memory of every kind, parent and child that share what neither has changed, and pages that nobody has touched: each
# page says after the move what it said before.
WHOLE["memory-kinds"] = (
    "c",
    C_HEAD
    + r"""
enum { KINDS = 7, PAGE = 4096, PAGES = 1500 };

static unsigned long word(int kind, int who, long page)
{
    unsigned long x = kind * 1000003UL + page * 8191 + 1;

    if (who && page % 5 == 0) x += 77; /* the child has changed these */
    return page % 7 == 3 ? 0 : x * 6364136223846793005UL + page % 3;
}

static void fill(char *at, int kind, int who, long page)
{
    unsigned long *p = (unsigned long *)(at + page * PAGE);

    for (int i = 0; i < PAGE / 8; i++) p[i] = word(kind, who, page);
}

static void check(char **at, int who)
{
    for (int kind = 0; kind < KINDS; kind++)
        for (long page = 0; page < PAGES; page++) {
            unsigned long *p = (unsigned long *)(at[kind] + page * PAGE);
            int whose = kind >= 5 ? 0 : who; /* the last two are shared */

            MUST(p[0] == word(kind, whose, page) && p[300] == p[0] && p[511] == p[0]);
        }
}

int main(int argc, char **argv)
{
    size_t size = (size_t)PAGES * PAGE;
    char name[300], *at[KINDS], *untouched;
    int done[2];
    int anon = MAP_PRIVATE | MAP_ANONYMOUS, both = PROT_READ | PROT_WRITE;

    snprintf(name, sizeof(name), "/tmp/%s.kinds", argv[argc - 1]);
    int file = open(name, O_RDWR | O_CREAT, 0600), fd = memfd_create("kinds", 0);
    MUST(file >= 0 && fd >= 0 && ftruncate(file, size) == 0 && ftruncate(fd, size) == 0);
    for (int kind = 0; kind < 4; kind++) at[kind] = mmap(NULL, size, both, anon, -1, 0);
    at[4] = mmap(NULL, size, both, MAP_PRIVATE, file, 0);
    at[5] = mmap(NULL, size, both, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    at[6] = mmap(NULL, size, both, MAP_SHARED, fd, 0);
    untouched = mmap(NULL, size, both, anon, -1, 0);
    for (int kind = 0; kind < KINDS; kind++) MUST(at[kind] != MAP_FAILED);
    MUST(untouched != MAP_FAILED && mlock(at[1], 4 * PAGE) == 0);
    madvise(at[2], size, MADV_HUGEPAGE);
    for (int kind = 0; kind < KINDS; kind++)
        for (long page = 0; page < PAGES; page++) fill(at[kind], kind, 0, page);
    for (long page = 0; page < PAGES; page += 9) MUST(untouched[page * PAGE] == 0);
    MUST(pipe(done) == 0);
    pid_t child = fork();
    MUST(child >= 0);
    for (int kind = 0; !child && kind < 5; kind++)
        for (long page = 0; page < PAGES; page += 5) fill(at[kind], kind, 1, page);
    MUST(mprotect(at[3], size, PROT_NONE) == 0);
    if (!child) MUST(write(done[1], "x", 1) == 1);
    if (child) {
        MUST(read(done[0], name, 1) == 1);
        ready();
    }
    wait_file("go");
    MUST(mprotect(at[3], size, both) == 0);
    check(at, !child);
    for (long page = 0; page < PAGES; page += 4) MUST(untouched[page * PAGE] == 0);
    if (!child) exit(0);
    int status;
    MUST(waitpid(child, &status, 0) == child && status == 0);
    printf("ok\n");
}
""",
)

# C20: flock, POSIX and open file description locks, and a process that waits for one.
WHOLE["locks"] = (
    "c",
    C_HEAD
    + r"""
static int file(const char *base, const char *end)
{
    char name[300];

    snprintf(name, sizeof(name), "/tmp/%s.%s", base, end);
    return open(name, O_RDWR | O_CREAT, 0600);
}

int main(int argc, char **argv)
{
    struct flock whole = { .l_type = F_WRLCK }, test;
    const char *base = argv[argc - 1];
    int a = file(base, "flock"), b = file(base, "posix"), c = file(base, "ofd");

    MUST(a >= 0 && b >= 0 && c >= 0);
    MUST(flock(a, LOCK_EX) == 0 && fcntl(b, F_SETLK, &whole) == 0 && fcntl(c, F_OFD_SETLK, &whole) == 0);
    pid_t waiter = fork();
    if (!waiter) { int own = file(base, "flock"); MUST(flock(own, LOCK_EX) == 0); _exit(access("go", F_OK) ? 2 : 0); }
    pause_ms(300);
    ready();
    wait_file("go");
    pid_t tester = fork();
    if (!tester) {
        int fa = file(base, "flock"), fb = file(base, "posix"), fc = file(base, "ofd");
        MUST(flock(fa, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK);
        test = whole;
        MUST(fcntl(fb, F_GETLK, &test) == 0 && test.l_type == F_WRLCK && test.l_pid == getppid());
        test = whole;
        MUST(fcntl(fc, F_OFD_GETLK, &test) == 0 && test.l_type == F_WRLCK);
        _exit(0);
    }
    int status;
    MUST(waitpid(tester, &status, 0) == tester && status == 0);
    MUST(waitpid(waiter, &status, WNOHANG) == 0);
    flock(a, LOCK_UN);
    MUST(waitpid(waiter, &status, 0) == waiter && status == 0);
    printf("ok\n");
}
""",
)

# C23: zombies that nobody has reaped yet, and a stopped child.
WHOLE["zombies"] = (
    "c",
    C_HEAD
    + r"""
int main(void)
{
    pid_t dead[50], stopped;
    int status;

    for (int i = 0; i < 50; i++) if (!(dead[i] = fork())) { if (i % 2) kill(getpid(), SIGKILL); _exit(i); }
    if (!(stopped = fork())) { raise(SIGSTOP); _exit(77); }
    MUST(waitpid(stopped, &status, WUNTRACED) == stopped && WIFSTOPPED(status));
    siginfo_t si;
    for (int i = 0; i < 50; i++) MUST(waitid(P_PID, (id_t)dead[i], &si, WEXITED | WNOWAIT) == 0);
    ready();
    wait_file("go");
    for (int i = 0; i < 50; i++) {
        MUST(waitpid(dead[i], &status, 0) == dead[i]);
        MUST(status == (i % 2 ? SIGKILL : i << 8));
    }
    MUST(waitpid(stopped, &status, WNOHANG) == 0);
    kill(stopped, SIGCONT);
    MUST(waitpid(stopped, &status, 0) == stopped && WEXITSTATUS(status) == 77);
    printf("ok\n");
}
""",
)

# C28, C27: sessions of their own and a process whose number is taken on every node.
WHOLE["sessions"] = (
    "python",
    """
    import os, signal, subprocess, time
    loop = "import os, time; [time.sleep(0.05) for _ in iter(lambda: os.path.exists('go'), True)]"
    children = [subprocess.Popen(["python3", "-c", loop], start_new_session=True) for _ in range(3)]
    sessions = [os.getsid(child.pid) for child in children]
    print("ready", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.05)
    assert sessions == [child.pid for child in children]
    assert [child.wait() for child in children] == [0, 0, 0]
    print("ok")
    """,
)

# Timers, signals that wait, an eventfd, epoll, an inotify watch, a socket pair with bytes under way.
WHOLE["kernel-objects"] = (
    "python",
    """
    import ctypes, os, select, signal, socket, time
    libc = ctypes.CDLL(None, use_errno=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGALRM])
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    event = os.eventfd(3)
    left, right = socket.socketpair()
    left.sendall(b"under way")
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    client.sendall(b"by tcp")
    poll = select.epoll()
    poll.register(server, select.EPOLLIN, )
    print("ready", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.05)
    assert signal.sigwait([signal.SIGUSR1]) == signal.SIGUSR1
    assert signal.sigwait([signal.SIGALRM]) == signal.SIGALRM
    assert os.eventfd_read(event) == 3
    assert right.recv(100) == b"under way"
    assert poll.poll(5)[0][0] == server.fileno()
    assert server.recv(100) == b"by tcp"
    server.sendall(b"answer")
    assert client.recv(100) == b"answer"
    print("ok")
    """,
)

# Orphans have the same parent afterwards: one in the session of a living leader, one with a session of its own, one
# whose leader is gone. Each notes its parent where the first process sees it.
WHOLE["orphans"] = (
    "c",
    C_HEAD
    + r"""
static void orphan(volatile int *mine, int own)
{
    int parent = getpid();

    if (fork()) return;
    while (getppid() == parent) pause_ms(1);
    if (own) MUST(setsid() > 0);
    mine[1] = getppid();
    mine[0] = getppid();
    for (;;) { mine[1] = getppid(); pause_ms(20); }
}
int main(void)
{
    volatile int *seen = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    MUST(seen != MAP_FAILED);
    for (int kind = 0; kind < 3; kind++) {
        pid_t leader = fork();
        if (!leader) {
            MUST(setsid() > 0);
            if (kind) { orphan(seen + 2 * kind, kind == 1); _exit(0); }
            pid_t middle = fork();
            if (!middle) { orphan(seen, 0); _exit(0); }
            MUST(waitpid(middle, NULL, 0) == middle);
            for (;;) pause();
        }
        if (kind) MUST(waitpid(leader, NULL, 0) == leader);
    }
    for (int kind = 0; kind < 3; kind++) while (!seen[2 * kind]) pause_ms(5);
    ready();
    wait_file("go");
    pause_ms(500);
    for (int kind = 0; kind < 3; kind++) MUST(seen[2 * kind] == seen[2 * kind + 1]);
    printf("ok\n");
}
""",
)
