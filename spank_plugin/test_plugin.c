/* SPDX-License-Identifier: Apache-2.0 */
/* The plugin against a stub of SPANK. Each case runs in a process of its own, since the plugin keeps state like in sbatch. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <slurm/slurm.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "options.h"
#include "sbatch.h"
#include "spank_stub.h"
#include "test_check.h"

int slurm_spank_init(spank_t sp, int ac, char **av);
int slurm_spank_init_post_opt(spank_t sp, int ac, char **av);
int slurm_spank_task_init(spank_t sp, int ac, char **av);

static char cmdline_path[64], script_path[64];

static int in_process(void (*test)(void))
{
	int status;
	pid_t pid = fork();

	if (pid == 0) {
		test();
		exit(0);
	}
	waitpid(pid, &status, 0);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
}

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

static void script_has_signal(void)
{
	submit("sbatch --checkpoint-on-preempt SCRIPT",
	       "#!/bin/bash\n\n# words\n#SBATCH -n 1 --signal=B:USR1@30\n#SBATCH --open-mode truncate\necho x\n", 0);
	CHECK_STR(NULL, getenv("SBATCH_SIGNAL"));
	CHECK_STR(NULL, getenv("SBATCH_OPEN_MODE"));
	CHECK_STR(NULL, getenv("GPUCR_SIGNAL"));
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
}

static void step(const char *const *av, int ac, unsigned id)
{
	stub = (struct stub){ .context = S_CTX_REMOTE, .job = 184220, .step = id, .nodes = 2 };
	CHECK(slurm_spank_init(NULL, ac, (char **)av) == 0);
}

static void batch_step(void)
{
	const char *av[] = { "agent_socket=/run/x.sock", "task=/opt/t", "when_unprotected=fail" };

	setenv("GPUCR_SIGNAL", "50", 1);
	step(av, 3, SLURM_BATCH_SCRIPT);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR("", stub.argv);
	stub_option("checkpoint-on-preempt", "", 1);
	stub_option("checkpoint-dir", "/ckpt", 1);
	stub_option("checkpoint-interval", "30m", 1);
	stub_option("checkpoint-files", "keep", 1);
	stub_option("checkpoint-rounds", "9", 1);
	stub_option("checkpoint-on-timeout", "", 1);
	stub_option("restore-from", "20261127T232501Z-3f9a", 1);
	setenv("GPUCR_SIGNAL", "50", 1); /* the first call has taken it out of the job's environment */
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR("/opt/t --socket /run/x.sock --job 184220 --step batch --rank 0 --nodeid 0 --nodes 2 --signal 50 --when-unprotected fail "
		  "--dir /ckpt --interval 30m --option files=keep --option rounds=9 "
		  "--option timeout=yes --option restore=20261127T232501Z-3f9a --",
		  stub.argv);
}

static void nccl_policy(void)
{
	submit("sbatch SCRIPT", "#!/bin/sh\n", 0);
	CHECK(stub_option("checkpoint-nccl", "fast", 0) < 0);
	CHECK(strstr(stub.error, "keep, safe or rebuild"));
	CHECK(stub_option("checkpoint-nccl", NULL, 0) < 0);
	step(NULL, 0, SLURM_BATCH_SCRIPT);
	CHECK(stub_option("checkpoint-nccl", "safe", 1) == 0);
	setenv("NCCL_SHM_DISABLE", "0", 1); /* the user's */
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR(NULL, getenv("NCCL_P2P_DISABLE")); /* not a protected job */
	stub_option("checkpoint-on-preempt", "", 1);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR("1", getenv("NCCL_P2P_DISABLE"));
	CHECK_STR("0", getenv("NCCL_SHM_DISABLE"));
	CHECK_STR("0", getenv("NCCL_NVLS_ENABLE"));
	unsetenv("NCCL_P2P_DISABLE");
	CHECK(stub_option("checkpoint-nccl", "keep", 1) == 0);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR(NULL, getenv("NCCL_P2P_DISABLE"));
}

static void nccl_rebuild(void)
{
	const char *av[] = { "nccl=rebuild", "nccl_library=/etc/passwd" };
	const char *gone[] = { "nccl_library=/no/such.so" };

	unsetenv("CUDA_VISIBLE_DEVICES");
	unsetenv("LD_PRELOAD");
	step(av, 2, SLURM_BATCH_SCRIPT);
	stub_option("checkpoint-on-preempt", "", 1);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR(NULL, getenv("LD_PRELOAD")); /* a job without GPUs is left alone */
	setenv("CUDA_VISIBLE_DEVICES", "0,1", 1);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR("/etc/passwd", getenv("LD_PRELOAD"));
	setenv("LD_PRELOAD", "/lib/mine.so", 1);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR("/etc/passwd:/lib/mine.so", getenv("LD_PRELOAD"));
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR("/etc/passwd:/lib/mine.so", getenv("LD_PRELOAD")); /* a step of that script */
	unsetenv("LD_PRELOAD");
	stub_option("checkpoint-nccl", "keep", 1); /* the user has the last word */
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR(NULL, getenv("LD_PRELOAD"));
	unsetenv("CUDA_VISIBLE_DEVICES");
	stub_option("checkpoint-nccl", "rebuild", 1);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR("/etc/passwd", getenv("LD_PRELOAD"));
	unsetenv("LD_PRELOAD");
	step(gone, 1, SLURM_BATCH_SCRIPT);
	stub_option("checkpoint-on-preempt", "", 1);
	stub_option("checkpoint-nccl", "rebuild", 1);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR(NULL, getenv("LD_PRELOAD")); /* ld.so would complain in every process */
}

static void signal_of_control_environment(void)
{
	step(NULL, 0, SLURM_BATCH_SCRIPT);
	stub_option("checkpoint-on-preempt", "", 1);
	slurm_spank_task_init(NULL, 0, NULL);
	CHECK(strstr(stub.argv, "--signal 0 --when-unprotected run --"));
	setenv("SLURM_SPANK_GPUCR_SIGNAL", "51", 1); /* after --export=NONE */
	slurm_spank_task_init(NULL, 0, NULL);
	CHECK(strstr(stub.argv, "--signal 51 "));
}

static void other_steps(void)
{
	step(NULL, 0, 0);
	stub_option("checkpoint-on-preempt", "", 1);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR("", stub.argv);
	step(NULL, 0, SLURM_EXTERN_CONT);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR("", stub.argv);
	step(NULL, 0, SLURM_BATCH_SCRIPT);
	stub_option("checkpoint-on-preempt", "", 1);
	stub_option("no-checkpoint", "", 1);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR("", stub.argv);
}

static void step_of_a_proxy(void)
{
	setenv("GPUCR_STEP", "0123456789abcdef", 1);
	step(NULL, 0, 3);
	stub.rank = 5;
	stub.nodeid = 1;
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR("", stub.argv); /* the option is not on */
	CHECK_STR(NULL, getenv("GPUCR_STEP"));
	setenv("GPUCR_STEP", "0123456789abcdef", 1);
	setenv("GPUCR_CAPSULE", "1", 1);
	stub_option("checkpoint-on-preempt", "", 1);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK(strstr(stub.argv, "--job 184220 --step 0123456789abcdef --rank 5 --nodeid 1 --nodes 2 --signal 0 "));
	CHECK_STR(NULL, getenv("GPUCR_STEP"));
	CHECK_STR(NULL, getenv("GPUCR_CAPSULE"));
}

static void step_with_another_key(void)
{
	static const char *const bad[] = { "", "0123456789abcde", "0123456789abcdef0", "0123456789abcdeF", "0123456789abcdeg" };

	for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
		setenv("GPUCR_STEP", bad[i], 1);
		step(NULL, 0, 0);
		stub_option("checkpoint-on-preempt", "", 1);
		CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
		CHECK_STR("", stub.argv);
	}
	setenv("GPUCR_STEP", "0123456789abcdef", 1);
	step(NULL, 0, SLURM_EXTERN_CONT);
	stub_option("checkpoint-on-preempt", "", 1);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR("", stub.argv);
	step(NULL, 0, SLURM_INTERACTIVE_STEP);
	stub_option("checkpoint-on-preempt", "", 1);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR("", stub.argv);
}

static void wrong_plugstack(void)
{
	const char *bad[] = { "agent_soket=/x" }, *fail[] = { "x=1", "when_unprotected=fail" };
	static const char *const others[] = { "task=rel", "signal=10", "signal=", "signal_time=x", "when_unprotected=maybe", "plain" };

	/* Never an error in slurmd and slurmstepd: it could drain the node. The job may fail, when the site wants that. */
	step(bad, 1, SLURM_BATCH_SCRIPT);
	CHECK(strstr(stub.error, "agent_soket=/x: unknown key"));
	stub_option("checkpoint-on-preempt", "", 1);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR("", stub.argv);
	stub_option("restore-from", "20261127T232501Z-3f9a", 1); /* the script must not begin in its place */
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == -1);
	*options.restore = '\0';
	step(fail, 2, SLURM_BATCH_SCRIPT);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == -1);
	stub.context = S_CTX_SLURMD;
	CHECK(slurm_spank_init(NULL, 1, (char **)bad) == 0);
	stub.context = S_CTX_LOCAL;
	CHECK(slurm_spank_init(NULL, 1, (char **)bad) != 0);
	for (size_t i = 0; i < sizeof(others) / sizeof(*others); i++)
		CHECK(slurm_spank_init(NULL, 1, (char **)&others[i]) != 0);
}

/* What the program of this name says of the option, in a job or not. */
static const char *said_by(const char *name, spank_context_t context, const char *job)
{
	prctl(PR_SET_NAME, name);
	job ? setenv("SLURM_JOB_ID", job, 1) : unsetenv("SLURM_JOB_ID");
	stub.context = context;
	*stub.said = '\0';
	slurm_spank_init_post_opt(NULL, 0, NULL);
	return stub.said;
}

static void only_batch_jobs(void)
{
	CHECK_STR("", said_by("salloc", S_CTX_ALLOCATOR, NULL));
	options.on = true;
	CHECK(strstr(said_by("salloc", S_CTX_ALLOCATOR, NULL), "only batch jobs"));
	CHECK(strstr(said_by("srun", S_CTX_LOCAL, NULL), "only batch jobs"));
	CHECK_STR("", said_by("srun", S_CTX_LOCAL, "7"));
	CHECK_STR("", said_by("sbatch", S_CTX_ALLOCATOR, NULL));
	CHECK_STR("", said_by("slurmstepd", S_CTX_REMOTE, NULL));
}

static void srun_in_capsule(void)
{
	/* The proxy takes its place there; a real srun that sees the name is one that the agent started. */
	stub.context = S_CTX_LOCAL;
	setenv("GPUCR_CAPSULE", "1", 1);
	CHECK(slurm_spank_init(NULL, 0, NULL) == 0);
}

int main(void)
{
	static void (*const tests[])(void) = {
		flag_on_command_line, options_that_mean_protection, flag_in_script, flag_behind_script_is_its_own, script_has_signal,
		signal_behind_first_command, signal_on_command_line, users_variables_stay, no_checkpoint_wins,
		values_are_checked, batch_step, nccl_policy, nccl_rebuild, signal_of_control_environment, other_steps, wrong_plugstack,
		cookie_is_of_this_submission, step_of_a_proxy, step_with_another_key, srun_in_capsule, only_batch_jobs,
		restore_without_protection_is_refused,
	};
	const char *tmp = getenv("TMPDIR");
	int bad = 0;

	snprintf(cmdline_path, sizeof(cmdline_path), "%.30s/gpucr-cmd.%d", tmp ? tmp : "/tmp", getpid());
	snprintf(script_path, sizeof(script_path), "%.30s/gpucr-job.%d", tmp ? tmp : "/tmp", getpid());
	unsetenv("SBATCH_SIGNAL");
	unsetenv("SBATCH_OPEN_MODE");
	unsetenv("GPUCR_CAPSULE");
	for (size_t i = 0; i < sizeof(tests) / sizeof(*tests); i++)
		bad += in_process(tests[i]) != 0;
	unlink(cmdline_path);
	unlink(script_path);
	printf("plugin: %s\n", bad ? "FAILED" : "ok");
	return bad != 0;
}
