/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shepherd forks the job's tasks and owns their stdio. It runs as the user and is part of the image: after a restore it
 * simply goes on in poll(), with its listening socket bound again at the same path. So it uses only what CRIU can
 * dump: pipes, sockets whose other end is in the job, a signalfd, no timers; and while it is being dumped no connection
 * leads out of the capsule.
 */
#define _GNU_SOURCE
#include "shepherd.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "capsule.h"
#include "steps.h"
#include "util.h"

#define FLUSH_MS 2000
#define MAX_FILES 65536

struct conn {
	struct rx rx; /* fd -1: free slot */
	unsigned uid;
	bool inside;  /* the peer is a process of the capsule: the connection is part of the dump */
};

static struct conn conns[MAX_CONNS];
static int nconns; /* slots from here on were never used */
static int listener = -1, children = -1;

int conn_fd(int c)
{
	return conns[c].rx.fd;
}

unsigned conn_uid(int c)
{
	return conns[c].uid;
}

void conn_drop(int c)
{
	if (conns[c].rx.fd < 0)
		return;
	rx_close(&conns[c].rx);
	tasks_conn_gone(c);
	steps_conn_gone(c);
}

void conn_send(int c, struct msg *m)
{
	if (conns[c].rx.fd < 0) {
		free(m->buf);
		return;
	}
	if (msg_send(m, conns[c].rx.fd, NULL, 0) < 0)
		conn_drop(c);
}

static void on_detach(int c);

static void handle(int c, struct frame *f)
{
	switch (f->type) {
	case GC_DETACH:
	case GC_CONTROL:
		if (conns[c].uid != 0) {
			tell_failed(c, "", EPERM, "only root may do this");
			break;
		}
		conns[c].inside = false; /* in tests the agent shares our pid namespace, as supervisors do */
		if (f->type == GC_DETACH)
			on_detach(c);
		else
			steps_control(c, f);
		break;
	case GC_SRUN:
		if (conns[c].uid != getuid())
			conn_drop(c);
		else
			steps_request(c, f);
		break;
	case GC_SRUNSIGNAL:
		steps_signal(c, f);
		break;
	case GC_PLAN:
	case GC_OUTPUT:
	case GC_SRUNEND:
		steps_answer(c, f);
		break;
	case GC_SPAWN:
	case GC_ATTACHTASK:
		conns[c].inside = false;
		tasks_request(c, f);
		break;
	default:
		tasks_request(c, f);
	}
}

static void on_conn(int c)
{
	struct frame f;
	int fd = conns[c].rx.fd, r = 0;

	while (fd >= 0 && conns[c].rx.fd == fd && (r = rx_read(&conns[c].rx, &f)) == 1) {
		handle(c, &f);
		frame_clear(&f);
	}
	if (fd >= 0 && conns[c].rx.fd == fd && r < 0)
		conn_drop(c);
}

static void accept_one(int fd)
{
	unsigned uid;
	int pid, i = 0;

	if (wire_peer(fd, &pid, &uid) < 0 || (uid != 0 && uid != getuid())) {
		close(fd);
		return;
	}
	while (i < MAX_CONNS && conns[i].rx.fd >= 0)
		i++;
	if (i == MAX_CONNS) {
		close(fd);
		return;
	}
	rx_init(&conns[i].rx, fd);
	conns[i].uid = uid;
	conns[i].inside = pid > 0; /* a process outside our pid namespace has no number here */
	if (i >= nconns)
		nconns = i + 1;
}

static void on_listener(void)
{
	int fd;

	while ((fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0)
		accept_one(fd);
}

static void on_detach(int c)
{
	static bool busy; /* another DETACH may lie in one of the connections that are read here */
	struct msg to_agent;

	if (busy)
		return;
	busy = true;
	msg_init(&to_agent, GC_DETACHED);
	on_listener(); /* nobody from outside may wait to be accepted */
	steps_detach(on_conn, now_ms() + FLUSH_MS);
	for (int i = 0; i < nconns; i++)
		if (i != c)
			on_conn(i); /* a SPAWN that has come already is obeyed: its sender cannot tell */
	tasks_detach(&to_agent);
	for (int i = 0; i < nconns; i++) {
		struct msg m;

		if (i == c || conns[i].rx.fd < 0 || steps_is_proxy(i) || (conns[i].inside && conns[i].uid == getuid()))
			continue;
		msg_init(&m, GC_DETACHED);
		conn_send(i, &m);
		conn_drop(i);
	}
	conn_send(c, &to_agent);
	conn_drop(c);
	busy = false;
}

static void serve(void)
{
	static struct pollfd p[2 + MAX_CONNS + MAX_TASKS * MAX_TASK_POLLS];
	static int whose[MAX_CONNS];
	struct signalfd_siginfo si;
	int n = 2, with_conns;
	size_t with_tasks;

	steps_push();
	p[0] = (struct pollfd){ .fd = listener, .events = POLLIN };
	p[1] = (struct pollfd){ .fd = children, .events = POLLIN };
	for (int c = 0; c < nconns; c++) {
		if (conns[c].rx.fd < 0)
			continue;
		whose[n - 2] = c;
		p[n++] = (struct pollfd){ .fd = conns[c].rx.fd, .events = steps_events(c) };
	}
	with_conns = n;
	with_tasks = (size_t)n + tasks_poll(p + n);
	if (poll(p, (nfds_t)with_tasks, -1) < 0)
		return; /* EINTR, also right after a restore */
	while (read(children, &si, sizeof(si)) > 0)
		;
	/* Relay before requests, so that a DETACH finds less to flush. */
	tasks_step(p + with_conns);
	for (int i = 2; i < with_conns; i++)
		if ((p[i].revents & ~POLLOUT) && conns[whose[i - 2]].rx.fd == p[i].fd)
			on_conn(whose[i - 2]);
	if (p[0].revents)
		on_listener();
}

int shepherd_main(const struct capsule_args *a)
{
	char path[PATH_MAX];
	struct rlimit files;
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
	/* Several for each task; poll() takes no more of them than this limit either. The tasks get their own limits. */
	if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < MAX_FILES) {
		files.rlim_cur = files.rlim_max < MAX_FILES ? files.rlim_max : MAX_FILES;
		setrlimit(RLIMIT_NOFILE, &files);
	}
	for (int i = 0; i < MAX_CONNS; i++)
		rx_init(&conns[i].rx, -1);
	tasks_init();
	steps_init();
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
