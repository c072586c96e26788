/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "util.h"

static uint32_t get_le(const unsigned char *p, int n)
{
	uint32_t v = 0;

	for (int i = n - 1; i >= 0; i--)
		v = v << 8 | p[i];
	return v;
}

static void put_le(unsigned char *p, uint32_t v, int n)
{
	for (int i = 0; i < n; i++, v >>= 8)
		p[i] = v & 0xff;
}

static bool known_type(uint32_t t)
{
	return (t >= GC_HELLO && t <= GC_PLACED) || (t >= GC_SPAWN && t <= GC_SRUNSIGNAL) || (t >= GC_READY && t <= GC_ADOPTED) ||
	       t == GC_HOOK || t == GC_HOOKRESULT || t == GC_NCCL || t == GC_NCCLSTATE;
}

void rx_init(struct rx *rx, int fd)
{
	memset(rx, 0, sizeof(*rx));
	rx->fd = fd;
}

void rx_close(struct rx *rx)
{
	frame_clear(&rx->cur);
	if (rx->fd >= 0)
		close(rx->fd);
	rx_init(rx, -1);
}

/* One recvmsg() that keeps what comes by SCM_RIGHTS. */
static ssize_t receive(struct rx *rx, void *to, size_t want)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int) * WIRE_MAX_FDS)];
		struct cmsghdr align;
	} control;
	struct iovec iov = { .iov_base = to, .iov_len = want };
	struct msghdr mh = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control) };
	ssize_t n;

	do {
		n = recvmsg(rx->fd, &mh, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	} while (n < 0 && errno == EINTR);
	if (n < 0)
		return n;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&mh); c; c = CMSG_NXTHDR(&mh, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		int count = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		for (int i = 0; i < count; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(c) + sizeof(int) * i, sizeof(fd));
			if (rx->cur.nfds < WIRE_MAX_FDS)
				rx->cur.fds[rx->cur.nfds++] = fd;
			else
				close(fd);
		}
	}
	if (mh.msg_flags & MSG_CTRUNC) {
		errno = EPROTO;
		return -1;
	}
	return n;
}

static int check_header(struct rx *rx)
{
	const unsigned char *h = rx->header;
	struct frame *f = &rx->cur;

	f->type = get_le(h + 4, 4);
	f->len = get_le(h + 8, 4);
	if (h[0] != 'G' || h[1] != 'C' || get_le(h + 2, 2) != WIRE_VERSION || !known_type(f->type) ||
	    f->len > WIRE_MAX_PAYLOAD) {
		f->len = 0;
		errno = EPROTO;
		return -1;
	}
	if (f->len) {
		f->payload = malloc(f->len);
		if (!f->payload)
			return -1;
	}
	return 0;
}

static int check_payload(const struct frame *f)
{
	if (!f->len)
		return 0;
	if (f->payload[f->len - 1] == '\0') {
		const char *p = f->payload, *end = p + f->len;

		while (p < end && strchr(p, '='))
			p += strlen(p) + 1;
		if (p == end)
			return 0;
	}
	errno = EPROTO;
	return -1;
}

int rx_read(struct rx *rx, struct frame *out)
{
	struct frame *f = &rx->cur;

	for (;;) {
		ssize_t n;

		if (rx->got < WIRE_HEADER)
			n = receive(rx, rx->header + rx->got, WIRE_HEADER - rx->got);
		else
			n = receive(rx, f->payload + (rx->got - WIRE_HEADER), f->len - (rx->got - WIRE_HEADER));
		if (n < 0)
			return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
		if (n == 0) {
			errno = rx->got ? EPROTO : 0;
			return -1;
		}
		rx->got += (uint32_t)n;
		if (rx->got == WIRE_HEADER && check_header(rx) < 0)
			return -1;
		if (rx->got < WIRE_HEADER || rx->got < WIRE_HEADER + f->len)
			continue;
		if (check_payload(f) < 0)
			return -1;
		*out = *f;
		memset(f, 0, sizeof(*f));
		rx->got = 0;
		return 1;
	}
}

int rx_wait(struct rx *rx, struct frame *out, int timeout_ms)
{
	long long end = now_ms() + timeout_ms;

	for (;;) {
		struct pollfd p = { .fd = rx->fd, .events = POLLIN };
		long long left = timeout_ms < 0 ? -1 : end - now_ms();
		int r = rx_read(rx, out);

		if (r)
			return r;
		if (timeout_ms >= 0 && left <= 0)
			return 0;
		if (poll(&p, 1, (int)left) < 0 && errno != EINTR)
			return -1;
	}
}

void rx_drain(struct rx *rx, void (*handle)(struct frame *), void (*gone)(void))
{
	int r = 0, fd = rx->fd;
	struct frame f;

	while (rx->fd == fd && fd >= 0 && (r = rx_read(rx, &f)) == 1) {
		handle(&f);
		frame_clear(&f);
	}
	if (rx->fd == fd && r < 0)
		gone();
}

void frame_clear(struct frame *f)
{
	for (int i = 0; i < f->nfds; i++)
		if (f->fds[i] >= 0)
			close(f->fds[i]);
	free(f->payload);
	memset(f, 0, sizeof(*f));
}

const char *frame_next(const struct frame *f, const char *key, size_t *pos)
{
	size_t n = strlen(key);

	while (*pos < f->len) {
		const char *s = f->payload + *pos;

		*pos += strlen(s) + 1;
		if (!strncmp(s, key, n) && s[n] == '=')
			return s + n + 1;
	}
	return NULL;
}

const char *frame_get(const struct frame *f, const char *key)
{
	size_t pos = 0;

	return frame_next(f, key, &pos);
}

long long frame_int(const struct frame *f, const char *key, long long fallback)
{
	const char *s = frame_get(f, key);
	char *end;
	long long v;

	if (!s || !*s)
		return fallback;
	errno = 0;
	v = strtoll(s, &end, 10);
	return *end || errno ? fallback : v;
}

size_t frame_count(const struct frame *f, const char *key)
{
	size_t pos = 0, n = 0;

	while (frame_next(f, key, &pos))
		n++;
	return n;
}

char **frame_vector(const struct frame *f, const char *key)
{
	size_t pos = 0, n = 0;
	char **v = calloc(frame_count(f, key) + 1, sizeof(*v));
	const char *s;

	while (v && (s = frame_next(f, key, &pos)))
		v[n++] = (char *)s;
	return v;
}

int frame_take_fd(struct frame *f, int i)
{
	int fd;

	if (i >= f->nfds)
		return -1;
	fd = f->fds[i];
	f->fds[i] = -1;
	return fd;
}

void msg_init(struct msg *m, uint32_t type)
{
	memset(m, 0, sizeof(*m));
	m->type = type;
}

void msg_str(struct msg *m, const char *key, const char *value)
{
	size_t k = strlen(key), v = strlen(value), need = k + v + 2;

	if (m->bad)
		return;
	if (m->len + need > WIRE_MAX_PAYLOAD) {
		m->bad = true;
		return;
	}
	if (WIRE_HEADER + m->len + need > m->cap) {
		size_t cap = 2 * (WIRE_HEADER + m->len + need);
		char *p = realloc(m->buf, cap);

		if (!p) {
			m->bad = true;
			return;
		}
		m->buf = p;
		m->cap = cap;
	}
	char *to = m->buf + WIRE_HEADER + m->len;
	memcpy(to, key, k);
	to[k] = '=';
	memcpy(to + k + 1, value, v + 1);
	m->len += need;
}

void msg_int(struct msg *m, const char *key, long long value)
{
	msg_fmt(m, key, "%lld", value);
}

void msg_fmt(struct msg *m, const char *key, const char *fmt, ...)
{
	char text[4096]; /* longer text is cut: it is for people */
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	msg_str(m, key, text);
}

static int send_all(int fd, const char *p, size_t len, const int *fds, int nfds)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int) * WIRE_MAX_FDS)];
		struct cmsghdr align;
	} control = { 0 };

	while (len) {
		struct iovec iov = { .iov_base = (char *)p, .iov_len = len };
		struct msghdr mh = { .msg_iov = &iov, .msg_iovlen = 1 };
		ssize_t n;

		if (nfds) { /* only with the first byte */
			mh.msg_control = &control;
			mh.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)nfds);
			struct cmsghdr *c = CMSG_FIRSTHDR(&mh);
			c->cmsg_level = SOL_SOCKET;
			c->cmsg_type = SCM_RIGHTS;
			c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)nfds);
			memcpy(CMSG_DATA(c), fds, sizeof(int) * (size_t)nfds);
		}
		n = sendmsg(fd, &mh, MSG_NOSIGNAL | MSG_DONTWAIT);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN) {
			struct pollfd pf = { .fd = fd, .events = POLLOUT };
			int r = poll(&pf, 1, WIRE_SEND_MS);

			if (r == 0)
				errno = ETIMEDOUT;
			if (r == 0 || (r < 0 && errno != EINTR))
				return -1;
			continue;
		}
		if (n < 0)
			return -1;
		nfds = 0;
		p += n;
		len -= (size_t)n;
	}
	return 0;
}

static void put_header(unsigned char *h, const struct msg *m)
{
	h[0] = 'G';
	h[1] = 'C';
	put_le(h + 2, WIRE_VERSION, 2);
	put_le(h + 4, m->type, 4);
	put_le(h + 8, (uint32_t)m->len, 4);
}

void *msg_bytes(struct msg *m, size_t *size)
{
	char *out = NULL;

	if (!m->bad && (m->buf || (m->buf = malloc(WIRE_HEADER)))) {
		out = m->buf;
		put_header((unsigned char *)out, m);
		*size = WIRE_HEADER + m->len;
	} else {
		free(m->buf);
	}
	msg_init(m, 0);
	return out;
}

void msg_copy(struct msg *m, const struct frame *f)
{
	msg_init(m, f->type);
	m->buf = malloc(WIRE_HEADER + (size_t)f->len);
	if (!m->buf) {
		m->bad = true;
		return;
	}
	m->cap = WIRE_HEADER + (size_t)f->len;
	m->len = f->len;
	if (f->len)
		memcpy(m->buf + WIRE_HEADER, f->payload, f->len);
}

int msg_send(struct msg *m, int fd, const int *fds, int nfds)
{
	unsigned char empty[WIRE_HEADER];
	unsigned char *h = m->buf ? (unsigned char *)m->buf : empty;
	int r = -1;

	if (m->bad || nfds > WIRE_MAX_FDS) {
		errno = EMSGSIZE;
	} else {
		put_header(h, m);
		r = send_all(fd, (char *)h, WIRE_HEADER + m->len, fds, nfds);
	}
	int saved = errno;
	free(m->buf);
	msg_init(m, 0);
	errno = saved;
	return r;
}
