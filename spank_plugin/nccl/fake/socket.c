/* SPDX-License-Identifier: Apache-2.0 */
/* How the ranks of the fake NCCL reach each other. */
#define _GNU_SOURCE
#include <errno.h>
#include <netdb.h>
#include <string.h>

#include "nccl.h"

void put(int fd, const void *data, size_t size)
{
	const char *p = data;

	while (size) {
		ssize_t n = send(fd, p, size, MSG_NOSIGNAL);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			DIE("a peer is gone: %s", strerror(errno));
		p += n;
		size -= (size_t)n;
	}
}

void get(int fd, void *data, size_t size)
{
	char *p = data;

	while (size) {
		ssize_t n = recv(fd, p, size, 0);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			DIE("a peer is gone");
		p += n;
		size -= (size_t)n;
	}
}

static void by_tcp(struct address *a, const char *host)
{
	struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *found;

	if (getaddrinfo(host, NULL, &hints, &found) != 0)
		DIE("host %s is not known", host);
	memcpy(&a->a, found->ai_addr, found->ai_addrlen);
	a->size = found->ai_addrlen;
	freeaddrinfo(found);
}

int listen_at(struct address *a)
{
	const char *host = getenv("FAKE_NCCL_HOST");
	int fd;

	memset(a, 0, sizeof(*a));
	a->a.ss_family = AF_UNIX;
	a->size = sizeof(sa_family_t); /* the kernel chooses an abstract name */
	if (host)
		by_tcp(a, host);
	fd = socket(a->a.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0 || bind(fd, (struct sockaddr *)&a->a, a->size) < 0 || listen(fd, 16) < 0)
		DIE("no socket: %s", strerror(errno));
	a->size = sizeof(a->a);
	if (getsockname(fd, (struct sockaddr *)&a->a, &a->size) < 0)
		DIE("no name: %s", strerror(errno));
	return fd;
}

int connect_to(const struct address *a)
{
	int fd = socket(a->a.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || connect(fd, (const struct sockaddr *)&a->a, a->size) < 0)
		DIE("cannot reach the others: %s", strerror(errno));
	return fd;
}
