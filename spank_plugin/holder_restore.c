/* SPDX-License-Identifier: Apache-2.0 */
/* The holder of a restored capsule: runs CRIU as its own child, so that what CRIU leaves without a parent comes to the
 * holder, joins the namespaces that CRIU made for the tree, and sends the old holder away. That one came back under another
 * number (the agent gives CRIU a changed image), so that orphans of the job have the same parent as before. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "capsule.h"
#include "util.h"
#include "wire.h"

#define TAIL 4000 /* of CRIU's own output; its log file has the rest */

static int refuse(int control, const char *step, int err)
{
	struct msg m;

	msg_init(&m, GC_FAILED);
	msg_int(&m, "ERRNO", err);
	msg_fmt(&m, "MSG", "%s%s%s", step, err ? ": " : "", err ? strerror(err) : "");
	msg_send(&m, control, NULL, 0);
	return -1;
}

static void exec_criu(const struct capsule_args *a, const struct frame *f, int out)
{
	char **argv = frame_vector(f, "ARG"), **env = frame_vector(f, "ENV");

	if (dup2(out, 1) < 0 || dup2(out, 2) < 0 || !argv || !env || !argv[0])
		_exit(126);
	if (become_criu(a->uid, a->gid, a->groups, a->ngroups) < 0) {
		say("could not take CRIU's identity: %s", strerror(errno));
		_exit(126);
	}
	reset_signals();
	execvpe(argv[0], argv, env);
	say("could not run %s: %s", argv[0], strerror(errno));
	_exit(127);
}

/* Keep the last TAIL bytes of what comes through fd; false at its end. */
static bool keep_tail(int fd, char *tail, size_t *have)
{
	char chunk[4096];
	ssize_t n = read(fd, chunk, sizeof(chunk));

	if (n < 0)
		return errno == EAGAIN || errno == EINTR;
	if (n == 0)
		return false;
	const char *from = n > TAIL ? chunk + (n - TAIL) : chunk;
	size_t add = n > TAIL ? TAIL : (size_t)n, keep = *have + add > TAIL ? TAIL - add : *have;
	memmove(tail, tail + (*have - keep), keep);
	memcpy(tail + keep, from, add);
	*have = keep + add;
	return true;
}

static int run_criu(const struct capsule_args *a, const struct frame *f, int *status, char *tail)
{
	int out[2];
	bool open = true, ended = false;
	size_t have = 0;
	pid_t pid;

	if (pipe2(out, O_CLOEXEC) < 0)
		return refuse(a->control, "pipe", errno);
	fcntl(out[0], F_SETFL, O_NONBLOCK);
	pid = fork();
	if (pid < 0)
		return refuse(a->control, "fork", errno);
	if (pid == 0)
		exec_criu(a, f, out[1]);
	close(out[1]);
	/* CRIU's end counts, not the pipe's: a helper may hold it longer. */
	while (!ended) {
		struct pollfd p = { .fd = open ? out[0] : -1, .events = POLLIN };
		pid_t r;

		if (open && poll(&p, 1, 10) > 0)
			open = keep_tail(out[0], tail, &have);
		r = waitpid(pid, status, open ? WNOHANG : 0);
		ended = r == pid || (r < 0 && errno != EINTR);
	}
	for (int i = 0; open && i < 64; i++) { /* a full pipe is 16 chunks */
		struct pollfd p = { .fd = out[0], .events = POLLIN };

		if (poll(&p, 1, 0) <= 0 || !keep_tail(out[0], tail, &have))
			break;
	}
	close(out[0]);
	tail[have] = '\0';
	return 0;
}

/* CRIU makes new IPC, UTS and time namespaces for the tree; its root must be in them, or the next dump says "Can't dump
 * nested ipc namespace". */
static int join_namespaces(pid_t old, const char **step)
{
	static const char *const names[] = { "ipc", "uts", "time" };

	for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
		char path[64], own[64];
		struct stat theirs, ours;
		int fd, r;

		*step = names[i];
		snprintf(path, sizeof(path), "/proc/%d/ns/%s", old, names[i]);
		snprintf(own, sizeof(own), "/proc/self/ns/%s", names[i]);
		fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd < 0) {
			if (errno == ENOENT && stat(own, &ours) < 0)
				continue; /* a kernel without time namespaces */
			return -1;
		}
		r = fstat(fd, &theirs);
		if (r == 0)
			r = stat(own, &ours);
		if (r == 0 && theirs.st_ino != ours.st_ino)
			r = setns(fd, 0);
		int saved = errno;
		close(fd);
		errno = saved;
		if (r < 0)
			return -1;
	}
	return 0;
}

/* Its children, the shepherd and orphans, come to us, the next subreaper above. */
static int dismiss(pid_t old)
{
	int status;

	if (kill(old, SIGKILL) < 0)
		return -1;
	for (int i = 0; i < 5000; i++) {
		pid_t r = waitpid(old, &status, WNOHANG);

		if (r == old)
			return 0;
		if (r < 0 && kill(old, 0) < 0)
			return 0;
		usleep(1000);
	}
	errno = ETIMEDOUT;
	return -1;
}

int holder_restore(const struct capsule_args *a, pid_t *shepherd)
{
	char tail[TAIL + 1];
	const char *step = "";
	struct frame f;
	struct rx rx;
	struct msg m;
	int status = 0;
	pid_t old;

	rx_init(&rx, a->control);
	if (rx_wait(&rx, &f, -1) != 1)
		return -1; /* the agent gave up: the capsule ends with us */
	old = (pid_t)frame_int(&f, "OLD", 0);
	*shepherd = (pid_t)frame_int(&f, "SHEPHERD", 0);
	if (f.type != GC_RESTORE || old <= 1 || !frame_count(&f, "ARG"))
		return refuse(a->control, "RESTORE with OLD and ARG was expected", 0);
	if (run_criu(a, &f, &status, tail) < 0)
		return -1;
	frame_clear(&f);
	msg_init(&m, GC_RESULT);
	msg_int(&m, "STATUS", status);
	msg_str(&m, "MSG", tail);
	/* Once CRIU has succeeded the job runs: it stays, whether an agent is there to hear of it or not. */
	msg_send(&m, a->control, NULL, 0);
	if (status != 0)
		return -1;
	if (join_namespaces(old, &step) < 0)
		return refuse(a->control, step, errno);
	if (dismiss(old) < 0)
		return refuse(a->control, "end the old holder", errno);
	if (become_user(a->uid, a->gid, a->groups, a->ngroups) < 0)
		return refuse(a->control, "become the user", errno);
	msg_init(&m, GC_ADOPTED);
	msg_int(&m, "ROOT", getpid());
	msg_send(&m, a->control, NULL, 0);
	return 0;
}
