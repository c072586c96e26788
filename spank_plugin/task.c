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
#define FIRST_RETRY_MS 100
#define RETRY_MS 1000
#define TERM_PATIENCE_MS 3000 /* a scancel may not depend on the agent */
#define LOST_MS 5000          /* the agent kills the capsule first and tells then */
#define ENDED_MS 3000
#define DIED_STATUS 137
#define NEVER (-1LL)

static struct task_args args;
static enum phase phase = P_WAITING;
static struct rx agent = { .fd = -1 }, shepherd = { .fd = -1 };
static int signals = -1;
static sigset_t original_mask;
static bool decided;          /* a first HELLO has been answered */
static int hellos_open;       /* HELLO MODE=again without an answer; its OK must not be taken for that of ENDED */
static char task_key[256], shepherd_path[4096];
static bool attaching;        /* the open request is ATTACHTASK, not SPAWN */
static bool attach_wanted;    /* ATTACH came, the connection did not work yet */
static bool queued[NSIG];     /* signals for the task while there is no connection to it */
static bool asked[NSIG];      /* the agent was told, or shall be, and has not answered */
static long long term_since = NEVER, lost_since = NEVER, away_since, retry_at, ended_at;
static bool notice_seen;      /* our preemption signal came at any time in this run */
static int end_status;

/* --- signals for the task --- */

static void give_signal(int s)
{
	struct msg m;

	if (phase != P_RUNNING) {
		queued[s] = phase != P_ENDED;
		return;
	}
	msg_init(&m, GC_SIGNAL);
	msg_str(&m, "TASK", task_key);
	msg_int(&m, "SIGNAL", s);
	if (msg_send(&m, shepherd.fd, NULL, 0) < 0)
		queued[s] = true; /* the end of the connection shows itself in poll() */
}

static void give_queued(void)
{
	for (int s = 1; s < NSIG; s++)
		if (queued[s]) {
			queued[s] = false;
			give_signal(s);
		}
}

/* --- agent --- */

static void agent_gone(void)
{
	rx_close(&agent);
	hellos_open = 0;
	away_since = now_ms();
	retry_at = away_since + (decided ? RETRY_MS : FIRST_RETRY_MS);
}

static void send_notice(int s)
{
	struct msg m;

	if (agent.fd < 0)
		return; /* asked[s] stays and goes with the next HELLO */
	msg_init(&m, GC_NOTICE);
	msg_int(&m, "SIGNAL", s);
	if (msg_send(&m, agent.fd, NULL, 0) < 0)
		agent_gone();
}

static int agent_connect(void)
{
	unsigned uid;
	int fd = wire_connect(args.socket), first = 0;
	struct msg m;

	if (fd < 0)
		return -1;
	/* Whoever answers here gets our descriptors and gives orders: only root, or ourselves in tests. */
	if (wire_peer(fd, NULL, &uid) < 0 || (uid != 0 && uid != getuid())) {
		close(fd);
		errno = EPERM;
		return -1;
	}
	rx_init(&agent, fd);
	for (int s = 1; s < NSIG && !first; s++)
		if (asked[s])
			first = s;
	build_hello(&m, &args, decided, phase == P_RUNNING || phase == P_ENDED, first);
	if (msg_send(&m, fd, NULL, 0) < 0) {
		int saved = errno;

		agent_gone();
		errno = saved;
		return -1;
	}
	if (decided)
		hellos_open++;
	for (int s = first + 1; s < NSIG; s++)
		if (asked[s])
			send_notice(s);
	return 0;
}

static void print_msg(const struct frame *f)
{
	const char *text = frame_get(f, "MSG");

	if (text && *text)
		say("%s", text);
}

/* --- shepherd --- */

static int shepherd_connect(struct msg *request)
{
	int fd = wire_connect(shepherd_path), fds[4], n = stdio_fds(&args, fds);

	if (fd < 0 || msg_send(request, fd, fds, n) < 0) {
		int saved = errno;

		free(request->buf);
		if (fd >= 0)
			close(fd);
		errno = saved;
		return -1;
	}
	rx_init(&shepherd, fd);
	phase = P_SPAWNING;
	return 0;
}

static void remember(const struct frame *f)
{
	const char *task = frame_get(f, "TASK"), *path = frame_get(f, "SOCKET");

	snprintf(task_key, sizeof(task_key), "%s", task ? task : "");
	snprintf(shepherd_path, sizeof(shepherd_path), "%s", path ? path : "");
}

static void start(const struct frame *f)
{
	struct msg m;

	remember(f);
	build_spawn(&m, &args, f);
	if (shepherd_connect(&m) < 0) {
		say("could not hand the job to its capsule at %s: %s", shepherd_path, strerror(errno));
		_exit(1);
	}
}

static void try_attach(void)
{
	struct msg m;

	msg_init(&m, GC_ATTACHTASK);
	msg_str(&m, "TASK", task_key);
	if (shepherd_connect(&m) == 0) {
		attach_wanted = false;
		attaching = true;
		lost_since = NEVER;
	} else if (lost_since == NEVER) {
		lost_since = now_ms();
	}
}

static void shepherd_gone(bool expected)
{
	rx_close(&shepherd);
	if (phase == P_ENDED)
		return;
	phase = expected ? P_DETACHED : P_LOST;
	lost_since = expected ? NEVER : now_ms();
}

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
		if (first) {
			decided = true;
			start(f);
		}
		break;
	case GC_ATTACH:
		hellos_open = 0;
		print_msg(f);
		decided = true;
		if (phase == P_WAITING || phase == P_DETACHED || phase == P_LOST) {
			remember(f);
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
	/* A notice that is pending at this very moment counts: Slurm will requeue the job that has just ended. */
	take_signals();
	send_ended();
}

static void shepherd_frame(struct frame *f)
{
	const char *why = frame_get(f, "MSG");
	struct msg m;
	int err;

	switch (f->type) {
	case GC_SPAWNED:
		if (phase != P_SPAWNING)
			break;
		msg_init(&m, GC_GO);
		msg_str(&m, "TASK", task_key);
		if (msg_send(&m, shepherd.fd, NULL, 0) < 0)
			break;
		phase = P_RUNNING;
		give_queued();
		break;
	case GC_ATTACHED:
		if (phase != P_SPAWNING)
			break;
		phase = P_RUNNING;
		give_queued();
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
	if (s == SIGTERM && term_since == NEVER)
		term_since = now_ms();
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
			if (!decided && now - away_since >= (args.restart > 0 ? RESTART_CONTACT_MS : FIRST_CONTACT_MS))
				unreachable(&args, &original_mask, err);
		}
	}
	if (term_since != NEVER && agent.fd < 0 && now - term_since >= TERM_PATIENCE_MS &&
	    now - away_since >= TERM_PATIENCE_MS) {
		if (phase == P_WAITING)
			exit_like(SIGTERM); /* nothing runs yet */
		agent_answer(SIGTERM, true);
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
