/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpucr-task: the process that slurmstepd knows as the task. It runs as the user in the step's cgroup, outside the
 * capsule; it hands the command to the capsule's shepherd, passes signals in and the exit status out. Output does not
 * pass through it. The agent may die and come back at any time; this process goes on.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "task.h"
#include "util.h"

#define FIRST_CONTACT_MS 5000    /* how long a first run waits for an agent that is not there */
#define RESTART_CONTACT_MS 60000 /* a restarted job must not begin again only because the agent is slow to come */
#define TERM_PATIENCE_MS 3000 /* a scancel may not depend on the agent */
#define FROZEN_PATIENCE_MS 10000 /* the task cannot hear a signal; a node is not kept for it until KillWait ends */
#define LOST_MS 5000          /* the agent kills the capsule first and tells then */
#define ENDED_MS 3000
#define DIED_STATUS 137

static int signals = -1;
static sigset_t original_mask;
static long long term_since = NEVER, ended_at;
static bool term_seen;        /* Slurm ends the job, also if the agent took the signal and died then; until ATTACH */
static bool spawned;          /* the capsule has our task */
static bool notice_seen;      /* our preemption signal came at any time in this run */
static int end_status;

/* --- what the agent says --- */

static void finish(void) __attribute__((noreturn));
static void finish(void)
{
	exit_like(end_status);
}

static void agent_answer(int s, bool forward)
{
	if (s <= 0 || s >= NSIG)
		return;
	asked[s] = false;
	if (s == SIGTERM)
		term_since = NEVER;
	if (forward)
		give_signal(s);
}

static void agent_frame(struct frame *f)
{
	int s = (int)frame_int(f, "SIGNAL", 0);
	bool first = !decided;

	switch (f->type) {
	case GC_RUN:
		if (!first)
			break;
		print_msg(f);
		run_unprotected(&args, &original_mask);
	case GC_REFUSE:
	case GC_RELEASE:
		print_msg(f);
		if (phase == P_ENDED)
			finish(); /* the task's own status counts */
		_exit((int)frame_int(f, "STATUS", 1) & 0xff);
	case GC_START:
		print_msg(f);
		/* Again when a checkpoint came before the shepherd had heard of the task. */
		if (first || (phase == P_DETACHED && !spawned)) {
			hellos_open = 0;
			decided = true;
			start(f);
		}
		break;
	case GC_ATTACH:
		hellos_open = 0;
		print_msg(f);
		decided = true;
		term_seen = false;
		if (phase == P_WAITING || phase == P_DETACHED || phase == P_LOST) {
			remember(f);
			restored = frame_int(f, "RESTORED", 0);
			attach_wanted = true;
			try_attach();
		}
		break;
	case GC_OK:
		if (hellos_open > 0)
			hellos_open--;
		else if (phase == P_ENDED)
			finish();
		break;
	case GC_FORWARD:
	case GC_ABSORB:
		print_msg(f);
		agent_answer(s, f->type == GC_FORWARD);
		break;
	case GC_PRINT:
		print_msg(f);
		break;
	case GC_PLACED:
		if (phase == P_PLACING)
			let_go();
		break;
	default: /* not for a supervisor */
		agent_gone();
	}
}

/* --- the end of the task --- */

static void send_ended(void)
{
	struct msg m;

	if (agent.fd < 0 && agent_connect() < 0)
		return;
	msg_init(&m, GC_ENDED);
	msg_int(&m, "STATUS", end_status);
	msg_int(&m, "NOTICE", notice_seen);
	if (msg_send(&m, agent.fd, NULL, 0) < 0)
		agent_gone();
}

static void take_signals(void);

static void task_ended(int status)
{
	end_status = status;
	phase = P_ENDED;
	ended_at = now_ms();
	if (args.pmi_fd >= 0)
		close(args.pmi_fd); /* slurmstepd ends the step when nobody holds the other end any more */
	args.pmi_fd = -1;
	/* A notice that is pending at this very moment counts: Slurm will requeue the job that has just ended. */
	take_signals();
	send_ended();
}

static void shepherd_frame(struct frame *f)
{
	const char *why = frame_get(f, "MSG");
	int err;

	switch (f->type) {
	case GC_SPAWNED:
	case GC_ATTACHED:
		if (phase != P_SPAWNING)
			break;
		spawned = true;
		/* A checkpoint may have come between SPAWNED and GO. */
		held_pid = f->type == GC_SPAWNED || frame_int(f, "HELD", 0) ? frame_int(f, "PID", 0) : 0;
		if (held_pid && is_step(&args)) {
			phase = P_PLACING;
			ask_place();
		} else {
			let_go();
		}
		break;
	case GC_EXITED:
		task_ended((int)frame_int(f, "STATUS", DIED_STATUS << 8));
		break;
	case GC_FAILED:
		err = (int)frame_int(f, "ERRNO", 0);
		say("%s", why && *why ? why : strerror(err));
		if (attaching)
			_exit(DIED_STATUS); /* the capsule does not know this task: nothing is left of it */
		task_ended((err == ENOENT ? 127 : 126) << 8);
		break;
	case GC_DETACHED:
		shepherd_gone(true);
		break;
	default:
		break;
	}
}

/* --- signals from Slurm --- */

static void one_signal(const struct signalfd_siginfo *si)
{
	int s = (int)si->ssi_signo;

	if (s == SIGCHLD || (s == SIGPIPE && si->ssi_code != SI_USER))
		return;
	if (s == args.signal)
		notice_seen = true;
	/* slurmctld sends CONT right before the preemption signal; a stopped job must hear it in any case. */
	if (s == SIGCONT || (s != args.signal && s != SIGTERM && (args.signal || agent.fd < 0))) {
		give_signal(s);
		return;
	}
	asked[s] = true;
	if (s == SIGTERM) {
		term_seen = true;
		if (term_since == NEVER)
			term_since = now_ms();
	}
	send_notice(s);
}

static void take_signals(void)
{
	struct signalfd_siginfo si;

	while (read(signals, &si, sizeof(si)) == sizeof(si))
		one_signal(&si);
}

/* --- time --- */

static void on_time(void)
{
	long long now = now_ms();
	int err;

	if (phase == P_ENDED && now - ended_at >= ENDED_MS)
		finish();
	if (agent.fd < 0 && now >= retry_at) {
		retry_at = now + (phase == P_WAITING && !decided ? FIRST_RETRY_MS : phase == P_ENDED ? 200 : RETRY_MS);
		if (phase == P_ENDED) {
			send_ended();
		} else if (agent_connect() < 0) {
			err = errno;
			if (!decided && now - away_since >= (args.restart > 0 || is_step(&args) ? RESTART_CONTACT_MS : FIRST_CONTACT_MS))
				unreachable(&args, &original_mask, err);
		}
	}
	if (term_since != NEVER && agent.fd < 0 && now - term_since >= TERM_PATIENCE_MS &&
	    now - away_since >= TERM_PATIENCE_MS) {
		if (phase == P_WAITING || phase == P_PLACING)
			exit_like(SIGTERM); /* nothing runs yet, and a held task ends with us */
		if (phase != P_DETACHED)
			agent_answer(SIGTERM, true);
	}
	if (term_seen && phase == P_DETACHED && agent.fd < 0 && now - away_since >= FROZEN_PATIENCE_MS) {
		say("no agent goes on with this job, which stands still: it ends here");
		exit_like(SIGTERM);
	}
	if (attach_wanted && shepherd.fd < 0)
		try_attach();
	if (lost_since != NEVER && now - lost_since >= LOST_MS) {
		say(attach_wanted ? "the capsule of this job does not answer" : "the capsule of this job died");
		_exit(DIED_STATUS);
	}
}

static int next_timeout(void)
{
	if (attach_wanted || phase == P_ENDED)
		return 100;
	if (agent.fd < 0)
		return decided ? 500 : FIRST_RETRY_MS;
	return lost_since != NEVER ? 200 : -1;
}

static void shepherd_eof(void)
{
	shepherd_gone(false);
}

int main(int argc, char **argv)
{
	sigset_t all;
	const int faults[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT };

	if (task_parse(&args, argc, argv) < 0)
		return 2;
	for (int fd = 0; fd < 3; fd++) /* they are passed on for the whole life */
		if (fcntl(fd, F_GETFD) < 0)
			open("/dev/null", O_RDWR);
	sigfillset(&all);
	for (size_t i = 0; i < sizeof(faults) / sizeof(*faults); i++)
		sigdelset(&all, faults[i]);
	sigprocmask(SIG_BLOCK, &all, &original_mask);
	signals = signalfd(-1, &all, SFD_CLOEXEC | SFD_NONBLOCK);
	if (signals < 0) {
		say("signalfd: %s", strerror(errno));
		return 1;
	}
	away_since = now_ms();
	retry_at = away_since;
	for (;;) {
		struct pollfd p[3] = {
			{ .fd = signals, .events = POLLIN },
			{ .fd = agent.fd, .events = POLLIN },
			{ .fd = shepherd.fd, .events = POLLIN },
		};
		on_time();
		p[1].fd = agent.fd;
		p[2].fd = shepherd.fd;
		if (poll(p, 3, next_timeout()) < 0 && errno != EINTR) {
			say("poll: %s", strerror(errno));
			return 1;
		}
		if (p[0].revents)
			take_signals();
		/* Shepherd before agent: the end of the task is never hidden by a later word of the agent. */
		if (p[2].revents && p[2].fd == shepherd.fd)
			rx_drain(&shepherd, shepherd_frame, shepherd_eof);
		if (p[1].revents && p[1].fd == agent.fd)
			rx_drain(&agent, agent_frame, agent_gone);
	}
}
