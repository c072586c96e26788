/* SPDX-License-Identifier: Apache-2.0 */
/* The plugin against a stub of SPANK, here in slurmd, slurmstepd, srun and salloc; in sbatch: test_submission.c. */
#define _GNU_SOURCE
#include <slurm/slurm.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "options.h"
#include "spank_stub.h"
#include "test_check.h"
#include "test_plugin.h"

int in_process(void (*test)(void))
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
	stub_option("checkpoint-io-uring", "hide", 1);
	stub_option("checkpoint-rounds", "9", 1);
	stub_option("checkpoint-on-timeout", "", 1);
	stub_option("restore-from", "20261127T232501Z-3f9a", 1);
	setenv("GPUCR_SIGNAL", "50", 1); /* the first call has taken it out of the job's environment */
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR("/opt/t --socket /run/x.sock --job 184220 --step batch --rank 0 --nodeid 0 --nodes 2 --signal 50 --when-unprotected fail "
		  "--dir /ckpt --interval 30m --option files=keep --option io_uring=hide --option rounds=9 "
		  "--option timeout=yes --option restore=20261127T232501Z-3f9a --",
		  stub.argv);
}

static void nccl_policy(void)
{
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
	const char *av[] = { "nccl_library=/etc/passwd" }; /* rebuild is the default */
	const char *kept[] = { "nccl=keep", "nccl_library=/etc/passwd" };
	const char *gone[] = { "nccl_library=/no/such.so" };

	unsetenv("CUDA_VISIBLE_DEVICES");
	unsetenv("LD_PRELOAD");
	step(av, 1, SLURM_BATCH_SCRIPT);
	stub_option("checkpoint-on-preempt", "", 1);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR(NULL, getenv("LD_PRELOAD")); /* a job without GPUs is left alone */
	setenv("CUDA_VISIBLE_DEVICES", "0,1", 1);
	step(kept, 2, SLURM_BATCH_SCRIPT);
	stub_option("checkpoint-on-preempt", "", 1);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR(NULL, getenv("LD_PRELOAD")); /* the site's word */
	step(av, 1, SLURM_BATCH_SCRIPT);
	stub_option("checkpoint-on-preempt", "", 1);
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
	setenv("SLURM_GPUCR_STEP", "0123456789abcdef", 1);
	step(NULL, 0, 3);
	stub.rank = 5;
	stub.nodeid = 1;
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK_STR("", stub.argv); /* the option is not on */
	CHECK_STR(NULL, getenv("SLURM_GPUCR_STEP"));
	setenv("SLURM_GPUCR_STEP", "0123456789abcdef", 1);
	setenv("GPUCR_CAPSULE", "1", 1);
	stub_option("checkpoint-on-preempt", "", 1);
	CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
	CHECK(strstr(stub.argv, "--job 184220 --step 0123456789abcdef --rank 5 --nodeid 1 --nodes 2 --signal 0 "));
	CHECK_STR(NULL, getenv("SLURM_GPUCR_STEP"));
	CHECK_STR(NULL, getenv("GPUCR_CAPSULE"));
}

static void step_with_another_key(void)
{
	static const char *const bad[] = { "", "0123456789abcde", "0123456789abcdef0", "0123456789abcdeF", "0123456789abcdeg" };

	for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
		setenv("SLURM_GPUCR_STEP", bad[i], 1);
		step(NULL, 0, 0);
		stub_option("checkpoint-on-preempt", "", 1);
		CHECK(slurm_spank_task_init(NULL, 0, NULL) == 0);
		CHECK_STR("", stub.argv);
	}
	setenv("SLURM_GPUCR_STEP", "0123456789abcdef", 1);
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
		batch_step, nccl_policy, nccl_rebuild, signal_of_control_environment, other_steps, wrong_plugstack,
		step_of_a_proxy, step_with_another_key, srun_in_capsule, only_batch_jobs,
	};
	int bad;

	unsetenv("SBATCH_SIGNAL");
	unsetenv("SBATCH_OPEN_MODE");
	unsetenv("GPUCR_CAPSULE");
	bad = test_submission();
	for (size_t i = 0; i < sizeof(tests) / sizeof(*tests); i++)
		bad += in_process(tests[i]) != 0;
	printf("plugin: %s\n", bad ? "FAILED" : "ok");
	return bad != 0;
}
