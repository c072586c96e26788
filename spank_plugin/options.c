/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "options.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

enum { ON, OFF, INTERVAL, DIR, NCCL, FILES, IO_URING, TIMEOUT, ROUNDS, RESTORE };

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

static bool valid_files(const char *s)
{
	return !strcmp(s, "rollback") || !strcmp(s, "keep") || !strcmp(s, "refuse");
}

static bool valid_rounds(const char *s)
{
	return *s && strspn(s, "0123456789") == strlen(s);
}

/* Take the value of an option, or say what it may be. */
static int take(char *where, size_t size, const char *name, const char *arg, bool (*valid)(const char *), const char *how)
{
	if (!arg || !valid(arg) || strlen(arg) >= size) {
		slurm_error("gpucr: --%s=%s: %s", name, arg ? arg : "", how);
		return -1;
	}
	strcpy(where, arg);
	return 0;
}

/* Also the values of the key nccl in plugstack.conf. */
bool valid_nccl(const char *s)
{
	return !strcmp(s, "keep") || !strcmp(s, "safe") || !strcmp(s, "rebuild");
}

static bool valid_io_uring(const char *s)
{
	return !strcmp(s, "keep") || !strcmp(s, "hide");
}

static bool valid_dir(const char *s)
{
	return *s == '/';
}

/* Such as 20261127T232501Z-3f9a. */
static bool valid_checkpoint(const char *s)
{
	static const char form[] = "00000000T000000Z-xxxx";
	size_t n = strlen(form);

	if (strlen(s) != n)
		return false;
	for (size_t i = 0; i < n; i++) {
		unsigned char c = (unsigned char)s[i];

		if (form[i] == '0' ? !isdigit(c) : form[i] == 'x' ? !isxdigit(c) || isupper(c) : c != form[i])
			return false;
	}
	return true;
}

/* Together they would run the script from its beginning. */
static int contradiction(void)
{
	if (spank_context() != S_CTX_ALLOCATOR || !*options.restore || !options.off)
		return 0;
	slurm_error("gpucr: --%s and --%s contradict each other", OPTION_RESTORE, OPTION_OFF);
	return -1;
}

/* Slurm calls with the same value twice, once for the script and once for the command line. The argument of a flag is
 * "(null)" in srun, "" in slurmstepd: never looked at. */
static int given(int which, const char *arg, int remote)
{
	int r = 0;

	switch (which) {
	case ON:
		options.on = true;
		break;
	case OFF:
		options.off = true;
		r = contradiction();
		break;
	case INTERVAL:
		r = take(options.interval, sizeof(options.interval), "checkpoint-interval", arg, valid_duration,
			 "write 90s, 30m, 1h30m or 2d");
		break;
	case DIR:
		r = take(options.dir, sizeof(options.dir), "checkpoint-dir", arg, valid_dir, "an absolute path is needed");
		break;
	case FILES:
		r = take(options.files, sizeof(options.files), "checkpoint-files", arg, valid_files,
			 "rollback, keep or refuse");
		break;
	case IO_URING:
		r = take(options.io_uring, sizeof(options.io_uring), "checkpoint-io-uring", arg, valid_io_uring, "write keep or hide");
		break;
	case TIMEOUT:
		options.on_timeout = options.on = true;
		break;
	case ROUNDS:
		r = take(options.rounds, sizeof(options.rounds), "checkpoint-rounds", arg, valid_rounds, "a number is needed");
		break;
	case RESTORE:
		r = take(options.restore, sizeof(options.restore), OPTION_RESTORE, arg, valid_checkpoint,
			 "the name of a checkpoint is needed, as `gpucr list` shows it");
		if (r == 0) {
			options.on = true;
			r = contradiction();
		}
		break;
	case NCCL:
		r = take(options.nccl, sizeof(options.nccl), "checkpoint-nccl", arg, valid_nccl, "write keep, safe or rebuild");
		break;
	}
	if (!remote && options_changed && (which == ON || which == OFF || which == TIMEOUT || which == RESTORE))
		options_changed();
	return r;
}

static struct spank_option table[] = {
	{ OPTION_ON, NULL, "[gpucr] when the job is preempted, write a checkpoint, requeue it and go on from there", 0, ON, given },
	{ "checkpoint-interval", "TIME", "[gpucr] write a checkpoint every TIME, such as 30m or 1h", 1, INTERVAL, given },
	{ "checkpoint-dir", "PATH", "[gpucr] keep the checkpoints below this absolute path", 1, DIR, given },
	{ "checkpoint-nccl", "keep|safe|rebuild",
	  "[gpucr] NCCL between GPUs of one node: at full speed, and not protected (keep), over sockets (safe), or at full speed "
	  "and made again after each checkpoint (rebuild)", 1, NCCL, given },
	{ "checkpoint-files", "POLICY", "[gpucr] files that grew after the checkpoint: rollback (default), keep or refuse", 1, FILES, given },
	{ "checkpoint-io-uring", "keep|hide",
	  "[gpucr] programs may use io_uring, and cannot be saved while they do (keep), or are told that the kernel has none (hide)",
	  1, IO_URING, given },
	{ OPTION_TIMEOUT, NULL, "[gpucr] write a checkpoint before the time limit, requeue the job and go on", 0, TIMEOUT, given },
	{ "checkpoint-rounds", "N", "[gpucr] do that at most N times", 1, ROUNDS, given },
	{ OPTION_RESTORE, "CHECKPOINT", "[gpucr] go on from a checkpoint of another of your jobs; the script is not run", 1, RESTORE, given },
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
