/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpucr.so: options in, one program in front of the batch script and of the tasks of its steps. No fork, no namespaces and no privilege in any hook;
 * nothing here returns an error in slurmd or slurmstepd where that could drain the node (table "Errors" in spank(8)).
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <fcntl.h>
#include <slurm/slurm.h>
#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "config.h"
#include "options.h"
#include "sbatch.h"

SPANK_PLUGIN(gpucr, 1)

#define KEY_LEN 16
#define COOKIE_BYTES 16

static struct config config;
static bool config_bad;
static int signal_number;
static struct submission submission;
static bool set_signal, set_open_mode; /* variables of sbatch that are ours and must be taken away again */

/* Names this submission for ever: job ids begin again when a site loses Slurm's state, and checkpoints outlive that. */
static void make_cookie(void)
{
	unsigned char bytes[COOKIE_BYTES];
	char text[2 * COOKIE_BYTES + 1];

	if (getenv("GPUCR_COOKIE") || getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes))
		return;
	for (size_t i = 0; i < sizeof(bytes); i++)
		sprintf(text + 2 * i, "%02x", bytes[i]);
	setenv("GPUCR_COOKIE", text, 1);
}

/* sbatch: have Slurm send our signal to the batch step alone when the job is preempted, and append to its output when it
 * comes back. Not SBATCH_REQUEUE: sbatch 26.05 stumbles over it. */
static void prepare_submission(void)
{
	char value[32];

	if (!options_protect()) {
		if (set_signal)
			unsetenv("SBATCH_SIGNAL");
		if (set_open_mode)
			unsetenv("SBATCH_OPEN_MODE");
		unsetenv("GPUCR_SIGNAL");
		unsetenv("GPUCR_COOKIE");
		set_signal = set_open_mode = false;
		return;
	}
	make_cookie();
	if (!set_signal && !submission.cli_signal && !submission.script_signal && !getenv("SBATCH_SIGNAL")) {
		snprintf(value, sizeof(value), "B:%d@%d", config.signal, config.signal_time_s);
		setenv("SBATCH_SIGNAL", value, 0);
		snprintf(value, sizeof(value), "%d", config.signal);
		setenv("GPUCR_SIGNAL", value, 1);
		set_signal = true;
	}
	if (!set_open_mode && !submission.script_open_mode && !getenv("SBATCH_OPEN_MODE")) {
		setenv("SBATCH_OPEN_MODE", "append", 0);
		set_open_mode = true;
	}
}

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	spank_context_t where = spank_context();

	config_defaults(&config);
	for (int i = 0; i < ac; i++) {
		const char *why = config_apply(&config, av[i]);

		if (why) {
			slurm_error("gpucr: plugstack.conf: %s: %s", av[i], why);
			config_bad = true;
		}
	}
	options_register(sp);
	if (where != S_CTX_ALLOCATOR && where != S_CTX_LOCAL)
		return ESPANK_SUCCESS;
	if (config_bad)
		return ESPANK_BAD_ARG;
	if (where == S_CTX_ALLOCATOR) {
		/* What an outer job left in our environment is not true for the one that is submitted now. */
		unsetenv("GPUCR_SIGNAL");
		unsetenv("GPUCR_CAPSULE");
		unsetenv("GPUCR_SHEPHERD");
		unsetenv("GPUCR_COOKIE");
		unsetenv("SLURM_SPANK_GPUCR_SIGNAL");
		unsetenv("SLURM_SPANK_GPUCR_COOKIE");
		sbatch_scan(&submission);
		options_changed = prepare_submission;
		/* The command line is read after the environment, too late for the callback to set variables. */
		options.on = submission.on;
		options.off = submission.off;
		prepare_submission();
	}
	return ESPANK_SUCCESS;
}

/* A terminal or a lone step cannot be requeued. srun inside a job takes the option from its environment: no word then. */
static void say_unprotected(void)
{
	char name[32] = "";
	int fd = open("/proc/self/comm", O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return;
	if (read(fd, name, sizeof(name) - 1) > 0 &&
	    (!strcmp(name, "salloc\n") || (!strcmp(name, "srun\n") && !getenv("SLURM_JOB_ID"))))
		slurm_spank_log("gpucr: only batch jobs are protected: submit a script with sbatch");
	close(fd);
}

int slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
	(void)ac;
	(void)av;
	if (options_protect())
		say_unprotected();
	if (spank_context() != S_CTX_ALLOCATOR)
		return ESPANK_SUCCESS;
	if (set_signal) {
		unsetenv("SBATCH_SIGNAL"); /* they would go into the job's environment and from there to other jobs */
		/* The job control environment comes through --export=NONE too, as SLURM_SPANK_GPUCR_SIGNAL. */
		spank_job_control_setenv(sp, "GPUCR_SIGNAL", getenv("GPUCR_SIGNAL"), 1);
	}
	if (set_open_mode)
		unsetenv("SBATCH_OPEN_MODE");
	if (getenv("GPUCR_COOKIE"))
		spank_job_control_setenv(sp, "GPUCR_COOKIE", getenv("GPUCR_COOKIE"), 1);
	return ESPANK_SUCCESS;
}

/* The signal that Slurm sends for us, 0 when the user's own --signal took its place. */
static int job_signal(spank_t sp)
{
	char text[32];
	long n;

	if (spank_getenv(sp, "GPUCR_SIGNAL", text, sizeof(text)) != ESPANK_SUCCESS &&
	    spank_getenv(sp, "SLURM_SPANK_GPUCR_SIGNAL", text, sizeof(text)) != ESPANK_SUCCESS)
		return 0;
	n = strtol(text, NULL, 10);
	return n > 0 && n <= 64 ? (int)n : 0;
}

/* srun passes on what begins with SLURM_, whatever its user says with --export. */
#define STEP_VARIABLE "SLURM_GPUCR_STEP"

/* The key that the agent gave a step which it started for a proxy; false for the user's own steps. */
static bool step_key(spank_t sp, char key[KEY_LEN + 2])
{
	if (spank_getenv(sp, STEP_VARIABLE, key, KEY_LEN + 2) != ESPANK_SUCCESS || strlen(key) != KEY_LEN)
		return false;
	for (const char *p = key; *p; p++)
		if (!isxdigit((unsigned char)*p) || isupper((unsigned char)*p))
			return false;
	return true;
}

static int protect(spank_t sp, uint32_t job, const char *step)
{
	static char job_text[16], rank_text[16], nodeid_text[16], nodes_text[16], signal_text[16];
	static char extra[5][64];
	const char *argv[40];
	uint32_t rank = 0, nodeid = 0, nodes = 1;
	int n = 0, extras = 0;

	if (spank_get_item(sp, S_TASK_GLOBAL_ID, &rank) != ESPANK_SUCCESS)
		rank = 0;
	if (spank_get_item(sp, S_JOB_NODEID, &nodeid) != ESPANK_SUCCESS)
		nodeid = 0;
	if (spank_get_item(sp, S_JOB_NNODES, &nodes) != ESPANK_SUCCESS || !nodes)
		nodes = 1;
	snprintf(job_text, sizeof(job_text), "%u", job);
	snprintf(rank_text, sizeof(rank_text), "%u", rank);
	snprintf(nodeid_text, sizeof(nodeid_text), "%u", nodeid);
	snprintf(nodes_text, sizeof(nodes_text), "%u", nodes);
	snprintf(signal_text, sizeof(signal_text), "%d", signal_number);
	/* Slurm keeps the pointers: everything is static. */
	argv[n++] = config.task;
	argv[n++] = "--socket";
	argv[n++] = config.agent_socket;
	argv[n++] = "--job";
	argv[n++] = job_text;
	argv[n++] = "--step";
	argv[n++] = step;
	argv[n++] = "--rank";
	argv[n++] = rank_text;
	argv[n++] = "--nodeid";
	argv[n++] = nodeid_text;
	argv[n++] = "--nodes";
	argv[n++] = nodes_text;
	argv[n++] = "--signal";
	argv[n++] = signal_text;
	argv[n++] = "--when-unprotected";
	argv[n++] = config.fail_unprotected ? "fail" : "run";
	if (*options.dir) {
		argv[n++] = "--dir";
		argv[n++] = options.dir;
	}
	if (*options.interval) {
		argv[n++] = "--interval";
		argv[n++] = options.interval;
	}
	/* What only the agent understands. */
	if (*options.files)
		snprintf(extra[extras++], sizeof(*extra), "files=%s", options.files);
	if (*options.io_uring)
		snprintf(extra[extras++], sizeof(*extra), "io_uring=%s", options.io_uring);
	if (*options.rounds)
		snprintf(extra[extras++], sizeof(*extra), "rounds=%s", options.rounds);
	if (options.on_timeout)
		snprintf(extra[extras++], sizeof(*extra), "timeout=yes");
	if (*options.restore)
		snprintf(extra[extras++], sizeof(*extra), "restore=%s", options.restore);
	for (int i = 0; i < extras; i++) {
		argv[n++] = "--option";
		argv[n++] = extra[i];
	}
	argv[n++] = "--";
	if (spank_prepend_task_argv(sp, n, argv) == ESPANK_SUCCESS)
		return 0;
	slurm_error("gpucr: job %u: could not put %s in front of the job", job, config.task);
	return -1;
}

/* Between processes of one node: peer-to-peer, shared memory and multicast cannot be restored. What the user has set stays. */
static void nccl_over_sockets(spank_t sp)
{
	spank_setenv(sp, "NCCL_P2P_DISABLE", "1", 0);
	spank_setenv(sp, "NCCL_SHM_DISABLE", "1", 0);
	spank_setenv(sp, "NCCL_NVLS_ENABLE", "0", 0);
}

/* In front of all: the communicators that the program gets are ours, and can be made again. Not twice: a step has the
 * environment of its batch script. */
static void nccl_interposer(spank_t sp)
{
	const char *library = config.nccl_library;
	char old[4096] = "", fresh[sizeof(old) + sizeof(config.nccl_library) + 1];

	if (access(library, R_OK) < 0) {
		slurm_spank_log("gpucr: %s is not there: NCCL is left as it is", library);
		return;
	}
	if (spank_getenv(sp, "LD_PRELOAD", old, sizeof(old)) == ESPANK_NOSPACE) {
		slurm_spank_log("gpucr: LD_PRELOAD is too long: NCCL is left as it is");
		return;
	}
	if (strstr(old, library))
		return;
	snprintf(fresh, sizeof(fresh), "%s%s%s", library, *old ? ":" : "", old);
	spank_setenv(sp, "LD_PRELOAD", fresh, 1);
}

static bool has_gpus(spank_t sp)
{
	static const char *const names[] = { "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES" };
	char text[8];

	for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
		if (spank_getenv(sp, names[i], text, sizeof(text)) != ESPANK_ENV_NOEXIST)
			return true;
	return false;
}

static void set_up_nccl(spank_t sp)
{
	const char *wish = *options.nccl ? options.nccl : has_gpus(sp) ? config.nccl : "keep";

	if (!strcmp(wish, "safe"))
		nccl_over_sockets(sp);
	else if (!strcmp(wish, "rebuild"))
		nccl_interposer(sp);
}

int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	static char key[KEY_LEN + 2];
	uint32_t job = 0, step = 0;
	bool ours;
	int r;

	(void)ac;
	(void)av;
	if (spank_context() != S_CTX_REMOTE)
		return 0;
	if (spank_get_item(sp, S_JOB_STEPID, &step) != ESPANK_SUCCESS || step == SLURM_EXTERN_CONT ||
	    step == SLURM_INTERACTIVE_STEP)
		return 0;
	ours = step == SLURM_BATCH_SCRIPT || step_key(sp, key);
	spank_unsetenv(sp, STEP_VARIABLE); /* a task that starts steps of its own must not pass it on */
	/* Ours, not the job's. */
	signal_number = job_signal(sp);
	spank_unsetenv(sp, "GPUCR_SIGNAL");
	spank_unsetenv(sp, "SLURM_SPANK_GPUCR_SIGNAL");
	spank_unsetenv(sp, "GPUCR_CAPSULE"); /* a name from an outer job; the agent sets it inside the capsule */
	if (!ours || !options_protect())
		return 0;
	set_up_nccl(sp);
	if (spank_get_item(sp, S_JOB_ID, &job) != ESPANK_SUCCESS) {
		slurm_error("gpucr: no job id");
		r = -1;
	} else if (config_bad) {
		slurm_error("gpucr: job %u: plugstack.conf on this node is wrong", job);
		r = -1;
	} else {
		r = protect(sp, job, step == SLURM_BATCH_SCRIPT ? "batch" : key);
	}
	/* An error here fails the job, not the node. A script that is not to be run must not begin. */
	return r < 0 && (config.fail_unprotected || *options.restore) ? -1 : 0;
}
