/* SPDX-License-Identifier: Apache-2.0 */
/* What the supervisor knows from its arguments and surroundings, as frames. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "task.h"
#include "util.h"

extern char **environ;

int task_parse(struct task_args *a, int argc, char **argv)
{
	static const struct option options[] = {
		{ "socket", 1, NULL, 's' }, { "job", 1, NULL, 'j' },	  { "step", 1, NULL, 't' },
		{ "rank", 1, NULL, 'r' },   { "nodes", 1, NULL, 'n' },	  { "signal", 1, NULL, 'g' },
		{ "dir", 1, NULL, 'd' },    { "interval", 1, NULL, 'i' }, { "when-unprotected", 1, NULL, 'w' },
		{ "nodeid", 1, NULL, 'I' }, { "option", 1, NULL, 'o' },	  { NULL, 0, NULL, 0 },
	};
	const char *env;
	long long n;
	int c;

	memset(a, 0, sizeof(*a));
	a->dir = a->interval = "";
	a->step = "batch";
	a->nodes = 1;
	a->pmi_fd = -1;
	while ((c = getopt_long(argc, argv, "+", options, NULL)) != -1) {
		bool ok = true;

		switch (c) {
		case 's': a->socket = optarg; break;
		case 'j': a->job = optarg; break;
		case 't': a->step = optarg; break;
		case 'd': a->dir = optarg; break;
		case 'i': a->interval = optarg; break;
		case 'o':
			ok = a->n_options < MAX_OPTIONS;
			if (ok)
				a->options[a->n_options++] = optarg;
			a->restores |= !strncmp(optarg, "restore=", 8);
			break;
		case 'r': ok = parse_number(optarg, 0, 1 << 30, &a->rank); break;
		case 'I': ok = parse_number(optarg, 0, 1 << 30, &a->nodeid); break;
		case 'n': ok = parse_number(optarg, 1, 1 << 30, &a->nodes); break;
		case 'g': ok = parse_number(optarg, 0, SIGRTMAX, &a->signal); break;
		case 'w':
			a->fail_unprotected = !strcmp(optarg, "fail");
			ok = a->fail_unprotected || !strcmp(optarg, "run");
			break;
		default: return -1;
		}
		if (!ok) {
			say("gpucr-task: bad value '%s'", optarg);
			return -1;
		}
	}
	a->argv = argv + optind;
	if (!a->socket || !a->job || !a->argv[0]) {
		say("usage: gpucr-task --socket PATH --job ID [--step KEY] [--rank R] [--nodeid I] [--nodes N] "
		    "[--signal S] [--when-unprotected run|fail] [--dir D] [--interval T] [--option KEY=VALUE]... -- COMMAND...");
		return -1;
	}
	/* The count that Slurm's SPANK item would give is always 0; the variable is right. */
	env = getenv("SLURM_RESTART_COUNT");
	if (parse_number(env, 0, 1 << 30, &n))
		a->restart = n;
	env = getenv("PMI_FD");
	if (parse_number(env, 3, 1 << 20, &n))
		a->pmi_fd = fcntl((int)n, F_GETFD) < 0 ? -1 : (int)n;
	return 0;
}

bool is_step(const struct task_args *a)
{
	return strcmp(a->step, "batch") != 0;
}

static const char *env_or_empty(const char *name)
{
	const char *v = getenv(name);

	return v ? v : "";
}

void build_hello(struct msg *m, const struct task_args *a, bool again, bool attached, int notice)
{
	msg_init(m, GC_HELLO);
	msg_str(m, "JOB", a->job);
	msg_str(m, "STEP", a->step);
	msg_int(m, "RANK", a->rank);
	msg_int(m, "NODEID", a->nodeid);
	msg_int(m, "RESTART", a->restart);
	msg_str(m, "NODES", env_or_empty("SLURM_JOB_NODELIST"));
	msg_int(m, "NODECOUNT", a->nodes);
	msg_str(m, "NODE", env_or_empty("SLURMD_NODENAME"));
	msg_int(m, "SIGNAL", a->signal);
	msg_str(m, "DIR", a->dir);
	msg_str(m, "INTERVAL", a->interval);
	for (int i = 0; i < a->n_options; i++)
		msg_str(m, "OPTION", a->options[i]);
	/* The job control environment comes through --export=NONE too. */
	msg_str(m, "COOKIE", *env_or_empty("GPUCR_COOKIE") ? env_or_empty("GPUCR_COOKIE")
							    : env_or_empty("SLURM_SPANK_GPUCR_COOKIE"));
	msg_str(m, "MODE", again ? "again" : "first");
	msg_int(m, "ATTACHED", attached);
	msg_int(m, "NOTICE", notice);
}

static void add_affinity(struct msg *m)
{
	enum { MAX = 8192 };
	static cpu_set_t set[MAX / CPU_SETSIZE + 1];
	char text[4000] = "";
	size_t n = 0;

	if (sched_getaffinity(0, sizeof(set), set) < 0)
		return;
	for (int i = 0; i < MAX && n < sizeof(text) - 32; i++) {
		int from = i;

		if (!CPU_ISSET_S(i, sizeof(set), set))
			continue;
		while (i + 1 < MAX && CPU_ISSET_S(i + 1, sizeof(set), set))
			i++;
		n += (size_t)snprintf(text + n, sizeof(text) - n, i > from ? "%s%d-%d" : "%s%d", n ? "," : "", from, i);
	}
	msg_str(m, "AFFINITY", text);
}

/* What the agent gave the step's srun for itself and for us. */
#define AGENTS "SLURM_GPUCR_"

/* Does the agent's START name this variable? */
static bool replaced(const struct frame *start, const char *var)
{
	size_t pos = 0, n = (size_t)(strchrnul(var, '=') - var);
	const char *v;

	while ((v = frame_next(start, "ENV", &pos)))
		if (!strncmp(v, var, n) && (v[n] == '=' || !v[n]))
			return true;
	return false;
}

void build_spawn(struct msg *m, const struct task_args *a, const struct frame *start)
{
	const char *task = frame_get(start, "TASK"), *v, *inside = getenv(AGENTS "CWD");
	char *cwd = getcwd(NULL, 0);
	mode_t mask = umask(0);
	size_t pos = 0;

	umask(mask);
	msg_init(m, GC_SPAWN);
	msg_str(m, "TASK", task ? task : "");
	msg_int(m, "RANK", a->rank);
	if ((v = frame_get(start, "STDIO")))
		msg_str(m, "STDIO", v);
	if ((v = frame_get(start, "TOKEN")))
		msg_str(m, "TOKEN", v);
	/* Where srun was started in the capsule, which has a /tmp of its own. */
	msg_str(m, "CWD", inside && *inside == '/' ? inside : cwd ? cwd : "/tmp");
	free(cwd);
	msg_fmt(m, "UMASK", "%o", (unsigned)mask);
	msg_int(m, "NICE", getpriority(PRIO_PROCESS, 0));
	add_affinity(m);
	for (int i = 0; i < RLIM_NLIMITS; i++) {
		struct rlimit r;

		if (!getrlimit(i, &r))
			msg_fmt(m, "RLIMIT", "%d:%llu:%llu", i, (unsigned long long)r.rlim_cur,
				(unsigned long long)r.rlim_max);
	}
	msg_int(m, "PMI", a->pmi_fd >= 0);
	for (char **p = a->argv; *p; p++)
		msg_str(m, "ARG", *p);
	for (char **p = environ; *p; p++)
		if (!replaced(start, *p) && strncmp(*p, AGENTS, sizeof(AGENTS) - 1))
			msg_str(m, "ENV", *p);
	while ((v = frame_next(start, "ENV", &pos)))
		msg_str(m, "ENV", v);
}

int stdio_fds(const struct task_args *a, int fds[4])
{
	for (int i = 0; i < 3; i++)
		fds[i] = i;
	fds[3] = a->pmi_fd;
	return a->pmi_fd >= 0 ? 4 : 3;
}

void run_unprotected(const struct task_args *a, const sigset_t *mask)
{
	/* Our preemption signal would end the program by its default action, earlier than without gpucr. */
	if (a->signal > 0)
		signal((int)a->signal, SIG_IGN);
	sigprocmask(SIG_SETMASK, mask, NULL);
	execvp(a->argv[0], a->argv);
	say("could not run %s: %s", a->argv[0], strerror(errno));
	_exit(errno == ENOENT ? 127 : 126);
}

void unreachable(const struct task_args *a, const sigset_t *mask, int err)
{
	const char *why = err == EPROTO ? "it speaks another protocol" : strerror(err);

	/* A step's other tasks may run in capsules, where this one could not reach them. */
	if (is_step(a)) {
		say("agent not reachable at %s: %s; this step belongs to a protected job", a->socket, why);
		_exit(1);
	}
	if (a->restart > 0 || a->restores || a->fail_unprotected) {
		say("agent not reachable at %s: %s; %s", a->socket, why,
		    a->restart > 0 ? "a restarted job is not begun again without it"
		    : a->restores  ? "nothing is restored without it"
				   : "this job shall not run without protection");
		_exit(1);
	}
	say("agent not reachable at %s: %s; this job runs without protection", a->socket, why);
	run_unprotected(a, mask);
}
