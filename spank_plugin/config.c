/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "config.h"
#include "options.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void config_defaults(struct config *c)
{
	memset(c, 0, sizeof(*c));
	strcpy(c->agent_socket, "/run/gpucr/agent.sock");
	strcpy(c->task, "/usr/lib/gpucr/gpucr-task");
	strcpy(c->nccl, "rebuild");
	strcpy(c->nccl_library, "/usr/lib/gpucr/libgpucr_nccl.so");
	c->signal = 50;
	c->signal_time_s = 60;
}

static const char *set_path(char *to, size_t size, const char *value)
{
	if (*value != '/')
		return "an absolute path is needed";
	if (strlen(value) >= size)
		return "the path is too long";
	strcpy(to, value);
	return NULL;
}

static const char *set_number(int *to, long min, long max, const char *value)
{
	char *end;
	long v;

	errno = 0;
	v = strtol(value, &end, 10);
	if (!*value || *end || errno || v < min || v > max)
		return "the number is malformed or out of range";
	*to = (int)v;
	return NULL;
}

const char *config_apply(struct config *c, const char *arg)
{
	const char *value = strchr(arg, '=');
	size_t n = value ? (size_t)(value - arg) : 0;

	if (!value)
		return "key=value is needed";
	value++;
#define KEY(name) (n == strlen(name) && !strncmp(arg, name, n))
	if (KEY("agent_socket"))
		return set_path(c->agent_socket, sizeof(c->agent_socket), value);
	if (KEY("task"))
		return set_path(c->task, sizeof(c->task), value);
	if (KEY("signal")) /* a real-time signal leaves USR1 and USR2 to the job; 34 is the first one free in glibc */
		return set_number(&c->signal, 34, 64, value);
	if (KEY("signal_time")) /* Slurm's own limit for --signal */
		return set_number(&c->signal_time_s, 0, 65535, value);
	if (KEY("when_unprotected")) {
		c->fail_unprotected = !strcmp(value, "fail");
		return c->fail_unprotected || !strcmp(value, "run") ? NULL : "run or fail is needed";
	}
	if (KEY("nccl")) {
		if (!valid_nccl(value))
			return "keep, safe or rebuild is needed";
		strcpy(c->nccl, value);
		return NULL;
	}
	if (KEY("nccl_library"))
		return set_path(c->nccl_library, sizeof(c->nccl_library), value);
#undef KEY
	return "unknown key";
}
