/* SPDX-License-Identifier: Apache-2.0 */
/* The plugin in sbatch: command line, script and variables of a submission. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <unistd.h>

#include "options.h"
#include "sbatch.h"
#include "spank_stub.h"
#include "test_check.h"
#include "test_plugin.h"

static char cmdline_path[64], script_path[64];

static void put(const char *path, const char *text, size_t n)
{
	int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0600);

	CHECK(fd >= 0 && write(fd, text, n) == (ssize_t)n);
	close(fd);
}

/* sbatch's command line (words apart by blanks, SCRIPT stands for the script's path) and a script. */
static void submit(const char *words, const char *script, int expect)
{
	char line[512] = "";
	size_t n = 0;
	char *copy = strdup(words), *save;

	for (char *w = strtok_r(copy, " ", &save); w; w = strtok_r(NULL, " ", &save)) {
		strcpy(line + n, strcmp(w, "SCRIPT") ? w : script_path);
		n += strlen(line + n) + 1;
	}
	free(copy);
	put(cmdline_path, line, n);
	put(script_path, script, strlen(script));
	sbatch_cmdline = cmdline_path;
	stub.context = S_CTX_ALLOCATOR;
	CHECK(slurm_spank_init(NULL, 0, NULL) == expect);
}

static void flag_on_command_line(void)
{
	submit("sbatch -p high --checkpoint-on-preempt SCRIPT", "#!/bin/sh\n#SBATCH -n 1\n", 0);
	CHECK_STR("B:50@60", getenv("SBATCH_SIGNAL"));
	CHECK_STR("append", getenv("SBATCH_OPEN_MODE"));
	CHECK_STR(NULL, getenv("SBATCH_REQUEUE"));
	CHECK(stub_option("checkpoint-on-preempt", "(null)", 0) == 0);
	CHECK(slurm_spank_init_post_opt(NULL, 0, NULL) == 0);
	CHECK_STR(NULL, getenv("SBATCH_SIGNAL"));
	CHECK_STR(NULL, getenv("SBATCH_OPEN_MODE"));
	CHECK_STR("50", getenv("GPUCR_SIGNAL"));
	const char *cookie = getenv("GPUCR_COOKIE");
	char want[128];

	CHECK(cookie && strlen(cookie) == 32 && strspn(cookie, "0123456789abcdef") == 32);
	snprintf(want, sizeof(want), "GPUCR_SIGNAL=50 GPUCR_COOKIE=%s", cookie);
	CHECK_STR(want, stub.control);
}

static void cookie_is_of_this_submission(void)
{
	char first[64];

	setenv("GPUCR_COOKIE", "of an outer job", 1);
	submit("sbatch --checkpoint-on-preempt SCRIPT", "#!/bin/sh\n", 0);
	CHECK(strlen(getenv("GPUCR_COOKIE")) == 32);
	strcpy(first, getenv("GPUCR_COOKIE"));
	stub_option("checkpoint-on-preempt", "(null)", 0);
	CHECK_STR(first, getenv("GPUCR_COOKIE"));
	stub_option("no-checkpoint", NULL, 0);
	CHECK_STR(NULL, getenv("GPUCR_COOKIE"));
	setenv("GPUCR_COOKIE", "of an outer job", 1);
	submit("sbatch SCRIPT", "#!/bin/sh\n", 0);
	slurm_spank_init_post_opt(NULL, 0, NULL);
	CHECK_STR(NULL, getenv("GPUCR_COOKIE"));
}

/* Given to sbatch, abbreviated, protects at submission; in the script, when the option is read. */
static void means_protection(const char *option, const char *given, const char *written, const char *value)
{
	char line[256], script[256];

	snprintf(line, sizeof(line), "sbatch %s SCRIPT", given);
	submit(line, "#!/bin/sh\n", 0);
	CHECK_STR("B:50@60", getenv("SBATCH_SIGNAL"));
	snprintf(script, sizeof(script), "#!/bin/sh\n#SBATCH %s\n", written);
	submit("sbatch SCRIPT", script, 0);
	CHECK_STR(NULL, getenv("SBATCH_SIGNAL"));
	CHECK(stub_option(option, value, 0) == 0);
	CHECK_STR("B:50@60", getenv("SBATCH_SIGNAL"));
}

static void options_that_mean_protection(void)
{
	means_protection("checkpoint-on-timeout", "--checkpoint-on-t", "--checkpoint-on-timeout", "(null)");
	means_protection("restore-from", "--rest 20261127T232501Z-3f9a", "--restore-from=20261127T232501Z-3f9a",
			 "20261127T232501Z-3f9a");
	CHECK(strlen(getenv("GPUCR_COOKIE")) == 32);
}

static void restore_without_protection_is_refused(void)
{
	submit("sbatch SCRIPT", "#!/bin/sh\n", 0);
	CHECK(stub_option("no-checkpoint", NULL, 0) == 0);
	CHECK(stub_option("restore-from", "20261127T232501Z-3f9a", 0) < 0);
	CHECK(strstr(stub.error, "contradict"));
	options.off = false;
	CHECK(stub_option("restore-from", "20261127T232501Z-3f9a", 0) == 0);
	CHECK(stub_option("no-checkpoint", NULL, 0) < 0);
	stub.context = S_CTX_LOCAL; /* a step without protection in such a job */
	CHECK(stub_option("no-checkpoint", NULL, 0) == 0);
}

static void flag_in_script(void)
{
	submit("sbatch SCRIPT", "#!/bin/sh\n#SBATCH --checkpoint-on-preempt\n", 0);
	CHECK_STR(NULL, getenv("SBATCH_SIGNAL"));
	CHECK(stub_option("checkpoint-on-preempt", "", 0) == 0);
	CHECK_STR("B:50@60", getenv("SBATCH_SIGNAL"));
}

static void flag_behind_script_is_its_own(void)
{
	submit("sbatch SCRIPT --checkpoint-on-preempt", "#!/bin/sh\n", 0);
	CHECK_STR(NULL, getenv("SBATCH_SIGNAL"));
}

/* A job or its output that is called as its script. */
static void script_as_a_value(void)
{
	static const char *const given[] = {
		"sbatch -J SCRIPT --checkpoint-on-preempt SCRIPT",
		"sbatch --job-name SCRIPT -o SCRIPT --checkpoint-on-preempt SCRIPT",
	};

	for (size_t i = 0; i < sizeof(given) / sizeof(*given); i++) {
		submit(given[i], "#!/bin/sh\n", 0);
		CHECK_STR("B:50@60", getenv("SBATCH_SIGNAL"));
	}
	submit("sbatch -H SCRIPT --checkpoint-on-preempt", "#!/bin/sh\n", 0);
	CHECK_STR(NULL, getenv("SBATCH_SIGNAL")); /* -H has no value */
}

static void script_has_signal(void)
{
	submit("sbatch --checkpoint-on-preempt SCRIPT",
	       "#!/bin/bash\n\n# words\n#SBATCH -n 1 --signal=B:USR1@30\n#SBATCH --open-mode truncate\necho x\n", 0);
	CHECK_STR(NULL, getenv("SBATCH_SIGNAL"));
	CHECK_STR(NULL, getenv("SBATCH_OPEN_MODE"));
	CHECK_STR(NULL, getenv("GPUCR_SIGNAL"));
}

/* sbatch <<END: the script comes through a pipe, and all of it is still there for sbatch. */
static void script_in_a_pipe(void)
{
	static const char script[] = "#!/bin/bash\n#SBATCH --signal=B:USR1@30\n";
	char left[sizeof(script)];
	int ends[2], kept = dup(0);

	CHECK(kept >= 0 && pipe(ends) == 0 && write(ends[1], script, sizeof(script) - 1) == sizeof(script) - 1);
	CHECK(dup2(ends[0], 0) == 0);
	submit("sbatch --checkpoint-on-preempt", "", 0);
	CHECK(read(0, left, sizeof(left)) == sizeof(script) - 1 && !memcmp(left, script, sizeof(script) - 1));
	dup2(kept, 0);
	close(kept);
	close(ends[0]);
	close(ends[1]);
	CHECK_STR(NULL, getenv("SBATCH_SIGNAL"));
	CHECK_STR("append", getenv("SBATCH_OPEN_MODE"));
}

static void signal_behind_first_command(void)
{
	submit("sbatch --checkpoint-on-preempt SCRIPT", "#!/bin/bash\necho x\n#SBATCH --signal=USR1\n", 0);
	CHECK_STR("B:50@60", getenv("SBATCH_SIGNAL"));
	submit("sbatch --checkpoint-on-preempt SCRIPT", "#!/bin/bash\n#SBATCH -n 2 # --signal=USR1\n", 0);
	CHECK_STR("B:50@60", getenv("SBATCH_SIGNAL"));
}

static void signal_on_command_line(void)
{
	submit("sbatch --sig=USR2 --checkpoint-on-preempt SCRIPT", "#!/bin/sh\n", 0);
	CHECK_STR(NULL, getenv("SBATCH_SIGNAL"));
	CHECK_STR(NULL, getenv("GPUCR_SIGNAL"));
	CHECK_STR("append", getenv("SBATCH_OPEN_MODE"));
}

static void users_variables_stay(void)
{
	setenv("SBATCH_SIGNAL", "USR1@9", 1);
	setenv("SBATCH_OPEN_MODE", "truncate", 1);
	setenv("GPUCR_SIGNAL", "50", 1); /* from an outer job */
	submit("sbatch --checkpoint-on-preempt SCRIPT", "#!/bin/sh\n", 0);
	slurm_spank_init_post_opt(NULL, 0, NULL);
	CHECK_STR("USR1@9", getenv("SBATCH_SIGNAL"));
	CHECK_STR("truncate", getenv("SBATCH_OPEN_MODE"));
	CHECK_STR(NULL, getenv("GPUCR_SIGNAL"));
}

static void no_checkpoint_wins(void)
{
	submit("sbatch --checkpoint-on-preempt --no-checkpoint SCRIPT", "#!/bin/sh\n", 0);
	CHECK_STR(NULL, getenv("SBATCH_SIGNAL"));
	submit("sbatch --checkpoint-on-preempt SCRIPT", "#!/bin/sh\n", 0);
	CHECK_STR("B:50@60", getenv("SBATCH_SIGNAL"));
	stub_option("no-checkpoint", NULL, 0);
	CHECK_STR(NULL, getenv("SBATCH_SIGNAL"));
	CHECK_STR(NULL, getenv("SBATCH_OPEN_MODE"));
	CHECK_STR(NULL, getenv("GPUCR_SIGNAL"));
}

static void values_are_checked(void)
{
	submit("sbatch SCRIPT", "#!/bin/sh\n", 0);
	CHECK(stub_option("checkpoint-dir", "relative", 0) < 0);
	CHECK(strstr(stub.error, "absolute"));
	CHECK(stub_option("checkpoint-dir", "/scratch/x", 0) == 0);
	CHECK(stub_option("checkpoint-interval", "1h30m", 0) == 0);
	CHECK(stub_option("checkpoint-interval", "90", 0) == 0);
	CHECK(stub_option("checkpoint-interval", "500ms", 0) == 0);
	CHECK(stub_option("checkpoint-interval", "1w", 0) < 0);
	CHECK(stub_option("checkpoint-interval", "m", 0) < 0);
	CHECK(stub_option("checkpoint-interval", "", 0) < 0);
	CHECK(stub_option("checkpoint-interval", NULL, 0) < 0);
	CHECK(stub_option("checkpoint-files", "refuse", 0) == 0);
	CHECK(stub_option("checkpoint-files", "undo", 0) < 0);
	CHECK(strstr(stub.error, "rollback, keep or refuse"));
	CHECK(stub_option("checkpoint-rounds", "4", 0) == 0);
	CHECK(stub_option("checkpoint-rounds", "-1", 0) < 0);
	CHECK(stub_option("checkpoint-rounds", "", 0) < 0);
	CHECK(stub_option("restore-from", "20261127T232501Z-3f9a", 0) == 0);
	CHECK(stub_option("restore-from", "20261127T232501Z-3F9a", 0) < 0);
	CHECK(strstr(stub.error, "gpucr list"));
	CHECK(stub_option("restore-from", "20261127T232501Z-3f9", 0) < 0);
	CHECK(stub_option("restore-from", "20261127T232501Z/3f9a", 0) < 0);
	CHECK(stub_option("restore-from", "184220", 0) < 0);
	CHECK(stub_option("restore-from", "", 0) < 0);
	CHECK(stub_option("restore-from", NULL, 0) < 0);
	CHECK(stub_option("checkpoint-io-uring", "hide", 0) == 0);
	CHECK(stub_option("checkpoint-io-uring", "keep", 0) == 0);
	CHECK(stub_option("checkpoint-io-uring", "off", 0) < 0);
	CHECK(strstr(stub.error, "keep or hide"));
	CHECK(stub_option("checkpoint-nccl", "fast", 0) < 0);
	CHECK(strstr(stub.error, "keep, safe or rebuild"));
	CHECK(stub_option("checkpoint-nccl", NULL, 0) < 0);
}

int test_submission(void)
{
	static void (*const tests[])(void) = {
		flag_on_command_line, options_that_mean_protection, flag_in_script, flag_behind_script_is_its_own, script_has_signal, script_as_a_value, script_in_a_pipe,
		signal_behind_first_command, signal_on_command_line, users_variables_stay, no_checkpoint_wins,
		values_are_checked, cookie_is_of_this_submission, restore_without_protection_is_refused,
	};
	const char *tmp = getenv("TMPDIR");
	int bad = 0;

	snprintf(cmdline_path, sizeof(cmdline_path), "%.30s/gpucr-cmd.%d", tmp ? tmp : "/tmp", getpid());
	snprintf(script_path, sizeof(script_path), "%.30s/gpucr-job.%d", tmp ? tmp : "/tmp", getpid());
	for (size_t i = 0; i < sizeof(tests) / sizeof(*tests); i++)
		bad += in_process(tests[i]) != 0;
	unlink(cmdline_path);
	unlink(script_path);
	return bad;
}
