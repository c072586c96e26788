/* SPDX-License-Identifier: Apache-2.0 */
/* The stdio of a step's task on its connection to the step's proxy (docs/protocol.md, "Steps"). Every descriptor here is
 * ours alone and non-blocking. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shepherd.h"
#include "util.h"

#define CONNECT_MS 10000
#define HALF (RELAY_BYTES / 2) /* stdout and stderr each get their part of the buffer */
#define ROUNDS 8               /* reads before the other tasks have their turn */

static int parse(const char *where, struct sockaddr_in *a)
{
	const char *colon = where ? strrchr(where, ':') : NULL;
	char host[64];
	long long port;

	memset(a, 0, sizeof(*a));
	a->sin_family = AF_INET;
	if (!colon || (size_t)(colon - where) >= sizeof(host) || !parse_number(colon + 1, 1, 65535, &port)) {
		errno = EINVAL;
		return -1;
	}
	snprintf(host, sizeof(host), "%.*s", (int)(colon - where), where);
	a->sin_port = htons((uint16_t)port);
	if (inet_pton(AF_INET, host, &a->sin_addr) == 1)
		return 0;
	errno = EINVAL;
	return -1;
}

/* Not in the main loop: a connection that is being made could not be dumped, and there must be none when DETACH is obeyed. */
static int finish(int fd, const struct sockaddr_in *a)
{
	struct pollfd p = { .fd = fd, .events = POLLOUT };
	long long end = now_ms() + CONNECT_MS, left;
	int err = 0;
	socklen_t n = sizeof(err);

	if (connect(fd, (const struct sockaddr *)a, sizeof(*a)) == 0)
		return 0;
	if (errno != EINPROGRESS)
		return -1;
	while ((left = end - now_ms()) > 0 && poll(&p, 1, (int)left) < 0 && errno == EINTR)
		;
	if (!p.revents)
		err = ETIMEDOUT;
	else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &n) < 0)
		err = errno;
	errno = err;
	return err ? -1 : 0;
}

int net_connect(const char *where, const char *token, long long rank)
{
	struct sockaddr_in a;
	char hello[512];
	int fd, on = 1, n = snprintf(hello, sizeof(hello), "%s %lld\n", token ? token : "", rank);

	if (n < 0 || n >= (int)sizeof(hello) || parse(where, &a) < 0) {
		errno = EINVAL;
		return -1;
	}
	fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -1;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	if (finish(fd, &a) == 0 && send(fd, hello, (size_t)n, MSG_NOSIGNAL) == n)
		return fd;
	int saved = errno;
	close(fd);
	errno = saved;
	return -1;
}

void net_open(struct net *n, int fd, unsigned char *memory)
{
	*n = (struct net){ .fd = fd, .used = true, .reading = true, .in = memory, .out = memory + RELAY_BYTES };
}

static bool wants_source(const struct net *n, const struct chan *c)
{
	return c->net && !n->out_len && c->src >= 0 && !c->src_eof && (!c->last || c->left);
}

int net_poll(const struct task *t, struct pollfd *p)
{
	const struct net *n = &t->net;
	short events = 0;
	int k = 0;

	if (!n->used)
		return 0;
	if (n->fd >= 0 && n->out_len)
		events |= POLLOUT;
	if (n->fd >= 0 && n->reading && !n->in_len)
		events |= POLLIN;
	if (events)
		p[k++] = (struct pollfd){ .fd = n->fd, .events = events };
	if (n->in_len && t->chan[C_IN].dst >= 0)
		p[k++] = (struct pollfd){ .fd = t->chan[C_IN].dst, .events = POLLOUT };
	for (int i = C_OUT; i <= C_ERR; i++)
		if (wants_source(n, &t->chan[i]))
			p[k++] = (struct pollfd){ .fd = t->chan[i].src, .events = POLLIN };
	return k;
}

static void shut_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

/* --- output --- */

static void put_piece(struct net *n, int kind, uint32_t len)
{
	unsigned char *h = n->out + n->out_off + n->out_len;

	h[0] = (unsigned char)kind;
	for (int i = 0; i < 4; i++)
		h[1 + i] = len >> (8 * i) & 0xff;
	n->out_len += NET_HEADER + len;
}

static void send_some(struct net *n)
{
	while (n->out_len && !n->failed) {
		ssize_t r = send(n->fd, n->out + n->out_off, n->out_len, MSG_NOSIGNAL);

		if (r < 0 && (errno == EAGAIN || errno == EINTR))
			return;
		if (r < 0) {
			n->failed = true; /* the proxy is gone: what the task writes is dropped, as slurmstepd does without srun */
			break;
		}
		n->out_off += (uint32_t)r;
		n->out_len -= (uint32_t)r;
	}
	n->out_off = n->out_len = 0;
}

/* true: something was taken from the task. */
static bool take(struct net *n, struct chan *c, int kind)
{
	unsigned char *to = n->out + n->out_len + NET_HEADER;
	size_t want = HALF - 4 * NET_HEADER;
	ssize_t r;

	if (!c->net || c->src < 0 || c->src_eof)
		return false;
	if (c->last && c->left < want)
		want = c->left;
	if (!want)
		return false;
	r = read(c->src, to, want);
	if (r < 0 && (errno == EAGAIN || errno == EINTR))
		return false;
	if (r <= 0) {
		c->src_eof = true;
		shut_fd(&c->src);
		return true;
	}
	if (c->last)
		c->left -= (size_t)r;
	c->read += (uint64_t)r;
	if (!n->failed)
		put_piece(n, kind, (uint32_t)r);
	return true;
}

static bool ended(const struct chan *c)
{
	return c->src_eof || (c->last && !c->left);
}

static void output(struct task *t)
{
	struct net *n = &t->net;
	bool more = true;

	for (int round = 0; more && round < ROUNDS; round++) {
		send_some(n);
		if (n->out_len)
			return;
		more = false;
		for (int i = C_OUT; i <= C_ERR; i++) {
			struct chan *c = &t->chan[i];

			more |= take(n, c, i);
			if (c->net && ended(c) && !n->end_sent[i]) {
				n->end_sent[i] = true;
				if (!n->failed)
					put_piece(n, i, 0);
				more = true;
			}
		}
	}
	send_some(n);
}

/* --- input --- */

static void no_more_input(struct task *t)
{
	t->net.in_len = 0;
	shut_fd(&t->chan[C_IN].dst);
}

static void give(struct task *t)
{
	struct net *n = &t->net;
	ssize_t r;

	/* A task that has closed its input, or that has another one than ours. */
	if (t->chan[C_IN].dst < 0) {
		n->in_len = 0;
		return;
	}
	r = write(t->chan[C_IN].dst, n->in + n->in_off, n->in_len);
	if (r < 0) {
		if (errno != EAGAIN && errno != EINTR)
			no_more_input(t);
		return;
	}
	n->in_off += (uint32_t)r;
	n->in_len -= (uint32_t)r;
}

/* false: nothing (more) can be read now. */
static bool receive(struct task *t)
{
	struct net *n = &t->net;
	bool header = n->header_len < NET_HEADER;
	size_t want = header ? NET_HEADER - n->header_len : n->left < RELAY_BYTES ? n->left : RELAY_BYTES;
	ssize_t r = recv(n->fd, header ? n->header + n->header_len : n->in, want, 0);

	if (r < 0 && (errno == EAGAIN || errno == EINTR))
		return false;
	if (r <= 0) {
		n->reading = false; /* whether it still takes output shows itself in send() */
		no_more_input(t);
		return false;
	}
	if (!header) {
		n->left -= (uint32_t)r;
		n->in_off = 0;
		n->in_len = (uint32_t)r;
		if (!n->left)
			n->header_len = 0;
		return true;
	}
	n->header_len += (uint32_t)r;
	if (n->header_len < NET_HEADER)
		return true;
	n->left = 0;
	for (int i = 4; i > 0; i--)
		n->left = n->left << 8 | n->header[i];
	if (n->header[0] != 0 || n->left > RELAY_BYTES) {
		n->reading = false;
		no_more_input(t);
		return false;
	}
	if (!n->left) {
		n->header_len = 0;
		no_more_input(t);
	}
	return true;
}

static void input(struct task *t)
{
	struct net *n = &t->net;

	for (int round = 0; round < ROUNDS; round++) {
		if (n->in_len)
			give(t);
		if (n->in_len || !n->reading || !receive(t))
			return;
	}
}

static void await_close(struct net *n)
{
	char sink[4096];
	ssize_t r = 1;

	for (int i = 0; i < 16 && r > 0; i++)
		r = recv(n->fd, sink, sizeof(sink), 0);
	if (r > 0)
		return;
	if (r == 0 || (errno != EAGAIN && errno != EINTR))
		shut_fd(&n->fd);
}

void net_step(struct task *t)
{
	if (!t->net.used || t->net.fd < 0)
		return;
	if (t->net.shut) {
		await_close(&t->net);
		return;
	}
	output(t);
	input(t);
}

bool net_done(const struct task *t)
{
	const struct net *n = &t->net;

	if (!n->used)
		return true;
	for (int i = C_OUT; i <= C_ERR; i++)
		if (t->chan[i].net && t->chan[i].used && !n->end_sent[i])
			return false;
	return !n->out_len || n->failed;
}

void net_linger(struct net *n)
{
	if (!n->used || n->fd < 0 || n->shut)
		return;
	n->shut = n->reading = true;
	n->in_len = n->out_len = 0;
	n->in = n->out = NULL;
	shutdown(n->fd, SHUT_WR);
	await_close(n);
}

void net_close(struct net *n)
{
	if (n->used)
		shut_fd(&n->fd);
	n->used = false;
}
