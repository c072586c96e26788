/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PMI between a task and slurmstepd: requests one way, one answer for each the other way. A request without its answer is
 * kept, and so is the task's first line, `cmd=init pmi_version=...`: a slurmstepd that comes after a restore knows nothing,
 * expects that line first and must be asked again what the old one has not answered.
 *
 * Version 1 is lines both ways. Version 2 is, after the first line and its answer, a length of six digits and as many
 * bytes; there any bytes that come back count as the answer.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shepherd.h"
#include "util.h"

static void shut_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

void pmi_open(struct pmi *p, int inside, char *memory)
{
	*p = (struct pmi){ .used = true, .inside = inside, .outside = -1, .req = memory, .ans = memory + RELAY_BYTES };
}

void pmi_attach(struct pmi *p, int outside, bool restored)
{
	if (!p->used || p->inside < 0) {
		if (outside >= 0)
			close(outside);
		return;
	}
	shut_fd(&p->outside);
	p->outside = outside;
	if (!restored || outside < 0)
		return;
	p->req_sent = 0;
	/* An init without its answer is among the requests, and its answer is the task's. */
	p->swallow = p->init_answered;
	p->replay_off = 0;
}

/* Bytes for slurmstepd: the replayed line alone until its answer is there, then requests. */
static size_t to_send(const struct pmi *p, const char **data)
{
	if (p->swallow) {
		*data = p->init + p->replay_off;
		return p->init_len - p->replay_off;
	}
	*data = p->req + p->req_sent;
	return p->req_len - p->req_sent;
}

static bool wants_request(const struct pmi *p)
{
	return p->inside >= 0 && p->req_len < RELAY_BYTES;
}

int pmi_poll(const struct pmi *p, struct pollfd *polls)
{
	const char *data;
	short in = 0, out = 0;
	int n = 0;

	if (!p->used)
		return 0;
	if (wants_request(p))
		in |= POLLIN;
	if (p->inside >= 0 && p->ans_len)
		in |= POLLOUT;
	if (p->outside >= 0 && !p->ans_len)
		out |= POLLIN;
	if (p->outside >= 0 && to_send(p, &data))
		out |= POLLOUT;
	if (in)
		polls[n++] = (struct pollfd){ .fd = p->inside, .events = in };
	if (out)
		polls[n++] = (struct pollfd){ .fd = p->outside, .events = out };
	return n;
}

/* The first line says which protocol follows. */
static void learn(struct pmi *p, const char *data, size_t n)
{
	const char *nl = memchr(data, '\n', n);
	size_t take = nl ? (size_t)(nl - data) + 1 : n;

	p->said = true;
	if (p->init_done)
		return;
	if (p->init_len + take >= sizeof(p->init)) { /* not a protocol that we know: nothing to replay */
		p->init_len = 0;
		p->init_done = true;
		return;
	}
	memcpy(p->init + p->init_len, data, take);
	p->init_len += (uint32_t)take;
	p->init[p->init_len] = '\0';
	if (nl) {
		p->init_done = true;
		p->v2 = strstr(p->init, "pmi_version=2") != NULL;
		if (strncmp(p->init, "cmd=init", 8))
			p->init_len = 0;
	}
}

/* false: nothing now, or the task's end is closed. */
static bool take_request(struct pmi *p)
{
	ssize_t n;

	if (!wants_request(p))
		return false;
	n = recv(p->inside, p->req + p->req_len, RELAY_BYTES - p->req_len, MSG_DONTWAIT);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return false;
	if (n <= 0) {
		shut_fd(&p->inside);
		return false;
	}
	learn(p, p->req + p->req_len, (size_t)n);
	p->req_len += (uint32_t)n;
	return true;
}

static void forget_answered(struct pmi *p)
{
	memmove(p->req, p->req + p->req_sent, p->req_len - p->req_sent);
	p->req_len -= p->req_sent;
	p->req_sent = 0;
}

static bool take_answer(struct pmi *p)
{
	char *end;
	ssize_t n;

	if (p->outside < 0 || p->ans_len)
		return false;
	n = recv(p->outside, p->ans, RELAY_BYTES, MSG_DONTWAIT);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return false;
	if (n <= 0) {
		shut_fd(&p->outside);
		if (p->inside >= 0)
			shutdown(p->inside, SHUT_WR);
		return false;
	}
	p->ans_off = 0;
	p->ans_len = (uint32_t)n;
	end = memchr(p->ans, '\n', (size_t)n);
	if (p->swallow) {
		p->ans_off = end ? (uint32_t)(end - p->ans) + 1 : p->ans_len;
		p->ans_len -= p->ans_off;
		p->swallow = !end;
		return true;
	}
	if (end || (p->v2 && p->init_answered)) {
		p->init_answered |= p->init_len > 0;
		forget_answered(p);
	}
	return true;
}

static bool give_answer(struct pmi *p)
{
	ssize_t n;

	if (!p->ans_len)
		return false;
	if (p->inside < 0) {
		p->ans_len = 0;
		return true;
	}
	n = send(p->inside, p->ans + p->ans_off, p->ans_len, MSG_DONTWAIT | MSG_NOSIGNAL);
	if (n < 0) {
		if (errno != EAGAIN && errno != EINTR)
			p->ans_len = 0; /* its end shows itself in reading */
		return false;
	}
	p->ans_off += (uint32_t)n;
	p->ans_len -= (uint32_t)n;
	return true;
}

static bool give_request(struct pmi *p)
{
	const char *data;
	size_t len = to_send(p, &data);
	ssize_t n;

	if (p->outside < 0 || !len)
		return false;
	n = send(p->outside, data, len, MSG_DONTWAIT | MSG_NOSIGNAL);
	if (n < 0)
		return false; /* its end shows itself in reading */
	if (p->swallow)
		p->replay_off += (uint32_t)n;
	else
		p->req_sent += (uint32_t)n;
	return true;
}

void pmi_step(struct pmi *p)
{
	const char *data;

	if (!p->used)
		return;
	for (int i = 0; i < 16; i++) {
		bool more = take_request(p);

		more |= give_request(p);
		more |= take_answer(p);
		more |= give_answer(p);
		if (!more)
			break;
	}
	/* The task has closed its end and everything it said is told: slurmstepd learns of it. */
	if (p->inside < 0 && p->outside >= 0 && !to_send(p, &data)) {
		shutdown(p->outside, SHUT_WR); /* the supervisor holds the same socket */
		shut_fd(&p->outside);
	}
}

void pmi_detach(struct pmi *p, long long deadline_ms)
{
	const char *data;

	if (!p->used)
		return;
	pmi_step(p);
	while (p->outside >= 0 && to_send(p, &data)) {
		struct pollfd q = { .fd = p->outside, .events = POLLOUT };
		long long ms = deadline_ms - now_ms();

		if (ms <= 0 || poll(&q, 1, (int)ms) <= 0)
			break;
		if (!give_request(p))
			break;
	}
	pmi_step(p);
	shut_fd(&p->outside);
}

void pmi_close(struct pmi *p)
{
	if (!p->used)
		return;
	pmi_step(p); /* an abort is told before the end */
	if (p->outside >= 0)
		shutdown(p->outside, SHUT_RDWR);
	shut_fd(&p->outside);
	shut_fd(&p->inside);
	p->used = false;
}

const char *pmi_state(const struct pmi *p)
{
	if (!p->used)
		return "none";
	return !p->said ? "new" : p->req_len ? "busy" : "idle";
}
