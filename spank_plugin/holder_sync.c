/* SPDX-License-Identifier: Apache-2.0 */
/* How holder and shepherd tell init that they are up: one line through a pipe. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "capsule.h"
#include "util.h"

void sync_ready(int fd, pid_t shepherd)
{
	char text[64];
	int n = snprintf(text, sizeof(text), "R %d %d", shepherd ? getppid() : getpid(), shepherd);

	if (write_all(fd, text, (size_t)n) < 0)
		_exit(1);
	close(fd);
}

void sync_failed(int fd, const char *step, int err)
{
	char text[512];
	int n = snprintf(text, sizeof(text), "E %s: %s", step, strerror(err));

	if (n > 0)
		write_all(fd, text, (size_t)n < sizeof(text) ? (size_t)n : sizeof(text) - 1);
	close(fd);
}
