/* SPDX-License-Identifier: Apache-2.0 */
/* The shepherd's tasks: what supervisors ask, what becomes of the processes. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shepherd.h"
#include "util.h"

#define FLUSH_MS 2000 /* a deaf reader may not hold up a dump; what stays unread goes into the image */

static struct task tasks[MAX_TASKS];

void tasks_init(void)
{
	for (int i = 0; i < MAX_TASKS; i++)
		tasks[i].conn = tasks[i].go = tasks[i].error = -1;
}

void tell_failed(int c, const char *key, int err, const char *text)
{
	struct msg m;

	msg_init(&m, GC_FAILED);
	msg_str(&m, "TASK", key);
	msg_int(&m, "ERRNO", err);
	msg_fmt(&m, "MSG", "%s", text);
	conn_send(c, &m);
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
	if (type == GC_ATTACHED)
		msg_int(&m, "HELD", t->state == T_HELD);
	conn_send(c, &m);
}

static struct task *find(const char *key)
{
	for (struct task *t = tasks; t < tasks + MAX_TASKS; t++)
		if (t->state != T_FREE && key && !strcmp(t->key, key))
			return t;
	return NULL;
}

/* Descriptors and memory; the entry may stay. */
static void release(struct task *t)
{
	pmi_close(&t->pmi);
	relay_close(t);
	net_linger(&t->net);
	free(t->memory);
	t->memory = NULL;
}

static void free_task(struct task *t)
{
	release(t);
	net_close(&t->net);
	if (t->go >= 0)
		close(t->go);
	if (t->error >= 0)
		close(t->error);
	t->go = t->error = t->conn = -1;
	t->state = T_FREE;
}

/* A slot for a new task: a free one, else one whose end is known to its supervisor, best without an open connection. */
static struct task *slot(void)
{
	struct task *told = NULL;

	for (struct task *t = tasks; t < tasks + MAX_TASKS; t++) {
		if (t->state == T_FREE)
			return t;
		if (t->state == T_EXITED && t->told && (!told || told->net.fd >= 0))
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
		tell_failed(c, key ? key : "", EINVAL, "SPAWN without a task key, a command or three descriptors");
		return;
	}
	if (t && t->state == T_EXITED && t->told) {
		free_task(t);
		t = NULL;
	}
	if (t) {
		tell_failed(c, key, EEXIST, "a task of this name is there already");
		return;
	}
	t = slot();
	if (!t) {
		tell_failed(c, key, EAGAIN, "too many tasks in this capsule");
		return;
	}
	memset(t, 0, sizeof(*t));
	t->conn = t->go = t->error = t->net.fd = -1;
	t->memory = malloc(TASK_MEMORY);
	if (!t->memory) {
		tell_failed(c, key, ENOMEM, "no memory for another task");
		return;
	}
	take_stdio(f, fds);
	relay_init(t);
	strcpy(t->key, key);
	t->conn = c;
	err = spawn_task(t, f, fds, &what);
	if (err) {
		free_task(t);
		snprintf(text, sizeof(text), "could not start the task: %s: %s", what, strerror(err));
		tell_failed(c, key, err, text);
		return;
	}
	t->state = T_HELD;
	about_task(c, GC_SPAWNED, t);
}

static void tell_exit(struct task *t)
{
	if (t->state != T_EXITED || t->told || t->conn < 0 || t->error >= 0 || !relay_done(t) || !net_done(t))
		return;
	/* Children of the task that still write meet a closed pipe: Slurm ends the step now. The entry stays, so that a
	 * supervisor that comes again is told again. */
	release(t);
	t->told = true;
	about_task(t->conn, GC_EXITED, t);
}

static void on_attach(int c, struct frame *f)
{
	struct task *t = find(frame_get(f, "TASK"));
	int fds[4];

	if (!t || f->nfds < 3) {
		tell_failed(c, frame_get(f, "TASK") ?: "", t ? EINVAL : ESRCH,
			    t ? "ATTACHTASK without three descriptors" : "the capsule has no such task");
		return;
	}
	take_stdio(f, fds);
	relay_attach(t, fds);
	pmi_attach(&t->pmi, fds[3], frame_int(f, "RESTORED", 0));
	t->conn = c;
	t->told = false;
	about_task(c, GC_ATTACHED, t);
	tell_exit(t);
}

void tasks_request(int c, struct frame *f)
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
		if (t && s == SIGKILL && t->conn < 0 && conn_uid(c) == 0)
			t->lost = true; /* the agent has seen its supervisor die: nobody comes for it again */
		if (t && s > 0 && (t->state == T_HELD || t->state == T_EXEC || t->state == T_RUNNING))
			kill(t->pid, s); /* the task alone, as Slurm with proctrack/cgroup */
		break;
	default:
		conn_drop(c);
	}
}

void tasks_conn_gone(int c)
{
	for (struct task *t = tasks; t < tasks + MAX_TASKS; t++) {
		if (t->state == T_FREE || t->conn != c)
			continue;
		t->conn = -1; /* a running task goes on, with its outward descriptors */
		if (t->state == T_HELD)
			kill(t->pid, SIGKILL); /* nobody will say GO */
	}
}

void tasks_detach(struct msg *to_agent)
{
	long long deadline = now_ms() + FLUSH_MS;

	for (struct task *t = tasks; t < tasks + MAX_TASKS; t++) {
		if (t->state == T_FREE)
			continue;
		relay_flush(t, deadline);
		tell_exit(t);
		relay_detach(t);
		pmi_detach(&t->pmi, deadline);
		t->conn = -1;
		if (t->state == T_EXITED)
			msg_fmt(to_agent, "TASKS", "%s:%d:%s:exited:%d", t->key, t->pid, pmi_state(&t->pmi), t->status);
		else
			msg_fmt(to_agent, "TASKS", "%s:%d:%s:running", t->key, t->pid, pmi_state(&t->pmi));
	}
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
		tell_failed(t->conn, t->key, err, text);
	free_task(t);
}

static void reap(void)
{
	int status;
	pid_t pid;

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

/* How many of poll()'s descriptors each task has. */
static unsigned char polls[MAX_TASKS];

size_t tasks_poll(struct pollfd *p)
{
	size_t n = 0;

	for (int i = 0; i < MAX_TASKS; i++) {
		struct task *t = &tasks[i];
		size_t first = n;

		polls[i] = 0;
		if (t->state == T_FREE)
			continue;
		for (int c = 0; c < C_COUNT; c++)
			if ((p[n] = relay_poll(&t->chan[c])).fd >= 0)
				n++;
		n += (size_t)net_poll(t, p + n);
		n += (size_t)pmi_poll(&t->pmi, p + n);
		if (t->error >= 0)
			p[n++] = (struct pollfd){ .fd = t->error, .events = POLLIN };
		polls[i] = (unsigned char)(n - first);
	}
	return n;
}

static void relay(struct task *t)
{
	/* What is shared with slurmstepd may block: ask each channel what it wants and whether just that is ready. */
	for (int c = 0; c < C_COUNT; c++) {
		struct pollfd q = relay_poll(&t->chan[c]);

		if (q.fd >= 0 && poll(&q, 1, 0) > 0)
			relay_step(&t->chan[c], c == C_IN);
	}
	net_step(t);
	pmi_step(&t->pmi);
}

void tasks_step(const struct pollfd *p)
{
	/* Every time round, signal or not: a wake-up lost in a dump must not lose an exit. */
	reap();
	for (int i = 0; i < MAX_TASKS; i++) {
		struct task *t = &tasks[i];
		bool ready = false;

		for (unsigned k = 0; k < polls[i]; k++)
			ready |= (p++)->revents != 0;
		if (t->state == T_FREE)
			continue;
		/* An ended one has its last bytes and its end to send without that anything wakes us. */
		if (ready || (t->state == T_EXITED && !t->told))
			relay(t);
		if (t->error >= 0)
			on_exec(t);
		if (t->state != T_FREE)
			tell_exit(t);
		if (t->state == T_EXITED && t->lost && relay_done(t) && net_done(t))
			free_task(t);
	}
}
