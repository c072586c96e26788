/* SPDX-License-Identifier: Apache-2.0 */
/* The options that sbatch and srun get, and what was given. */
#ifndef GPUCR_OPTIONS_H
#define GPUCR_OPTIONS_H

#include <slurm/spank.h>
#include <stdbool.h>

#define OPTION_ON "checkpoint-on-preempt"
#define OPTION_OFF "no-checkpoint"
#define OPTION_TIMEOUT "checkpoint-on-timeout"
#define OPTION_RESTORE "restore-from"

struct options {
	bool on, off; /* on: also by an option that means nothing without protection */
	bool on_timeout;
	char interval[64];
	char dir[4096];
	char nccl[8];
	char files[16];
	char io_uring[8];
	char rounds[16];
	char restore[32]; /* the checkpoint from which a new job goes on */
};

extern struct options options;
/* Called when an option that switches protection on or off was given in sbatch or srun (not remotely). */
extern void (*options_changed)(void);

void options_register(spank_t sp);
bool options_protect(void); /* on, and not off */
bool valid_nccl(const char *s);

#endif
