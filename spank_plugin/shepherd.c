/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shepherd forks the job's tasks and owns their stdio. It runs as the user and is part of the image: after a restore it
 * simply goes on in poll(), with its listening socket bound again at the same path. So it uses only what CRIU can
 * dump: pipes, a signalfd, a listening Unix socket, no timers, and no connection while it is being dumped.
 */
#define _GNU_SOURCE
#include "shepherd.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "capsule.h"
#include "util.h"

#define FLUSH_MS 2000 /* a deaf reader may not hold up a dump; what stays unread goes into the image */

static struct task tasks[MAX_TASKS];
static unsigned char memory[MAX_TASKS][C_COUNT * RELAY_BYTES];
static struct conn conns[MAX_CONNS];
static int listener = -1, children = -1;

static void drop_conn(int c)
{
	rx_close(&conns[c].rx);
	for (struct task *t = tasks; t < tasks + MAX_TASKS; t++) {
		if (t->state == T_FREE || t->conn != c)
			continue;
		t->conn = -1; /* a running task goes on, with its outward descriptors */
		if (t->state == T_HELD)
			kill(t->pid, SIGKILL); /* nobody will say GO */
	}
}

static void answer(int c, struct msg *m)
{
	if (conns[c].rx.fd < 0) {
		free(m->buf);
		return;
	}
	if (msg_send(m, conns[c].rx.fd, NULL, 0) < 0)
		drop_conn(c);
}

static void failed(int c, const char *key, int err, const char *text)
{
	struct msg m;

	msg_init(&m, GC_FAILED);
	msg_str(&m, "TASK", key);
	msg_int(&m, "ERRNO", err);
	msg_fmt(&m, "MSG", "%s", text);
	answer(c, &m);
}

static void about_task(int c, uint32_t type, const struct task *t)
{
	struct msg m;

	msg_init(&m, type);
	msg_str(&m, "TASK", t->key);
	if (type == GC_EXITED)
		msg_int(&m, "STATUS", t->status);
	else
		msg_int(&m, "PID", t->pid);
	answer(c, &m);
}

static struct task *find(const char *key)
{
	for (struct task *t = tasks; t < tasks + MAX_TASKS; t++)
		if (t->state != T_FREE && key && !strcmp(t->key, key))
			return t;
	return NULL;
}

static void free_task(struct task *t)
{
	relay_close(t);
	if (t->go >= 0)
		close(t->go);
	if (t->error >= 0)
		close(t->error);
	t->go = t->error = t->conn = -1;
	t->state = T_FREE;
}

/* A slot for a new task: a free one, else one whose end is known to its supervisor. */
static struct task *slot(void)
{
	struct task *told = NULL;

	for (struct task *t = tasks; t < tasks + MAX_TASKS; t++) {
		if (t->state == T_FREE)
			return t;
		if (t->state == T_EXITED && t->told)
			told = t;
	}
	if (told)
		free_task(told);
	return told;
}

static void take_stdio(struct frame *f, int fds[4])
{
	for (int i = 0; i < 4; i++)
		fds[i] = frame_take_fd(f, i);
}

static void on_spawn(int c, struct frame *f)
{
	const char *key = frame_get(f, "TASK"), *what = "";
	struct task *t = find(key);
	int fds[4], err;
	char text[256];

	if (!key || !*key || strlen(key) >= sizeof(t->key) || f->nfds < 3 || !frame_count(f, "ARG")) {
		failed(c, key ? key : "", EINVAL, "SPAWN without a task key, a command or three descriptors");
		return;
	}
	if (t && t->state == T_EXITED && t->told) {
		free_task(t);
		t = NULL;
	}
	if (t) {
		failed(c, key, EEXIST, "a task of this name is there already");
		return;
	}
	t = slot();
	if (!t) {
		failed(c, key, EAGAIN, "too many tasks in this capsule");
		return;
	}
	take_stdio(f, fds);
	memset(t, 0, sizeof(*t));
	relay_init(t, memory[t - tasks]);
	strcpy(t->key, key);
	t->conn = c;
	err = spawn_task(t, f, fds, &what);
	if (err) {
		t->state = T_FREE;
		snprintf(text, sizeof(text), "could not start the task: %s: %s", what, strerror(err));
		failed(c, key, err, text);
		return;
	}
	t->state = T_HELD;
	about_task(c, GC_SPAWNED, t);
}

static void tell_exit(struct task *t)
{
	if (t->state != T_EXITED || t->told || t->conn < 0 || t->error >= 0 || !relay_done(t))
		return;
	/* Children of the task that still write meet a closed pipe: Slurm ends the step now. The entry stays, so that a
	 * supervisor that comes again is told again. */
	relay_close(t);
	t->told = true;
	about_task(t->conn, GC_EXITED, t);
}

static void on_attach(int c, struct frame *f)
{
	struct task *t = find(frame_get(f, "TASK"));
	int fds[4];

	if (!t || f->nfds < 3) {
		failed(c, frame_get(f, "TASK") ?: "", t ? EINVAL : ESRCH,
		       t ? "ATTACHTASK without three descriptors" : "the capsule has no such task");
		return;
	}
	take_stdio(f, fds);
	relay_attach(t, fds);
	t->conn = c;
	t->told = false;
	about_task(c, GC_ATTACHED, t);
	tell_exit(t);
}

static void on_detach(int c)
{
	long long deadline = now_ms() + FLUSH_MS;
	struct msg to_agent;

	msg_init(&to_agent, GC_DETACHED);
	for (struct task *t = tasks; t < tasks + MAX_TASKS; t++) {
		if (t->state == T_FREE)
			continue;
		relay_flush(t, deadline);
		tell_exit(t);
		relay_detach(t);
		t->conn = -1;
		if (t->state == T_EXITED)
			msg_fmt(&to_agent, "TASKS", "%s:%d:exited:%d", t->key, t->pid, t->status);
		else
			msg_fmt(&to_agent, "TASKS", "%s:%d:running", t->key, t->pid);
	}
	for (int i = 0; i < MAX_CONNS; i++) {
		struct msg m;

		if (i == c || conns[i].rx.fd < 0)
			continue;
		msg_init(&m, GC_DETACHED);
		answer(i, &m);
		drop_conn(i);
	}
	answer(c, &to_agent);
	drop_conn(c);
}

static void handle(int c, struct frame *f)
{
	struct task *t = find(frame_get(f, "TASK"));
	int s;

	switch (f->type) {
	case GC_SPAWN:
		on_spawn(c, f);
		break;
	case GC_GO:
		if (t && t->state == T_HELD && write(t->go, "g", 1) == 1) {
			close(t->go);
			t->go = -1;
			t->state = T_EXEC;
		}
		break;
	case GC_ATTACHTASK:
		on_attach(c, f);
		break;
	case GC_SIGNAL:
		s = (int)frame_int(f, "SIGNAL", 0);
		if (t && s > 0 && (t->state == T_HELD || t->state == T_EXEC || t->state == T_RUNNING))
			kill(t->pid, s); /* the task alone, as Slurm with proctrack/cgroup */
		break;
	case GC_DETACH:
		if (conns[c].uid == 0)
			on_detach(c);
		else
			failed(c, "", EPERM, "only root may detach");
		break;
	default:
		drop_conn(c);
	}
}

static void on_conn(int c)
{
	struct frame f;
	int fd = conns[c].rx.fd, r = 0;

	while (conns[c].rx.fd == fd && (r = rx_read(&conns[c].rx, &f)) == 1) {
		handle(c, &f);
		frame_clear(&f);
	}
	if (conns[c].rx.fd == fd && r < 0)
		drop_conn(c);
}

static void on_listener(void)
{
	int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	unsigned uid;

	if (fd < 0)
		return;
	if (wire_peer(fd, NULL, &uid) == 0 && (uid == 0 || uid == getuid()))
		for (int i = 0; i < MAX_CONNS; i++)
			if (conns[i].rx.fd < 0) {
				rx_init(&conns[i].rx, fd);
				conns[i].uid = uid;
				return;
			}
	close(fd);
}

static void on_exec(struct task *t)
{
	char text[256];
	int r = spawn_result(t, text, sizeof(text)), err = errno;

	if (r == 0 && t->state == T_EXEC)
		t->state = T_RUNNING;
	if (r >= 0)
		return;
	/* FAILED instead of EXITED; the child has ended by itself and is reaped like any other. */
	if (t->conn >= 0)
		failed(t->conn, t->key, err, text);
	free_task(t);
}

static void reap(void)
{
	struct signalfd_siginfo si;
	int status;
	pid_t pid;

	while (read(children, &si, sizeof(si)) > 0)
		;
	/* Every time round, signal or not: a wake-up lost in a dump must not lose an exit. */
	while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
		for (struct task *t = tasks; t < tasks + MAX_TASKS; t++) {
			if (t->pid != pid || t->state == T_FREE || t->state == T_EXITED)
				continue;
			if (t->error >= 0)
				on_exec(t);
			if (t->state == T_HELD && t->conn < 0)
				free_task(t); /* given up before GO */
			if (t->state == T_FREE)
				continue;
			t->status = status;
			t->state = T_EXITED;
			relay_last(t);
		}
}

static void serve(void)
{
	enum { MAX = 2 + MAX_CONNS + MAX_TASKS * (C_COUNT + 1) };
	static struct pollfd p[MAX];
	int n = 0, i = 0;

	p[n++] = (struct pollfd){ .fd = listener, .events = POLLIN };
	p[n++] = (struct pollfd){ .fd = children, .events = POLLIN };
	for (int c = 0; c < MAX_CONNS; c++)
		p[n++] = (struct pollfd){ .fd = conns[c].rx.fd, .events = POLLIN };
	for (struct task *t = tasks; t < tasks + MAX_TASKS; t++)
		for (int c = 0; t->state != T_FREE && c < C_COUNT; c++)
			if ((p[n] = relay_poll(&t->chan[c])).fd >= 0)
				n++;
	for (struct task *t = tasks; t < tasks + MAX_TASKS; t++)
		if (t->state != T_FREE && t->error >= 0)
			p[n++] = (struct pollfd){ .fd = t->error, .events = POLLIN };
	if (poll(p, (nfds_t)n, -1) < 0)
		return; /* EINTR, also right after a restore */
	reap();
	/* Relay before requests, so that a DETACH finds less to flush; descriptors may have changed since poll(), so ask
	 * each channel what it wants and whether just that was ready. */
	for (struct task *t = tasks; t < tasks + MAX_TASKS; t++) {
		if (t->state == T_FREE)
			continue;
		for (int c = 0; c < C_COUNT; c++) {
			struct pollfd q = relay_poll(&t->chan[c]);

			if (q.fd >= 0 && poll(&q, 1, 0) > 0)
				relay_step(&t->chan[c], c == C_IN || c == C_PMI_IN);
		}
		if (t->error >= 0)
			on_exec(t);
		if (t->state != T_FREE)
			tell_exit(t);
	}
	for (i = 0; i < MAX_CONNS; i++)
		if (conns[i].rx.fd >= 0 && p[2 + i].revents && p[2 + i].fd == conns[i].rx.fd)
			on_conn(i);
	if (p[0].revents)
		on_listener();
}

int shepherd_main(const struct capsule_args *a)
{
	char path[PATH_MAX];
	sigset_t chld;

	set_name("gpucr-shepherd");
	setsid();
	close(a->control);
	/* A job that signals "all my processes" must not lose its relay. */
	for (int s = 1; s < NSIG; s++)
		if (s != SIGCHLD && s != SIGSEGV && s != SIGBUS && s != SIGILL && s != SIGFPE && s != SIGABRT)
			signal(s, SIG_IGN);
	sigemptyset(&chld);
	sigaddset(&chld, SIGCHLD);
	sigprocmask(SIG_BLOCK, &chld, NULL);
	for (int i = 0; i < MAX_CONNS; i++)
		rx_init(&conns[i].rx, -1);
	for (int i = 0; i < MAX_TASKS; i++)
		tasks[i].conn = tasks[i].go = tasks[i].error = -1;
	snprintf(path, sizeof(path), "%s/user/shepherd.sock", a->run_dir);
	children = signalfd(-1, &chld, SFD_CLOEXEC | SFD_NONBLOCK);
	listener = children < 0 ? -1 : wire_listen(path);
	if (listener < 0) {
		sync_failed(a->sync, "listen on the shepherd's socket", errno);
		return 1;
	}
	sync_ready(a->sync, getpid());
	for (;;)
		serve();
}
