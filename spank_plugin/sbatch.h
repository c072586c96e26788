/* SPDX-License-Identifier: Apache-2.0 */
/* What the plugin reads from sbatch's own command line and the job script, before sbatch parses them. */
#ifndef GPUCR_SBATCH_H
#define GPUCR_SBATCH_H

#include <stdbool.h>

struct submission {
	bool on, off;           /* our flags on the command line */
	bool cli_signal;        /* --signal on the command line */
	bool script_signal, script_open_mode; /* in #SBATCH lines */
};

extern const char *sbatch_cmdline; /* path, for the tests */
void sbatch_scan(struct submission *s);

#endif
