/* SPDX-License-Identifier: Apache-2.0 */
/* The gate in front of NCCL, and the program's threads. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../util.h"
#include "state.h"

struct gate gate;
pthread_mutex_t state_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
struct comm *comms, *dead_comms;
struct thread *threads;
__thread struct thread *this_thread __attribute__((tls_model("initial-exec")));
char unprotected_why[512], shared_why[512];
static pthread_key_t thread_key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static bool keep(char kept[512], const char *format, va_list args)
{
	bool first;

	pthread_mutex_lock(&state_lock);
	first = !kept[0];
	if (first)
		vsnprintf(kept, 512, format, args);
	pthread_mutex_unlock(&state_lock);
	return first;
}

void unprotected(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	if (keep(unprotected_why, format, args))
		dprintf(2, "gpucr: NCCL in process %d is not protected: %s\n", (int)getpid(), unprotected_why);
	va_end(args);
}

void shared(const char *format, ...)
{
	va_list args;

	if (LIKELY(shared_why[0]))
		return;
	va_start(args, format);
	if (keep(shared_why, format, args))
		dprintf(2, "gpucr: process %d is not protected: %s\n", (int)getpid(), shared_why);
	va_end(args);
	control_start();
}

static void thread_gone(void *arg)
{
	struct thread *t = arg, **p;

	pthread_mutex_lock(&state_lock);
	for (p = &threads; *p; p = &(*p)->next)
		if (*p == t) {
			*p = t->next;
			break;
		}
	pthread_mutex_unlock(&state_lock);
	this_thread = NULL;
	free(t);
}

static void before_fork(void)
{
	pthread_mutex_lock(&state_lock);
}

static void after_fork(void)
{
	pthread_mutex_unlock(&state_lock);
}

/* The child has one thread and no right to its parent's communicators; no helper thread either. */
static void in_child(void)
{
	pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
	pthread_cond_t fresh_cond = PTHREAD_COND_INITIALIZER;

	memcpy(&state_lock, &fresh, sizeof(fresh));
	memcpy(&moved, &fresh_cond, sizeof(fresh_cond));
	threads = this_thread;
	if (this_thread)
		this_thread->next = NULL;
	comms = dead_comms = NULL;
	atomic_store(&gate.closed, 0);
	captures_forked();
	control_forked();
}

static void set_up(void)
{
	pthread_key_create(&thread_key, thread_gone);
	pthread_atfork(before_fork, after_fork, in_child);
}

struct thread *thread_new(void)
{
	struct thread *t = calloc(1, sizeof(*t));

	if (!t)
		abort();
	pthread_once(&once, set_up);
	pthread_mutex_lock(&state_lock);
	t->next = threads;
	threads = t;
	pthread_mutex_unlock(&state_lock);
	this_thread = t;
	pthread_setspecific(thread_key, t);
	return t;
}

void thread_is_ours(void)
{
	(this_thread ? this_thread : thread_new())->inside = true;
}

static bool comm_behind(const struct comm *c)
{
	const struct pair *p = atomic_load(&c->pairs);

	if (atomic_load(&c->collectives) < c->target)
		return true;
	for (int i = 0; p && i < c->nranks; i++)
		if (atomic_load(&p[i].sent) < p[i].send_target || atomic_load(&p[i].received) < p[i].receive_target)
			return true;
	return false;
}

enum { PATIENCE_MS = 100 };

/* Whether others wait for this thread: a communicator is behind that it was the last to use, or that nobody has used. When
 * that of another thread stays behind, all may pass: it may be this one that has to bring the other on its way. */
static bool wanted(const struct thread *t, bool *others)
{
	*others = false;
	for (struct comm *c = comms; c; c = c->next) {
		if (!comm_behind(c))
			continue;
		if (!atomic_load(&c->user) || atomic_load(&c->user) == t)
			return true;
		*others = true;
	}
	return *others && now_ms() - gate.changed_ms >= PATIENCE_MS;
}

void gate_wait(struct thread *t)
{
	struct timespec limit;
	bool others;

	pthread_mutex_lock(&state_lock);
	while (atomic_load(&gate.closed) && !gate.free && !wanted(t, &others)) {
		atomic_store(&t->busy, 0);
		if (others) {
			clock_gettime(CLOCK_REALTIME, &limit);
			limit.tv_nsec += PATIENCE_MS * 1000000L;
			limit.tv_sec += limit.tv_nsec / 1000000000L;
			limit.tv_nsec %= 1000000000L;
			pthread_cond_timedwait(&moved, &state_lock, &limit);
		} else {
			pthread_cond_wait(&moved, &state_lock);
		}
	}
	atomic_store(&t->busy, 1);
	pthread_mutex_unlock(&state_lock);
}

void gate_moved(void)
{
	pthread_cond_broadcast(&moved);
}
