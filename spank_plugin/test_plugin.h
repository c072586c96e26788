/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUCR_TEST_PLUGIN_H
#define GPUCR_TEST_PLUGIN_H

#include <slurm/spank.h>

int slurm_spank_init(spank_t sp, int ac, char **av);
int slurm_spank_init_post_opt(spank_t sp, int ac, char **av);
int slurm_spank_task_init(spank_t sp, int ac, char **av);

/* Run a case in a process of its own, since the plugin keeps state like in sbatch; its exit status. */
int in_process(void (*test)(void));
/* The cases of test_submission.c; how many failed. */
int test_submission(void);

#endif
