/* SPDX-License-Identifier: Apache-2.0 */
/* The Unix sockets that carry frames. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "wire.h"

static int address(struct sockaddr_un *a, const char *path)
{
	memset(a, 0, sizeof(*a));
	a->sun_family = AF_UNIX;
	if (strlen(path) >= sizeof(a->sun_path)) {
		errno = ENAMETOOLONG;
		return -1;
	}
	strcpy(a->sun_path, path);
	return 0;
}

int wire_connect(const char *path)
{
	struct sockaddr_un a;
	int fd;

	if (address(&a, path) < 0)
		return -1;
	/* Non-blocking, so that a full backlog is EAGAIN (try again later) and never a hang. */
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof(a)) < 0) {
		int saved = errno;

		close(fd);
		errno = saved;
		return -1;
	}
	return fd;
}

int wire_connect_trusted(const char *path)
{
	int fd = wire_connect(path);
	unsigned uid;

	if (fd < 0 || (wire_peer(fd, NULL, &uid) == 0 && (uid == 0 || uid == getuid())))
		return fd;
	close(fd);
	errno = EPERM;
	return -1;
}

int wire_listen(const char *path)
{
	struct sockaddr_un a;
	int fd;

	if (address(&a, path) < 0)
		return -1;
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -1;
	unlink(path);
	if (bind(fd, (struct sockaddr *)&a, sizeof(a)) < 0 || listen(fd, SOMAXCONN) < 0) {
		int saved = errno;

		close(fd);
		errno = saved;
		return -1;
	}
	return fd;
}

int wire_peer(int fd, int *pid, unsigned *uid)
{
	struct ucred c;
	socklen_t n = sizeof(c);

	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &c, &n) < 0)
		return -1;
	if (pid)
		*pid = c.pid;
	if (uid)
		*uid = c.uid;
	return 0;
}
