/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "options.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

enum { ON, OFF, INTERVAL, DIR, NCCL };

struct options options;
void (*options_changed)(void);

/* "90", "90s", "5m", "1h30m", "2d": the grammar of gpucr itself, not Slurm's minutes. */
static bool valid_duration(const char *s)
{
	if (!isdigit((unsigned char)*s))
		return false;
	while (*s) {
		if (!isdigit((unsigned char)*s))
			return false;
		while (isdigit((unsigned char)*s))
			s++;
		if (!strncmp(s, "ms", 2))
			s += 2;
		else if (*s && strchr("smhd", *s))
			s++;
		else if (*s)
			return false;
	}
	return true;
}

/* Slurm calls with the same value twice, once for the script and once for the command line. The argument of a flag is
 * "(null)" in srun, "" in slurmstepd: never looked at. */
static int given(int which, const char *arg, int remote)
{
	switch (which) {
	case ON:
		options.on = true;
		break;
	case OFF:
		options.off = true;
		break;
	case INTERVAL:
		if (!arg || !valid_duration(arg) || strlen(arg) >= sizeof(options.interval)) {
			slurm_error("gpucr: --checkpoint-interval=%s: write 90s, 30m, 1h30m or 2d", arg ? arg : "");
			return -1;
		}
		strcpy(options.interval, arg);
		break;
	case DIR:
		if (!arg || *arg != '/' || strlen(arg) >= sizeof(options.dir)) {
			slurm_error("gpucr: --checkpoint-dir=%s: an absolute path is needed", arg ? arg : "");
			return -1;
		}
		strcpy(options.dir, arg);
		break;
	case NCCL:
		if (!arg || (strcmp(arg, "keep") && strcmp(arg, "safe"))) {
			slurm_error("gpucr: --checkpoint-nccl=%s: write keep or safe", arg ? arg : "");
			return -1;
		}
		options.nccl_safe = !strcmp(arg, "safe");
		break;
	}
	if (!remote && options_changed && (which == ON || which == OFF))
		options_changed();
	return 0;
}

static struct spank_option table[] = {
	{ OPTION_ON, NULL, "[gpucr] when the job is preempted, write a checkpoint, requeue it and go on from there", 0, ON, given },
	{ "checkpoint-interval", "TIME", "[gpucr] write a checkpoint every TIME, such as 30m or 1h", 1, INTERVAL, given },
	{ "checkpoint-dir", "PATH", "[gpucr] keep the checkpoints below this absolute path", 1, DIR, given },
	{ "checkpoint-nccl", "keep|safe",
	  "[gpucr] NCCL between GPUs of one node: at full speed, and not protected (keep, the default), or over sockets", 1, NCCL, given },
	{ OPTION_OFF, NULL, "[gpucr] do not protect this job or step", 0, OFF, given },
};

void options_register(spank_t sp)
{
	for (size_t i = 0; i < sizeof(table) / sizeof(*table); i++)
		if (spank_option_register(sp, &table[i]) != ESPANK_SUCCESS)
			slurm_error("gpucr: could not register --%s", table[i].name);
}

bool options_protect(void)
{
	return options.on && !options.off;
}
