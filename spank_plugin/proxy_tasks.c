/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One TCP connection for each task, made by the shepherd of its node (docs/protocol.md, "Steps"). Connections are accepted at
 * once, always: CRIU refuses to dump a listening socket with connections that wait to be accepted. What comes through
 * them waits in the kernel until the plan is there and our output has room, so that back pressure reaches the tasks.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proxy.h"
#include "util.h"

#define HELLO_MAX (TOKEN_LEN + 12) /* token, blank, rank, newline */
#define PIECES 8                   /* reads from one task before the others have their turn */

struct task_conn {
	int fd; /* -1: ended */
	bool known, takes;
	char hello[HELLO_MAX];
	size_t hello_len;
	long long rank;
	unsigned char header[STDIO_HEADER];
	size_t header_len;
	uint32_t left;        /* of the payload */
	uint64_t place;       /* in the ring of our input */
	size_t end_sent;      /* takes no input: bytes sent of the piece that says so */
	char *part[2];        /* an unfinished line */
	size_t part_len[2];
};

static struct task_conn *conns;
static size_t nconns, cap, seen;
static const char *token;
static int listener = -1;
static bool planned, label, moved;
static int width = 1;
static long long expected;

int tasks_listen(const char *secret)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	socklen_t n = sizeof(a);

	token = secret;
	listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (listener < 0 || bind(listener, (struct sockaddr *)&a, sizeof(a)) < 0 || listen(listener, 1024) < 0 ||
	    getsockname(listener, (struct sockaddr *)&a, &n) < 0)
		return -1;
	return ntohs(a.sin_port);
}

static void join_input(struct task_conn *c)
{
	c->takes = stdin_takes(c->rank);
	c->place = stdin_join();
}

void tasks_plan(long long count, bool with_label)
{
	if (count > 0)
		expected = count;
	for (long long n = expected - 1; !planned && n >= 10; n /= 10)
		width++;
	label = with_label;
	if (planned)
		return;
	planned = true;
	for (size_t i = 0; i < nconns; i++)
		if (conns[i].known)
			join_input(&conns[i]);
}

/* --- what a task wrote --- */

static void put_line(const struct task_conn *c, int k, const char *data, size_t len)
{
	char text[32];
	int n = snprintf(text, sizeof(text), "%*lld: ", width, c->rank);

	sink_put(task_sink[k], text, (size_t)n);
	sink_put(task_sink[k], c->part[k], c->part_len[k]);
	sink_put(task_sink[k], data, len);
}

static void end_line(struct task_conn *c, int k)
{
	if (c->part_len[k])
		put_line(c, k, "\n", 1); /* the next label begins a line of its own */
	c->part_len[k] = 0;
}

static void put_labelled(struct task_conn *c, int k, const char *data, size_t len)
{
	while (len) {
		const char *nl = memchr(data, '\n', len);
		size_t n = nl ? (size_t)(nl - data) + 1 : len;

		if (nl) {
			put_line(c, k, data, n);
			c->part_len[k] = 0;
		} else {
			if (n > LINE_MAX_BYTES - c->part_len[k])
				n = LINE_MAX_BYTES - c->part_len[k];
			if (!c->part[k] && !(c->part[k] = malloc(LINE_MAX_BYTES))) {
				complain("gpucr: no memory");
				exit(1);
			}
			memcpy(c->part[k] + c->part_len[k], data, n);
			c->part_len[k] += n;
			if (c->part_len[k] == LINE_MAX_BYTES)
				end_line(c, k);
		}
		data += n;
		len -= n;
	}
}

static void end_conn(struct task_conn *c)
{
	if (c->fd >= 0)
		close(c->fd);
	c->fd = -1;
	for (int k = 0; k < 2; k++) {
		end_line(c, k);
		free(c->part[k]);
		c->part[k] = NULL;
	}
}

/* --- reading --- */

static bool same_token(const char *given)
{
	unsigned char differ = 0;

	for (size_t i = 0; i < TOKEN_LEN; i++)
		differ |= (unsigned char)(given[i] ^ token[i]);
	return !differ;
}

static bool rank_is_here(long long rank)
{
	for (size_t i = 0; i < nconns; i++)
		if (conns[i].known && conns[i].fd >= 0 && conns[i].rank == rank)
			return true;
	return false;
}

/* Byte by byte behind the token: what follows the line is stdio. */
static bool read_hello(struct task_conn *c)
{
	for (;;) {
		size_t want = c->hello_len < TOKEN_LEN ? TOKEN_LEN - c->hello_len : 1;
		ssize_t n = recv(c->fd, c->hello + c->hello_len, want, MSG_DONTWAIT);
		long long rank;

		if (n <= 0)
			return n < 0 && (errno == EAGAIN || errno == EINTR);
		c->hello_len += (size_t)n;
		if (c->hello_len <= TOKEN_LEN)
			continue;
		if (c->hello[c->hello_len - 1] == '\n') {
			c->hello[c->hello_len - 1] = '\0';
			if (!same_token(c->hello) || c->hello[TOKEN_LEN] != ' ' ||
			    !parse_number(c->hello + TOKEN_LEN + 1, 0, INT32_MAX, &rank) || rank_is_here(rank))
				return false;
			c->known = true;
			c->rank = rank;
			seen++;
			if (planned)
				join_input(c);
			return true;
		}
		if (c->hello_len == HELLO_MAX)
			return false;
	}
}

/* 0: no piece is open; else its kind. */
static int kind(const struct task_conn *c)
{
	return c->header_len == STDIO_HEADER ? c->header[0] : 0;
}

static bool may_read(const struct task_conn *c)
{
	return !c->known || (planned && (!kind(c) || !sink_busy(task_sink[kind(c) - 1])));
}

static bool read_header(struct task_conn *c)
{
	ssize_t n = recv(c->fd, c->header + c->header_len, STDIO_HEADER - c->header_len, MSG_DONTWAIT);

	if (n <= 0)
		return n < 0 && (errno == EAGAIN || errno == EINTR);
	moved = true;
	c->header_len += (size_t)n;
	if (c->header_len < STDIO_HEADER)
		return true;
	c->left = 0;
	for (int i = 4; i > 0; i--)
		c->left = c->left << 8 | c->header[i];
	if (c->header[0] < 1 || c->header[0] > 2 || c->left > STDIO_MAX)
		return false;
	if (!c->left) {
		end_line(c, c->header[0] - 1);
		c->header_len = 0;
	}
	return true;
}

static bool read_payload(struct task_conn *c)
{
	static char data[STDIO_MAX];
	int k = kind(c) - 1;
	ssize_t n = recv(c->fd, data, c->left, MSG_DONTWAIT);

	if (n <= 0)
		return n < 0 && (errno == EAGAIN || errno == EINTR);
	moved = true;
	c->left -= (uint32_t)n;
	if (!c->left)
		c->header_len = 0;
	if (label)
		put_labelled(c, k, data, (size_t)n);
	else
		sink_put(task_sink[k], data, (size_t)n);
	sink_try(task_sink[k]);
	return true;
}

static bool read_some(struct task_conn *c)
{
	if (!c->known)
		return read_hello(c);
	for (int i = 0; i < PIECES && may_read(c); i++) {
		errno = 0;
		if (!(kind(c) ? read_payload(c) : read_header(c)))
			return false;
		if (errno == EAGAIN)
			break;
	}
	return true;
}

/* --- writing --- */

static bool wants_write(const struct task_conn *c)
{
	const unsigned char *data;

	if (!c->known || !planned)
		return false;
	return c->takes ? stdin_at(c->place, &data) > 0 : c->end_sent < STDIO_HEADER;
}

static void write_some(struct task_conn *c)
{
	static const unsigned char end[STDIO_HEADER];
	const unsigned char *data = end + c->end_sent;
	size_t len = c->takes ? stdin_at(c->place, &data) : STDIO_HEADER - c->end_sent;
	ssize_t n = send(c->fd, data, len, MSG_DONTWAIT | MSG_NOSIGNAL);

	if (n < 0) {
		if (errno == EAGAIN || errno == EINTR)
			return;
		c->takes = false; /* its output may still be on the way to us */
		c->end_sent = STDIO_HEADER;
	} else if (c->takes) {
		c->place += (uint64_t)n;
	} else {
		c->end_sent += (size_t)n;
	}
}

/* --- the loop's questions --- */

size_t tasks_poll(struct pollfd **p, size_t *room, size_t at)
{
	*p = grow(*p, room, at + 1 + nconns, sizeof(**p));
	(*p)[at++] = (struct pollfd){ .fd = listener, .events = POLLIN };
	for (size_t i = 0; i < nconns; i++) {
		struct task_conn *c = &conns[i];
		short events = (short)((may_read(c) ? POLLIN : 0) | (wants_write(c) ? POLLOUT : 0));

		/* Without a wish not even an error is wanted: poll() would return at once, for ever. */
		(*p)[at++] = (struct pollfd){ .fd = events ? c->fd : -1, .events = events };
	}
	return at;
}

static void accept_all(void)
{
	for (;;) {
		int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK), on = 1;

		if (fd < 0) {
			if (errno == EMFILE || errno == ENFILE)
				poll(NULL, 0, 100);
			return;
		}
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
		setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on)); /* a node that lost power says nothing */
		conns = grow(conns, &cap, nconns + 1, sizeof(*conns));
		conns[nconns++] = (struct task_conn){ .fd = fd };
		moved = true;
	}
}

void tasks_step(const struct pollfd *p)
{
	size_t kept = 0;

	for (size_t i = 0; i < nconns; i++) {
		struct task_conn *c = &conns[i];
		short got = p[1 + i].fd < 0 ? 0 : p[1 + i].revents;

		if (got & POLLOUT)
			write_some(c);
		/* An error shows itself in reading; when only writing was asked for, reading is not possible now. */
		if ((got & ~POLLOUT) && may_read(c) && !read_some(c))
			end_conn(c);
	}
	for (size_t i = 0; i < nconns; i++)
		if (conns[i].fd >= 0)
			conns[kept++] = conns[i];
	nconns = kept;
	accept_all();
}

size_t tasks_readers(uint64_t *slowest)
{
	size_t n = 0;

	for (size_t i = 0; i < nconns; i++) {
		if (!conns[i].known || !conns[i].takes)
			continue;
		if (!n++ || conns[i].place < *slowest)
			*slowest = conns[i].place;
	}
	return n;
}

size_t tasks_seen(void)
{
	return seen;
}

size_t tasks_open(bool *any)
{
	*any = moved;
	moved = false;
	return nconns;
}

void tasks_stop(void)
{
	for (size_t i = 0; i < nconns; i++)
		end_conn(&conns[i]);
	nconns = 0;
}
