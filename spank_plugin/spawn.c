/* SPDX-License-Identifier: Apache-2.0 */
/* From a SPAWN frame to a process that waits for GO and then becomes the task. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "shepherd.h"
#include "util.h"

#define CPUS 8192

struct pipes {
	int in[2], out[2], err[2], pmi[2], go[2], error[2];
};

static void close_pipes(struct pipes *p)
{
	int *all = (int *)p;

	for (size_t i = 0; i < sizeof(*p) / sizeof(int); i++)
		if (all[i] >= 0)
			close(all[i]);
}

static bool same_file(int a, int b)
{
	struct stat x, y;

	return fstat(a, &x) == 0 && fstat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static bool is_regular(int fd)
{
	struct stat st;

	return fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
}

/* Input that is nothing: the task gets /dev/null of its own. A terminal counts as nothing for a batch script, which
 * never has one, but not for a step. */
static bool is_nothing(int fd, bool net)
{
	struct stat st;

	return fstat(fd, &st) < 0 || (S_ISCHR(st.st_mode) && (!net || st.st_rdev == makedev(1, 3)));
}

/* --- in the child --- */

struct report {
	int err;
	char what[128];
};

static void fail_child(int fd, const char *what) __attribute__((noreturn));
static void fail_child(int fd, const char *what)
{
	struct report r = { .err = errno };

	snprintf(r.what, sizeof(r.what), "%s", what);
	write_all(fd, &r, sizeof(r));
	_exit(127);
}

static void set_affinity(const char *list)
{
	static cpu_set_t set[CPUS / CPU_SETSIZE];

	CPU_ZERO_S(sizeof(set), set);
	while (list && *list) {
		char *end;
		unsigned long from = strtoul(list, &end, 10), to = from;

		if (end == list)
			return;
		if (*end == '-') {
			list = end + 1;
			to = strtoul(list, &end, 10);
			if (end == list)
				return;
		}
		for (; from <= to && from < CPUS; from++)
			CPU_SET_S(from, sizeof(set), set);
		list = *end == ',' ? end + 1 : end;
		if (*end && *end != ',')
			return;
	}
	if (CPU_COUNT_S(sizeof(set), set))
		sched_setaffinity(0, sizeof(set), set); /* other CPUs than before a move: the cgroup's stay */
}

static void set_limits(const struct frame *f)
{
	size_t pos = 0;
	const char *v;

	while ((v = frame_next(f, "RLIMIT", &pos))) {
		unsigned long long soft, hard;
		struct rlimit r;
		int n;

		if (sscanf(v, "%d:%llu:%llu", &n, &soft, &hard) != 3)
			continue;
		r.rlim_cur = soft;
		r.rlim_max = hard;
		if (setrlimit(n, &r) < 0 && errno == EPERM && getrlimit(n, &r) == 0) {
			/* our own ceiling is lower: as near as possible */
			r.rlim_cur = soft < r.rlim_max ? soft : r.rlim_max;
			setrlimit(n, &r);
		}
	}
}

static void child(const struct frame *f, struct pipes *p) __attribute__((noreturn));
static void child(const struct frame *f, struct pipes *p)
{
	char **argv = frame_vector(f, "ARG"), **env = frame_vector(f, "ENV"), c;
	const char *cwd = frame_get(f, "CWD"), *mask = frame_get(f, "UMASK"), *pmi_fd = NULL;
	int report, go, first = 64, pmi = -1;
	size_t pos = 0;
	ssize_t n;

	reset_signals();
	setsid();
	for (const char *v; (v = frame_next(f, "ENV", &pos));)
		if (!strncmp(v, "PMI_FD=", 7))
			pmi_fd = v + 7;
	if (p->pmi[1] >= 0 && pmi_fd) {
		pmi = atoi(pmi_fd);
		if (pmi < 3)
			_exit(127);
		first = pmi + 1 > first ? pmi + 1 : first;
	}
	/* Out of the way of the numbers that the task gets. */
	report = fcntl(p->error[1], F_DUPFD_CLOEXEC, first);
	go = fcntl(p->go[0], F_DUPFD_CLOEXEC, first);
	if (report < 0)
		fail_child(p->error[1], "dup");
	if (go < 0)
		fail_child(report, "dup");
	if (p->in[0] >= 0 ? dup2(p->in[0], 0) < 0 : (close(0), open("/dev/null", O_RDONLY) != 0))
		fail_child(report, "standard input");
	if (dup2(p->out[1], 1) < 0 || dup2(p->err[1] >= 0 ? p->err[1] : p->out[1], 2) < 0)
		fail_child(report, "standard output");
	/* After stdio: the number may be that of one of our pipe ends, or already right (then dup2() changes no flag). */
	if (pmi >= 0) {
		if (dup2(p->pmi[1], pmi) < 0)
			fail_child(report, "PMI_FD");
		set_cloexec(pmi, false);
	}
	/* Above all the writing end of our own go pipe: its end means that the shepherd gave us up. */
	if (p->go[1] != pmi) /* else it is replaced already */
		close(p->go[1]);
	for (int fd = 3; fd < first; fd++)
		if (fd != pmi)
			close(fd);
	close_range((unsigned)(report > go ? report : go) + 1, UINT_MAX, 0);
	do
		n = read(go, &c, 1);
	while (n < 0 && errno == EINTR);
	if (n != 1)
		_exit(127);
	if (mask)
		umask((mode_t)strtoul(mask, NULL, 8) & 0777);
	if (cwd && chdir(cwd) < 0) {
		say("could not chdir to %s: %s; /tmp is used", cwd, strerror(errno));
		if (chdir("/tmp") < 0)
			fail_child(report, "chdir to /tmp");
	}
	errno = 0;
	setpriority(PRIO_PROCESS, 0, (int)frame_int(f, "NICE", 0)); /* lower than ours is refused; no matter */
	set_affinity(frame_get(f, "AFFINITY"));
	set_limits(f);
	environ = env; /* its PATH is the one to look in, and not ours */
	execvp(argv[0], argv);
	fail_child(report, argv[0]);
}

/* --- in the shepherd --- */

static int make_pipes(struct pipes *p, struct task *t, bool stdin_pipe, bool pmi)
{
	if (stdin_pipe && pipe2(p->in, O_CLOEXEC) < 0)
		return -1;
	if (pipe2(p->out, O_CLOEXEC) < 0 || (!t->merged && pipe2(p->err, O_CLOEXEC) < 0))
		return -1;
	if (pmi && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, p->pmi) < 0)
		return -1;
	return pipe2(p->go, O_CLOEXEC) < 0 ? -1 : pipe2(p->error, O_CLOEXEC);
}

static int keep(int *fd)
{
	int own = *fd;

	*fd = -1;
	if (own >= 0)
		fcntl(own, F_SETFL, O_NONBLOCK); /* our ends only: the task has descriptions of its own */
	return own;
}

static void use(struct task *t, int c, int src, int dst, bool net)
{
	t->chan[c].used = true;
	t->chan[c].net = net;
	t->chan[c].src = src;
	t->chan[c].dst = dst;
}

static pid_t fork_child(const struct frame *f, struct pipes *p)
{
	sigset_t all, mask;
	pid_t pid;

	/* The shepherd ignores most signals. Blocked ones are kept all the same, so that one that is sent to the child
	 * right after SPAWNED meets the default action. */
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, &mask);
	pid = fork();
	if (pid == 0)
		child(f, p);
	sigprocmask(SIG_SETMASK, &mask, NULL);
	return pid;
}

/* Connection and pipes, then the fork; 0, or an errno. */
static int begin(struct task *t, const struct frame *f, int fds[4], struct pipes *p, int *net, const char **what)
{
	const char *where = frame_get(f, "STDIO");

	*what = "reach the step's srun";
	if (where) {
		*net = net_connect(where, frame_get(f, "TOKEN"), frame_int(f, "RANK", 0));
		if (*net < 0)
			return errno;
	}
	t->merged = same_file(fds[1], fds[2]) && (!where || is_regular(fds[1]));
	*what = "pipe";
	if (make_pipes(p, t, !is_nothing(fds[0], where != NULL), fds[3] >= 0) < 0)
		return errno;
	*what = "fork";
	t->pid = fork_child(f, p);
	return t->pid < 0 ? errno : 0;
}

int spawn_task(struct task *t, const struct frame *f, int fds[4], const char **what)
{
	struct pipes p;
	int net = -1, err;

	memset(&p, 0xff, sizeof(p));
	t->go = t->error = -1;
	err = begin(t, f, fds, &p, &net, what);
	if (err) {
		close_pipes(&p);
		if (net >= 0)
			close(net);
		for (int i = 0; i < 4; i++)
			if (fds[i] >= 0)
				close(fds[i]);
		return err;
	}
	if (p.in[1] >= 0)
		use(t, C_IN, -1, keep(&p.in[1]), net >= 0 && !is_regular(fds[0]));
	use(t, C_OUT, keep(&p.out[0]), -1, net >= 0 && !is_regular(fds[1]));
	if (p.err[0] >= 0)
		use(t, C_ERR, keep(&p.err[0]), -1, net >= 0 && !is_regular(fds[2]));
	if (net >= 0)
		net_open(&t->net, net, t->memory + C_COUNT * RELAY_BYTES);
	if (p.pmi[0] >= 0)
		pmi_open(&t->pmi, keep(&p.pmi[0]), (char *)t->memory + (C_COUNT + 2) * RELAY_BYTES);
	t->go = keep(&p.go[1]);
	t->error = keep(&p.error[0]);
	close_pipes(&p);
	relay_attach(t, fds);
	pmi_attach(&t->pmi, fds[3], false);
	return 0;
}

int spawn_result(struct task *t, char *what, size_t size)
{
	struct report r;
	ssize_t n = read(t->error, &r, sizeof(r));

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return 1;
	close(t->error);
	t->error = -1;
	if (n != sizeof(r))
		return 0; /* closed by exec, or the child was killed: then its status tells */
	r.what[sizeof(r.what) - 1] = '\0';
	snprintf(what, size, "could not run %s: %s", r.what, strerror(r.err));
	errno = r.err;
	return -1;
}
