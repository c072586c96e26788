/* SPDX-License-Identifier: Apache-2.0 */
/* The options that sbatch and srun get, and what was given. */
#ifndef GPUCR_OPTIONS_H
#define GPUCR_OPTIONS_H

#include <slurm/spank.h>
#include <stdbool.h>

#define OPTION_ON "checkpoint-on-preempt"
#define OPTION_OFF "no-checkpoint"

struct options {
	bool on, off;
	bool nccl_safe; /* NCCL without the transports that cannot be restored */
	char interval[64];
	char dir[4096];
};

extern struct options options;
/* Called when OPTION_ON or OPTION_OFF was given in sbatch or srun (not remotely). */
extern void (*options_changed)(void);

void options_register(spank_t sp);
bool options_protect(void); /* on, and not off */

#endif
