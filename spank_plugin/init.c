/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `gpucr-init capsule`: an outer process makes the namespaces and is gone at once; its child is PID 1 of the capsule. PID 1
 * is root, mounts, starts the holder, reaps, and is never dumped: each restore gets a new one. When it dies the kernel
 * kills everything inside, and that is how a capsule is ended.
 */
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
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "capsule.h"
#include "util.h"
#include "wire.h"

#define HOLDER_ARGS 128

static void fail(const struct capsule_args *a, const char *step, int err) __attribute__((noreturn));
static void fail(const struct capsule_args *a, const char *step, int err)
{
	struct msg m;

	msg_init(&m, GC_FAILED);
	msg_int(&m, "ERRNO", err);
	msg_fmt(&m, "MSG", "could not set up the capsule: %s%s%s", step, err ? ": " : "", err ? strerror(err) : "");
	msg_send(&m, a->control, NULL, 0);
	say("could not set up the capsule: %s%s%s", step, err ? ": " : "", err ? strerror(err) : "");
	_exit(1);
}

/* Tasks take limits up to these; the job's own come with SPAWN. Hosts that withhold CAP_SYS_RESOURCE say no: then the
 * agent's limits are the ceiling. */
static void raise_hard_limits(void)
{
	for (int i = 0; i < RLIM_NLIMITS; i++) {
		struct rlimit r;

		if (getrlimit(i, &r) < 0)
			continue;
		r.rlim_max = RLIM_INFINITY;
		setrlimit(i, &r); /* NOFILE refuses infinity and keeps its own */
	}
}

/* The holder is a program of its own, started after the mounts: a mere fork would keep the executable mapped from the old
 * mount namespace, which CRIU cannot find. */
static void exec_holder(const struct capsule_args *a, int self, int sync, char **argv)
{
	char *args[HOLDER_ARGS], number[16], *none[] = { NULL };
	int n = 0;

	snprintf(number, sizeof(number), "%d", sync);
	args[n++] = "gpucr-init";
	args[n++] = "holder";
	args[n++] = "--sync";
	args[n++] = number;
	for (; *argv && n < HOLDER_ARGS - 1; argv++)
		args[n++] = *argv;
	args[n] = NULL;
	set_cloexec(sync, false);
	set_cloexec(a->control, false);
	execveat(self, "", args, none, AT_EMPTY_PATH);
	sync_failed(sync, "start the holder", errno);
	_exit(1);
}

static void next_pid_after(const struct capsule_args *a, long long last)
{
	char text[32];

	snprintf(text, sizeof(text), "%lld", last);
	if (write_file("/proc/sys/kernel/ns_last_pid", text) < 0)
		fail(a, "set ns_last_pid", errno);
}

static void send_ready(const struct capsule_args *a, pid_t host_pid, int sync)
{
	char text[512];
	size_t n = 0;
	ssize_t r;
	int holder, shepherd;
	struct msg m;

	while (n < sizeof(text) - 1 && (r = read(sync, text + n, sizeof(text) - 1 - n)) != 0) {
		if (r < 0 && errno != EINTR)
			break;
		n += r > 0 ? (size_t)r : 0;
	}
	text[n] = '\0';
	close(sync);
	if (sscanf(text, "R %d %d", &holder, &shepherd) != 2)
		fail(a, n > 2 ? text + 2 : "the holder died", 0);
	msg_init(&m, GC_READY);
	msg_int(&m, "PID", host_pid);
	msg_int(&m, "ROOT", holder);
	msg_int(&m, "SHEPHERD", shepherd);
	if (msg_send(&m, a->control, NULL, 0) < 0)
		_exit(1); /* nobody wants this capsule */
}

static void pid_one(struct capsule_args *a, int host_pid_pipe, const char *exe, char **argv)
{
	const char *step = "";
	int self, sync[2], status;
	pid_t holder, host_pid, pid;

	if (read(host_pid_pipe, &host_pid, sizeof(host_pid)) != sizeof(host_pid))
		_exit(1);
	close(host_pid_pipe);
	self = open(exe, O_PATH | O_CLOEXEC); /* in this mount namespace, before /tmp is covered */
	if (self < 0)
		fail(a, exe, errno);
	if (capsule_mounts(a, &step) < 0)
		fail(a, step, errno);
	if (*a->hostname && sethostname(a->hostname, strlen(a->hostname)) < 0)
		fail(a, "set the host name", errno);
	if (null_stdio() < 0)
		fail(a, "open /dev/null", errno);
	/* Put the two that stay next to each other, and close what the agent let through. */
	int lo = self < a->control ? self : a->control, hi = self < a->control ? a->control : self;
	if (lo > 3)
		close_range(3, (unsigned)lo - 1, 0);
	if (hi > lo + 1)
		close_range((unsigned)lo + 1, (unsigned)hi - 1, 0);
	close_range((unsigned)hi + 1, UINT_MAX, 0);
	clearenv();
	reset_signals();
	umask(022);
	raise_hard_limits();
	if (chdir("/") < 0)
		fail(a, "chdir /", errno);
	if (a->restore)
		next_pid_after(a, a->holder_pid ? a->holder_pid - 1 : a->last_pid);
	if (pipe2(sync, O_CLOEXEC) < 0)
		fail(a, "pipe", errno);
	holder = fork();
	if (holder < 0)
		fail(a, "fork", errno);
	if (holder == 0) {
		close(sync[0]);
		exec_holder(a, self, sync[1], argv);
	}
	if (a->restore && a->holder_pid) {
		if (holder != a->holder_pid)
			fail(a, "the holder's number is taken", 0);
		next_pid_after(a, a->last_pid); /* above all that come back; the holder starts nothing before READY */
	}
	close(self);
	close(sync[1]);
	send_ready(a, host_pid, sync[0]);
	/* The control socket stays open here: its end tells a living agent that the capsule is gone. */
	for (;;) {
		pid = waitpid(-1, &status, 0);
		if (pid == holder || (pid < 0 && errno != EINTR))
			_exit(DIED_WITH_CAPSULE);
	}
}

static void wait_for_cgroup(const struct capsule_args *a)
{
	struct frame f;
	struct rx rx;

	rx_init(&rx, a->control);
	if (rx_wait(&rx, &f, -1) != 1 || f.type != GC_OK)
		fail(a, "wait for the agent's OK", 0);
	frame_clear(&f);
}

int capsule_main(const struct capsule_args *given, char **argv)
{
	struct capsule_args a = *given;
	char exe[PATH_MAX];
	ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
	int pid_pipe[2];
	pid_t child;

	if (n < 0)
		fail(&a, "read /proc/self/exe", errno);
	exe[n] = '\0';
	set_cloexec(a.control, true);
	setsid(); /* refused for a group leader, which then has a group of its own already */
	write_file("/proc/self/oom_score_adj", "0"); /* the agent's protection is not for the job */
	if (a.cgroup_wait)
		wait_for_cgroup(&a);
	if (a.netns >= 0 && setns(a.netns, CLONE_NEWNET) < 0)
		fail(&a, "enter the network namespace", errno);
	if (unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID) < 0)
		fail(&a, "make namespaces", errno);
	if (pipe2(pid_pipe, O_CLOEXEC) < 0)
		fail(&a, "pipe", errno);
	child = fork();
	if (child < 0)
		fail(&a, "fork", errno);
	if (child == 0) {
		close(pid_pipe[1]);
		pid_one(&a, pid_pipe[0], exe, argv);
	}
	/* Only out here is the pid known by which the agent can see PID 1. */
	if (write(pid_pipe[1], &child, sizeof(child)) != sizeof(child))
		fail(&a, "tell init its pid", errno);
	return 0;
}
