/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A proxy's connection is inside the dump and stays; the agent's comes and goes. So everything is kept here until it is
 * done: a request until srun has ended, signals until the agent has them, answers until the proxy has taken them. What
 * the agent gets is made from this state one frame at a time: a connection that breaks loses at most that one, and that
 * is made again.
 */
#define _GNU_SOURCE
#include "steps.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "shepherd.h"
#include "util.h"

#define MAX_STEPS 1024
#define KEY_MAX 64
#define HIGH (1u << 20) /* more than this for a proxy that does not read: the agent's frames wait */

/* Bytes that are to go out without blocking. */
struct outq {
	char *buf;
	size_t off, len, cap;
};

struct step {
	char key[KEY_MAX]; /* empty: free */
	int conn;          /* -1: the proxy is gone, and srun shall be killed */
	struct frame srun;
	bool known;        /* the agent has the request */
	bool ended;
	uint64_t signals;  /* bit n-1: signal n waits for the agent */
	struct outq out;
};

static struct step steps[MAX_STEPS];
static int control = -1;
static struct outq up; /* one frame on its way to the agent */
static struct step *up_step;
static int up_signal;  /* 0: it is the request */

void steps_init(void)
{
	for (int i = 0; i < MAX_STEPS; i++)
		steps[i].conn = -1;
}

static struct step *of_conn(int c)
{
	for (struct step *s = steps; s < steps + MAX_STEPS; s++)
		if (*s->key && s->conn == c)
			return s;
	return NULL;
}

static struct step *of_key(const char *key)
{
	for (struct step *s = steps; s < steps + MAX_STEPS; s++)
		if (*s->key && key && !strcmp(s->key, key))
			return s;
	return NULL;
}

static void outq_clear(struct outq *q)
{
	free(q->buf);
	memset(q, 0, sizeof(*q));
}

/* Takes the message over; false without memory. */
static bool outq_put(struct outq *q, struct msg *m)
{
	size_t n = 0;
	char *bytes = msg_bytes(m, &n);

	if (!bytes)
		return false;
	if (q->off) {
		memmove(q->buf, q->buf + q->off, q->len);
		q->off = 0;
	}
	if (q->len + n > q->cap) {
		char *p = realloc(q->buf, q->len + n);

		if (!p) {
			free(bytes);
			return false;
		}
		q->buf = p;
		q->cap = q->len + n;
	}
	memcpy(q->buf + q->len, bytes, n);
	q->len += n;
	free(bytes);
	return true;
}

/* false: the connection is broken. */
static bool outq_send(struct outq *q, int fd)
{
	while (q->len) {
		ssize_t n = send(fd, q->buf + q->off, q->len, MSG_DONTWAIT | MSG_NOSIGNAL);

		if (n < 0)
			return errno == EAGAIN || errno == EINTR;
		q->off += (size_t)n;
		q->len -= (size_t)n;
	}
	outq_clear(q);
	return true;
}

static void forget(struct step *s)
{
	if (up_step == s)
		up_step = NULL; /* what is on its way may arrive, nothing follows from it */
	frame_clear(&s->srun);
	outq_clear(&s->out);
	memset(s, 0, sizeof(*s));
	s->conn = -1;
}

/* --- from proxies --- */

void steps_request(int c, struct frame *f)
{
	const char *key = frame_get(f, "KEY");
	struct step *s = steps;

	while (s < steps + MAX_STEPS && *s->key)
		s++;
	if (!key || !*key || strlen(key) >= KEY_MAX || of_key(key) || of_conn(c)) {
		tell_failed(c, "", EINVAL, "SRUN without a key of its own");
		conn_drop(c);
	} else if (s == steps + MAX_STEPS) {
		tell_failed(c, "", EAGAIN, "too many sruns at once in this job");
		conn_drop(c);
	} else {
		strcpy(s->key, key);
		s->conn = c;
		s->srun = *f;
		s->srun.nfds = 0;
		f->payload = NULL;
		f->len = 0;
	}
}

static void add_signal(struct step *s, int n)
{
	if (n > 0 && n <= 64)
		s->signals |= 1ull << (n - 1);
}

void steps_signal(int c, const struct frame *f)
{
	struct step *s = of_conn(c);

	if (s && !s->ended)
		add_signal(s, (int)frame_int(f, "SIGNAL", 0));
}

static void control_gone(void)
{
	control = -1;
	outq_clear(&up);
	if (up_step && up_signal)
		add_signal(up_step, up_signal);
	up_step = NULL;
}

void steps_conn_gone(int c)
{
	struct step *s;

	if (c == control)
		control_gone();
	s = of_conn(c);
	if (!s)
		return;
	s->conn = -1;
	outq_clear(&s->out);
	if (s->ended || (!s->known && up_step != s))
		forget(s); /* srun has ended, or nobody heard of it */
	else
		s->signals = 1ull << (SIGKILL - 1);
}

/* --- the agent --- */

static bool named(const struct frame *f, const char *key)
{
	size_t pos = 0;
	const char *v;

	while ((v = frame_next(f, "KNOWN", &pos)))
		if (!strcmp(v, key))
			return true;
	return false;
}

void steps_control(int c, const struct frame *f)
{
	int old = control;

	if (old >= 0 && old != c)
		conn_drop(old);
	control = c;
	for (struct step *s = steps; s < steps + MAX_STEPS; s++) {
		if (!*s->key || s->ended)
			continue;
		s->known = named(f, s->key);
		if (!s->known && s->conn < 0)
			forget(s);
	}
}

void steps_answer(int c, const struct frame *f)
{
	struct step *s = of_key(frame_get(f, "KEY"));
	struct msg m;

	if (c != control) {
		conn_drop(c);
		return;
	}
	if (!s || s->ended)
		return;
	if (f->type == GC_SRUNEND) {
		s->ended = true;
		s->signals = 0;
		frame_clear(&s->srun);
	}
	if (s->conn < 0) {
		if (s->ended)
			forget(s);
		return;
	}
	msg_copy(&m, f);
	if (!outq_put(&s->out, &m))
		conn_drop(s->conn);
}

/* The next thing that the agent does not know. false: nothing. */
static bool next_frame(void)
{
	for (struct step *s = steps; s < steps + MAX_STEPS; s++) {
		struct msg m;

		if (!*s->key || s->ended || (s->known && !s->signals))
			continue;
		up_step = s;
		up_signal = s->known ? __builtin_ffsll((long long)s->signals) : 0;
		if (s->known) {
			msg_init(&m, GC_SRUNSIGNAL);
			msg_str(&m, "KEY", s->key);
			msg_int(&m, "SIGNAL", up_signal);
			s->signals &= ~(1ull << (up_signal - 1));
		} else {
			msg_copy(&m, &s->srun);
		}
		if (outq_put(&up, &m))
			return true;
		up_step = NULL;
		return false;
	}
	return false;
}

static void arrived(void)
{
	struct step *s = up_step;

	up_step = NULL;
	if (!s)
		return;
	if (!up_signal)
		s->known = true;
	else if (s->conn < 0 && up_signal == SIGKILL)
		forget(s);
}

static void push_control(void)
{
	while (control >= 0) {
		if (!up.len && !next_frame())
			return;
		if (!outq_send(&up, conn_fd(control))) {
			conn_drop(control);
			return;
		}
		if (up.len)
			return;
		arrived();
	}
}

void steps_push(void)
{
	push_control();
	for (struct step *s = steps; s < steps + MAX_STEPS; s++)
		if (*s->key && s->conn >= 0 && s->out.len && !outq_send(&s->out, conn_fd(s->conn)))
			conn_drop(s->conn);
}

static bool a_proxy_is_full(void)
{
	for (struct step *s = steps; s < steps + MAX_STEPS; s++)
		if (s->out.len > HIGH)
			return true;
	return false;
}

bool steps_is_proxy(int c)
{
	return of_conn(c) != NULL;
}

short steps_events(int c)
{
	struct step *s;

	if (c == control)
		return (short)((a_proxy_is_full() ? 0 : POLLIN) | (up.len ? POLLOUT : 0));
	s = of_conn(c);
	return (short)(POLLIN | (s && s->out.len ? POLLOUT : 0));
}

void steps_detach(void (*read_all)(int c), long long deadline_ms)
{
	if (control >= 0)
		read_all(control);
	push_control();
	while (control >= 0 && up.len) {
		struct pollfd p = { .fd = conn_fd(control), .events = POLLOUT };
		long long ms = deadline_ms - now_ms();

		if (ms <= 0 || poll(&p, 1, (int)ms) <= 0)
			break;
		push_control();
	}
	if (control >= 0)
		control_gone();
}
