/* SPDX-License-Identifier: Apache-2.0 */
/* The helper thread: the agent's orders over a Unix socket in the capsule (docs/nccl-cut.md). The agent connects from
 * outside and closes its end before a dump, so nothing of it is in the image; the listening socket is. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../util.h"
#include "../wire.h"
#include "state.h"

enum { TOMBSTONES = 64 };
static int listener = -1;
static _Atomic int started;
static pthread_mutex_t start_lock = PTHREAD_MUTEX_INITIALIZER;
static const char *const state_names[] = {
	"open", "closed", "draining", "drained", "destroying", "gone", "rebuilding", "rebuilt", "failed",
};

static void report_comm(struct msg *m, const struct comm *c, bool dead)
{
	static const char *const names[] = {"making", "ready", "ending", "lost"};
	struct pair *p = atomic_load(&c->pairs);
	int state = atomic_load(&c->state);
	const char *name = dead ? "dead" : state == READY && c->finalized ? "final" : names[state];

	msg_fmt(m, "COMM", "%016" PRIx64 " %s %d %d %d %" PRIu64 " %d", c->gid, name, c->nranks,
	        c->rank, c->device, atomic_load(&c->collectives), c->by_id);
	if (!dead && c->nranks > 1 && c->card[0])
		msg_str(m, "CARD", c->card);
	for (int i = 0; p && i < c->nranks; i++) {
		uint64_t sent = atomic_load(&p[i].sent), received = atomic_load(&p[i].received);

		if (sent || received)
			msg_fmt(m, "PAIR", "%016" PRIx64 " %d %d %" PRIu64 " %" PRIu64, c->gid, c->rank, i, sent, received);
	}
}

static void report(struct msg *m)
{
	int busy = 0, n = 0;

	msg_init(m, GC_NCCLSTATE);
	pthread_mutex_lock(&state_lock);
	for (struct thread *t = threads; t; t = t->next)
		busy += atomic_load(&t->busy);
	msg_str(m, "STATE", state_names[cut_state]);
	if (cut_why[0])
		msg_str(m, "WHY", cut_why);
	if (unprotected_why[0])
		msg_str(m, "UNPROTECTED", unprotected_why);
	if (shared_why[0])
		msg_str(m, "SHARES", shared_why);
	msg_int(m, "VERSION", gate.version);
	msg_int(m, "BUSY", busy);
	for (struct comm *c = comms; c; c = c->next)
		report_comm(m, c, false);
	for (struct comm *c = dead_comms; c && n < TOMBSTONES; c = c->next, n++)
		report_comm(m, c, true);
	pthread_mutex_unlock(&state_lock);
}

static bool set(uint64_t *target, uint64_t value)
{
	bool differs = *target != value;

	*target = value;
	return differs;
}

/* TARGET=gid collectives and PAIR=gid source destination count: what others have done, so that we must do it too. */
static void take_targets(const struct frame *f)
{
	uint64_t gid, count;
	const char *text;
	bool changed = false;
	int from, to;

	pthread_mutex_lock(&state_lock);
	for (size_t pos = 0; (text = frame_next(f, "TARGET", &pos));) {
		if (sscanf(text, "%" SCNx64 " %" SCNu64, &gid, &count) != 2)
			continue;
		for (struct comm *c = comms; c; c = c->next)
			if (c->gid == gid)
				changed |= set(&c->target, count);
	}
	for (size_t pos = 0; (text = frame_next(f, "PAIR", &pos));) {
		if (sscanf(text, "%" SCNx64 " %d %d %" SCNu64, &gid, &from, &to, &count) != 4)
			continue;
		for (struct comm *c = comms; c; c = c->next) {
			if (c->gid != gid || from < 0 || to < 0 || from >= c->nranks || to >= c->nranks)
				continue;
			if (c->rank == from)
				changed |= set(&pairs_of(c)[to].send_target, count);
			if (c->rank == to)
				changed |= set(&pairs_of(c)[from].receive_target, count);
		}
	}
	gate.free = frame_int(f, "FREE", 0) != 0;
	gate.version = (unsigned)frame_int(f, "VERSION", 0);
	if (changed)
		gate.changed_ms = now_ms();
	gate_moved();
	pthread_mutex_unlock(&state_lock);
}

static bool hex(const char *text, char *out, size_t size)
{
	for (size_t i = 0; i < size; i++) {
		unsigned value;

		if (sscanf(text + 2 * i, "%2x", &value) != 1)
			return false;
		out[i] = (char)value;
	}
	return text[2 * size] == 0;
}

static bool rebuild(const struct frame *f)
{
	size_t n = frame_count(f, "ID"), i = 0, pos = 0;
	struct new_id *ids = calloc(n + 1, sizeof(*ids));
	const char *text;

	if (!ids)
		return false;
	while ((text = frame_next(f, "ID", &pos)) && i < n) {
		int at = 0;

		if (sscanf(text, "%" SCNx64 " %n", &ids[i].gid, &at) != 1 || !hex(text + at, ids[i].id.internal, 128)) {
			free(ids);
			return false;
		}
		i++;
	}
	return cut_rebuild(ids, (int)i);
}

static void put_id(struct msg *m, uint64_t gid, const ncclUniqueId *id)
{
	char digits[257];

	for (int i = 0; i < 128; i++)
		snprintf(digits + 2 * i, 3, "%02x", (unsigned char)id->internal[i]);
	msg_fmt(m, "ID", "%016" PRIx64 " %s", gid, digits);
}

/* New ids for the communicators named, made here since rank 0 is here: NCCL then listens in this process for the others. */
static bool make_ids(const struct frame *f, struct msg *m)
{
	const char *text;

	for (size_t pos = 0; (text = frame_next(f, "GID", &pos));) {
		ncclUniqueId id;
		uint64_t gid;

		if (sscanf(text, "%" SCNx64, &gid) != 1 || real.ncclGetUniqueId(&id) != ncclSuccess)
			return false;
		put_id(m, gid, &id);
	}
	return true;
}

/* Those that all are told to meet by: made here, or, once this process has been told, all that it was told. */
static bool ids_for(const struct frame *f, struct msg *m)
{
	if (cut_state == GONE)
		return make_ids(f, m);
	if (cut_state != REBUILDING && cut_state != REBUILT)
		return false;
	for (int i = 0; i < new_count; i++)
		put_id(m, new_ids[i].gid, &new_ids[i].id);
	return true;
}

static void obey(int fd, const struct frame *f)
{
	const char *word = frame_get(f, "DO");
	struct msg m, ids;
	bool ok = true;

	msg_init(&ids, GC_NCCLSTATE);
	if (!word)
		ok = false;
	else if (strcmp(word, "cut") == 0)
		ok = cut_close();
	else if (strcmp(word, "target") == 0 && (ok = cut_state == CLOSED))
		take_targets(f);
	else if (strcmp(word, "drain") == 0)
		ok = cut_drain();
	else if (strcmp(word, "destroy") == 0)
		ok = cut_destroy();
	else if (strcmp(word, "ids") == 0)
		ok = ids_for(f, &ids);
	else if (strcmp(word, "rebuild") == 0)
		ok = rebuild(f);
	else if (strcmp(word, "open") == 0)
		ok = cut_open(frame_int(f, "LOST", 0) != 0);
	else if (strcmp(word, "target") != 0)
		ok = strcmp(word, "ask") == 0;
	report(&m);
	if (!ok)
		msg_fmt(&m, "REFUSED", "%s in state %s", word ? word : "nothing", state_names[cut_state]);
	if (word && ok && strcmp(word, "ids") == 0) {
		free(m.buf);
		m = ids;
		msg_str(&m, "STATE", state_names[cut_state]);
	} else {
		free(ids.buf);
	}
	msg_send(&m, fd, NULL, 0);
}

static void serve(int fd)
{
	struct frame f;
	struct rx rx;

	rx_init(&rx, fd);
	while (rx_wait(&rx, &f, -1) == 1) {
		if (f.type == GC_NCCL)
			obey(fd, &f);
		frame_clear(&f);
	}
	rx_close(&rx);
	/* Who asked for the cut is gone, and no rank was told to destroy anything: the program goes on. Once it has drained,
	 * others may have been told: then it waits for the next agent. */
	if (cut_state == CLOSED || cut_state == DRAINING)
		cut_open(false);
}

static void *helper(void *arg)
{
	prctl(PR_SET_NAME, "gpucr-nccl");
	thread_is_ours();
	for (;;) {
		struct pollfd p = {.fd = listener, .events = POLLIN};
		unsigned uid = 0;
		int fd;

		if (poll(&p, 1, -1) < 0 && errno != EINTR)
			break;
		fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
		if (fd < 0) {
			if (errno == EBADF || errno == EINVAL || errno == ENOTSOCK)
				break; /* the program has closed all it did not know */
			continue;
		}
		if (wire_peer(fd, NULL, &uid) == 0 && (uid == 0 || uid == getuid()))
			serve(fd);
		else
			close(fd);
	}
	return arg;
}

void control_start(void)
{
	const char *folder = getenv("GPUCR_NCCL_DIR");
	sigset_t all, old;
	pthread_t thread;
	char path[100];
	int fd;

	if (LIKELY(atomic_load(&started)))
		return;
	pthread_mutex_lock(&start_lock);
	if (!atomic_load(&started)) {
		snprintf(path, sizeof(path), "%s/gpucr-nccl.%d", folder && folder[0] ? folder : "/dev/shm", (int)getpid());
		fd = wire_listen(path);
		if (fd >= 0) {
			/* Out of the way of programs that count on low numbers. */
			listener = fcntl(fd, F_DUPFD_CLOEXEC, 200);
			if (listener >= 0)
				close(fd);
			else
				listener = fd;
		}
		sigfillset(&all);
		pthread_sigmask(SIG_SETMASK, &all, &old);
		if (fd < 0 || pthread_create(&thread, NULL, helper, NULL) != 0)
			unprotected("no socket for the agent could be made at %s: %s", path, strerror(errno));
		else
			pthread_detach(thread);
		pthread_sigmask(SIG_SETMASK, &old, NULL);
		atomic_store(&started, 1);
	}
	pthread_mutex_unlock(&start_lock);
}

void control_forked(void)
{
	pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;

	memcpy(&start_lock, &fresh, sizeof(fresh));
	if (listener >= 0)
		close(listener);
	listener = -1;
	atomic_store(&started, 0);
	cut_state = OPEN;
}
