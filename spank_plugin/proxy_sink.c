/* SPDX-License-Identifier: Apache-2.0 */
/* Our stdout and stderr belong to the job's script as well: they are never switched to non-blocking, but written after
 * poll() and in pieces that a writable pipe takes whole. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proxy.h"
#include "util.h"

#define REGULAR_BYTES (1u << 20) /* a piece for a regular file; between pieces signals are looked at */

struct sink own_sink[2] = { { .fd = 1 }, { .fd = 2 } };
struct sink *task_sink[2] = { &own_sink[0], &own_sink[1] };
static struct sink file_sink[2] = { { .fd = -1 }, { .fd = -1 } };

void sinks_init(void)
{
	for (int i = 0; i < 2; i++)
		if (fcntl(own_sink[i].fd, F_GETFD) < 0)
			own_sink[i].broken = true; /* we were started with a closed descriptor */
}

static int open_file(const char *path, bool append, const char *what)
{
	int fd = open(path, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC | (append ? 0 : O_TRUNC), 0666);

	if (fd < 0)
		complain("Could not open %s file %s: %s", what, path, strerror(errno));
	return fd;
}

int sinks_plan(const char *out, const char *err, bool append)
{
	const char *const given[2] = { out, err }, *const names[2] = { "stdout", "stderr" };

	for (int i = 0; i < 2; i++) {
		const char *v = given[i];

		if (!v || !*v)
			continue;
		task_sink[i] = &file_sink[i];
		if (strncmp(v, "file:", 5))
			continue; /* none */
		/* One description for both, so that lines keep their order and nothing is truncated twice. */
		if (i == 1 && out && !strcmp(out, err)) {
			task_sink[1] = &file_sink[0];
			continue;
		}
		file_sink[i].fd = open_file(v + 5, append, names[i]);
		if (file_sink[i].fd < 0)
			return -1;
	}
	return 0;
}

bool sink_busy(const struct sink *s)
{
	return s->len > 0;
}

void sink_put(struct sink *s, const void *data, size_t len)
{
	if (s->broken || s->fd < 0 || !len)
		return;
	if (s->off && s->off + s->len + len > s->cap) {
		memmove(s->buf, s->buf + s->off, s->len);
		s->off = 0;
	}
	s->buf = grow(s->buf, &s->cap, s->off + s->len + len, 1);
	memcpy(s->buf + s->off + s->len, data, len);
	s->len += len;
}

struct pollfd sink_poll(const struct sink *s)
{
	return (struct pollfd){ .fd = s->len ? s->fd : -1, .events = POLLOUT };
}

void sink_step(struct sink *s)
{
	size_t size = s->len;
	struct stat st = { 0 };
	ssize_t n;

	if (!size)
		return;
	if (fstat(s->fd, &st) == 0 && S_ISSOCK(st.st_mode)) {
		n = send(s->fd, s->buf + s->off, size, MSG_DONTWAIT | MSG_NOSIGNAL);
	} else {
		size_t most = S_ISREG(st.st_mode) ? REGULAR_BYTES : PIPE_BUF;

		n = write(s->fd, s->buf + s->off, size < most ? size : most);
	}
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n < 0) {
		/* A full disk may have room again; everything else is for good. Nobody is told, as srun does. */
		s->broken = errno != ENOSPC && errno != EDQUOT && errno != EIO && errno != ESTALE;
		n = (ssize_t)s->len;
	}
	s->off += (size_t)n;
	s->len -= (size_t)n;
	if (!s->len)
		s->off = 0;
}

void sink_try(struct sink *s)
{
	for (int i = 0; i < 64 && s->len; i++) {
		struct pollfd p = sink_poll(s);

		if (poll(&p, 1, 0) <= 0 || p.fd < 0)
			return;
		sink_step(s);
	}
}

bool sinks_idle(void)
{
	return !own_sink[0].len && !own_sink[1].len && !file_sink[0].len && !file_sink[1].len;
}

void sinks_each(void (*what)(struct sink *))
{
	for (int i = 0; i < 2; i++) {
		what(&own_sink[i]);
		what(&file_sink[i]);
	}
}
