/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Relaying between a task's own pipes (inside, in the image) and the descriptors of the Slurm step (outward, never in
 * the image). Outward descriptors share their open file description with slurmstepd: they are never switched to
 * non-blocking, instead they are written after poll() and in pieces that a writable pipe always takes.
 */
#define _GNU_SOURCE
#include "shepherd.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "util.h"

void relay_init(struct task *t)
{
	for (int i = 0; i < C_COUNT; i++) {
		t->chan[i] = (struct chan){ .src = -1, .dst = -1 };
		t->chan[i].buf = t->memory + (size_t)i * RELAY_BYTES;
	}
}

static void shut(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

void relay_attach(struct task *t, int fds[3])
{
	struct chan *in = &t->chan[C_IN];
	struct stat st;

	relay_detach(t);
	/* After a restore Slurm opens the input file afresh, at its beginning. */
	if (fds[0] >= 0 && in->used && !in->net && in->read && fstat(fds[0], &st) == 0 && S_ISREG(st.st_mode))
		lseek(fds[0], (off_t)in->read, SEEK_SET);
	if (in->used && !in->net && !in->src_eof)
		in->src = fds[0];
	else
		shut(&fds[0]);
	for (int i = C_OUT; i <= C_ERR; i++) {
		struct chan *c = &t->chan[i];

		if (c->used && !c->net)
			c->dst = fds[i];
		else
			shut(&fds[i]); /* also what slurmstepd gives a task whose stdio does not pass it */
	}
}

void relay_detach(struct task *t)
{
	shut(&t->chan[C_IN].src);
	shut(&t->chan[C_OUT].dst);
	shut(&t->chan[C_ERR].dst);
}

void relay_close(struct task *t)
{
	for (int i = 0; i < C_COUNT; i++) {
		struct chan *c = &t->chan[i];

		shut(&c->src);
		shut(&c->dst);
		c->used = false;
		c->len = 0;
	}
}

static bool wants_read(const struct chan *c)
{
	return c->used && !c->len && c->src >= 0 && !c->src_eof && (!c->last || c->left) && c->dst >= 0;
}

struct pollfd relay_poll(const struct chan *c)
{
	struct pollfd p = { .fd = -1 };

	if (c->net)
		return p;
	if (c->used && c->len && c->dst >= 0)
		p = (struct pollfd){ .fd = c->dst, .events = POLLOUT };
	else if (wants_read(c))
		p = (struct pollfd){ .fd = c->src, .events = POLLIN };
	return p;
}

/* No reader inside or outside any more. */
static void broken(struct chan *c, bool input)
{
	c->len = 0;
	c->src_eof = true;
	shut(&c->src); /* output: the task gets SIGPIPE, as from a closed reader */
	if (input)
		shut(&c->dst);
}

static void end_of_source(struct chan *c, bool input)
{
	c->src_eof = true;
	shut(&c->src);
	if (input)
		shut(&c->dst);
}

static void take(struct chan *c, bool input)
{
	size_t want = c->last && c->left < RELAY_BYTES ? c->left : RELAY_BYTES;
	ssize_t n = read(c->src, c->buf, want);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		end_of_source(c, input);
		return;
	}
	if (c->last)
		c->left -= (size_t)n;
	c->read += (uint64_t)n;
	c->off = 0;
	c->len = (uint32_t)n;
}

/* false: the descriptor takes nothing now. */
static bool give(struct chan *c, bool input)
{
	size_t size = c->len;
	struct stat st = { 0 };
	ssize_t n;

	if (fstat(c->dst, &st) == 0 && S_ISSOCK(st.st_mode)) {
		n = send(c->dst, c->buf + c->off, size, MSG_DONTWAIT | MSG_NOSIGNAL);
	} else {
		if (!S_ISREG(st.st_mode) && size > PIPE_BUF)
			size = PIPE_BUF;
		n = write(c->dst, c->buf + c->off, size);
	}
	if (n >= 0) {
		c->off += (uint32_t)n;
		c->len -= (uint32_t)n;
		return true;
	}
	switch (errno) {
	case EAGAIN:
	case EINTR:
		return false;
	case ENOSPC:
	case EDQUOT:
	case EIO:
	case EFBIG:
	case ESTALE: /* the task's own write would have failed; what it writes later may fit again */
		c->len = 0;
		return true;
	default:
		broken(c, input);
		return false;
	}
}

void relay_step(struct chan *c, bool input)
{
	if (!c->used || c->net)
		return;
	if (wants_read(c))
		take(c, input);
	else if (c->len && c->dst >= 0)
		give(c, input);
	if (c->src_eof && !c->len && input)
		shut(&c->dst);
}

static size_t pending(int fd)
{
	int n = 0;

	return fd >= 0 && ioctl(fd, FIONREAD, &n) == 0 && n > 0 ? (size_t)n : 0;
}

void relay_last(struct task *t)
{
	for (int i = C_OUT; i < C_COUNT; i++) {
		struct chan *c = &t->chan[i];

		if (!c->used)
			continue;
		c->last = true;
		c->left = pending(c->src);
	}
	broken(&t->chan[C_IN], true); /* nobody reads it any more */
}

bool relay_done(const struct task *t)
{
	for (int i = C_OUT; i < C_COUNT; i++) {
		const struct chan *c = &t->chan[i];

		if (c->used && (c->len || (c->left && !c->src_eof)))
			return false;
	}
	return true;
}

void relay_flush(struct task *t, long long deadline_ms)
{
	for (int i = C_OUT; i < C_COUNT; i++) {
		struct chan *c = &t->chan[i];
		size_t left;

		if (!c->used || c->net || c->dst < 0)
			continue;
		left = pending(c->src);
		while (c->len || (left && wants_read(c))) {
			uint64_t before = c->read;

			if (c->len) {
				struct pollfd p = { .fd = c->dst, .events = POLLOUT };
				long long ms = deadline_ms - now_ms();

				if (ms <= 0 || poll(&p, 1, (int)ms) <= 0)
					break;
				if (!give(c, false) && !c->len)
					break;
				continue;
			}
			take(c, false);
			if (c->read == before)
				break;
			left -= c->read - before < left ? c->read - before : left;
		}
	}
}
