/* SPDX-License-Identifier: Apache-2.0 */
/* The supervisor's two connections: to the agent, which decides, and to the shepherd, which has the task. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "task.h"
#include "util.h"

enum { CONNECT_TRIES = 200, CONNECT_PAUSE_MS = 50 };

struct task_args args;
enum phase phase = P_WAITING;
struct rx agent = { .fd = -1 }, shepherd = { .fd = -1 };
bool decided, attaching, attach_wanted, restored;
int hellos_open;
bool queued[NSIG], asked[NSIG];
long long lost_since = NEVER, away_since, retry_at, held_pid;
static char task_key[256], shepherd_path[4096];

/* --- signals for the task --- */

/* A frame about our task, with one number or none (key NULL). */
static int send_about(const struct rx *to, uint32_t type, const char *key, long long value)
{
	struct msg m;

	msg_init(&m, type);
	msg_str(&m, "TASK", task_key);
	if (key)
		msg_int(&m, key, value);
	return msg_send(&m, to->fd, NULL, 0);
}

void give_signal(int s)
{
	if (phase != P_RUNNING)
		queued[s] = phase != P_ENDED;
	else if (send_about(&shepherd, GC_SIGNAL, "SIGNAL", s) < 0)
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

void agent_gone(void)
{
	rx_close(&agent);
	hellos_open = 0;
	away_since = now_ms();
	retry_at = away_since + (decided ? RETRY_MS : FIRST_RETRY_MS);
}

void send_notice(int s)
{
	struct msg m;

	if (agent.fd < 0)
		return; /* asked[s] stays and goes with the next HELLO */
	msg_init(&m, GC_NOTICE);
	msg_int(&m, "SIGNAL", s);
	if (msg_send(&m, agent.fd, NULL, 0) < 0)
		agent_gone();
}

/* The task is held: have the agent move it. An agent that is away is asked when it comes back. */
void ask_place(void)
{
	if (agent.fd >= 0 && send_about(&agent, GC_PLACE, "PID", held_pid) < 0)
		agent_gone();
}

int agent_connect(void)
{
	/* Whoever answers here gets our descriptors and gives orders: only root, or ourselves in tests. */
	int fd = wire_connect_trusted(args.socket), first = 0;
	struct msg m;

	if (fd < 0)
		return -1;
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
	if (phase == P_PLACING)
		ask_place();
	return 0;
}

void print_msg(const struct frame *f)
{
	const char *text = frame_get(f, "MSG");

	if (text && *text)
		say("%s", text);
}

/* --- shepherd --- */

static int shepherd_connect(struct msg *request)
{
	int fd, fds[4], n = stdio_fds(&args, fds);

	/* With many tasks of a node at once its backlog is full for a moment. */
	for (int i = 0; (fd = wire_connect(shepherd_path)) < 0 && errno == EAGAIN && i < CONNECT_TRIES; i++)
		poll(NULL, 0, CONNECT_PAUSE_MS);
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

void remember(const struct frame *f)
{
	const char *task = frame_get(f, "TASK"), *path = frame_get(f, "SOCKET");

	snprintf(task_key, sizeof(task_key), "%s", task ? task : "");
	snprintf(shepherd_path, sizeof(shepherd_path), "%s", path ? path : "");
}

void start(const struct frame *f)
{
	struct msg m;

	remember(f);
	build_spawn(&m, &args, f);
	if (shepherd_connect(&m) < 0) {
		say("could not hand the job to its capsule at %s: %s", shepherd_path, strerror(errno));
		_exit(1);
	}
}

void try_attach(void)
{
	struct msg m;

	msg_init(&m, GC_ATTACHTASK);
	msg_str(&m, "TASK", task_key);
	msg_int(&m, "RESTORED", restored);
	if (shepherd_connect(&m) == 0) {
		attach_wanted = false;
		attaching = true;
		lost_since = NEVER;
	} else if (lost_since == NEVER) {
		lost_since = now_ms();
	}
}

void shepherd_gone(bool expected)
{
	rx_close(&shepherd);
	if (phase == P_ENDED)
		return;
	phase = expected ? P_DETACHED : P_LOST;
	lost_since = expected ? NEVER : now_ms();
}

void let_go(void)
{
	if (held_pid && send_about(&shepherd, GC_GO, NULL, 0) < 0)
		return;
	phase = P_RUNNING;
	give_queued();
}
