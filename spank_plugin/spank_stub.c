/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "spank_stub.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct stub stub;

spank_context_t spank_context(void)
{
	return stub.context;
}

spank_err_t spank_option_register(spank_t sp, struct spank_option *o)
{
	(void)sp;
	if (stub.noptions == MAX_STUB_OPTIONS || strncmp(o->usage, "[gpucr]", 7))
		return ESPANK_BAD_ARG;
	stub.options[stub.noptions++] = *o;
	return ESPANK_SUCCESS;
}

int stub_option(const char *name, const char *arg, int remote)
{
	for (int i = 0; i < stub.noptions; i++)
		if (!strcmp(stub.options[i].name, name))
			return stub.options[i].cb(stub.options[i].val, arg, remote);
	return -99;
}

spank_err_t spank_get_item(spank_t sp, spank_item_t item, ...)
{
	spank_err_t r = ESPANK_SUCCESS;
	unsigned *out;
	va_list ap;

	(void)sp;
	va_start(ap, item);
	out = va_arg(ap, unsigned *);
	switch (item) {
	case S_JOB_ID: *out = stub.job; break;
	case S_JOB_STEPID: *out = stub.step; break;
	case S_JOB_NNODES: *out = stub.nodes; break;
	case S_TASK_GLOBAL_ID: *out = stub.rank; break;
	case S_JOB_NODEID: *out = stub.nodeid; break;
	default: r = ESPANK_NOT_AVAIL;
	}
	va_end(ap);
	return r;
}

spank_err_t spank_getenv(spank_t sp, const char *name, char *buf, int len)
{
	const char *v = getenv(name);

	(void)sp;
	if (!v)
		return ESPANK_ENV_NOEXIST;
	snprintf(buf, (size_t)len, "%s", v);
	return ESPANK_SUCCESS;
}

spank_err_t spank_unsetenv(spank_t sp, const char *name)
{
	(void)sp;
	unsetenv(name);
	return ESPANK_SUCCESS;
}

spank_err_t spank_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	(void)sp;
	setenv(name, value, overwrite);
	return ESPANK_SUCCESS;
}

spank_err_t spank_job_control_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	(void)sp;
	(void)overwrite;
	size_t n = strlen(stub.control);

	snprintf(stub.control + n, sizeof(stub.control) - n, "%s%s=%s", n ? " " : "", name, value);
	return ESPANK_SUCCESS;
}

spank_err_t spank_prepend_task_argv(spank_t sp, int argc, const char *argv[])
{
	(void)sp;
	stub.argv[0] = '\0';
	for (int i = 0; i < argc; i++) {
		strcat(stub.argv, argv[i]);
		if (i + 1 < argc)
			strcat(stub.argv, " ");
	}
	return ESPANK_SUCCESS;
}

void slurm_spank_log(const char *format, ...)
{
	va_list ap;

	va_start(ap, format);
	vsnprintf(stub.said, sizeof(stub.said), format, ap);
	va_end(ap);
}

void slurm_error(const char *format, ...)
{
	va_list ap;

	va_start(ap, format);
	vsnprintf(stub.error, sizeof(stub.error), format, ap);
	va_end(ap);
}
