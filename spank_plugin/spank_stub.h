/* SPDX-License-Identifier: Apache-2.0 */
/* SPANK as the tests play it. */
#ifndef GPUCR_SPANK_STUB_H
#define GPUCR_SPANK_STUB_H

#include <slurm/spank.h>

#define MAX_STUB_OPTIONS 16

extern struct stub {
	spank_context_t context;
	unsigned job, step, nodes, rank, nodeid;
	struct spank_option options[MAX_STUB_OPTIONS];
	int noptions;
	char argv[4096];    /* what was prepended, joined by blanks */
	char control[256];  /* NAME=value of spank_job_control_setenv, joined by blanks */
	char error[1024];   /* last slurm_error */
	char said[1024];    /* last slurm_spank_log */
} stub;

/* Call an option's callback as Slurm does; its return value, or -99 when it is not registered. */
int stub_option(const char *name, const char *arg, int remote);

#endif
