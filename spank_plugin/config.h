/* SPDX-License-Identifier: Apache-2.0 */
/* The plugin's line in plugstack.conf. */
#ifndef GPUCR_CONFIG_H
#define GPUCR_CONFIG_H

#include <stdbool.h>

struct config {
	char agent_socket[108]; /* a sun_path */
	char task[256];
	int signal, signal_time_s;
	bool fail_unprotected;
	char nccl[8]; /* for jobs with GPUs whose user says nothing */
	char nccl_library[256];
};

void config_defaults(struct config *c);
/* Apply one key=value; NULL, or why it is refused. */
const char *config_apply(struct config *c, const char *arg);

#endif
