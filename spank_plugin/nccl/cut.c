/* SPDX-License-Identifier: Apache-2.0 */
/* Draining, tearing down and making again. Each may take long, or for ever, so each runs in a thread of its own, and the
 * helper goes on to answer. docs/nccl-cut.md has the states. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

_Atomic enum cut_state cut_state;
char cut_why[256];
static bool cancelled; /* opened again while a thread was at work: it changes nothing more */
struct new_id *new_ids;
int new_count;

bool cut_close(void)
{
	if (cut_state != OPEN)
		return false;
	pthread_mutex_lock(&state_lock);
	gate.version = 0;
	gate.free = false;
	for (struct comm *c = comms; c; c = c->next) {
		struct pair *p = atomic_load(&c->pairs);

		c->target = 0;
		for (int i = 0; p && i < c->nranks; i++)
			p[i].send_target = p[i].receive_target = 0;
	}
	cut_state = CLOSED;
	atomic_store(&gate.closed, 1);
	pthread_mutex_unlock(&state_lock);
	return true;
}

/* lost: what was not made again is so for good, and the program is told by errors. */
bool cut_open(bool lost)
{
	bool whole = cut_state == CLOSED || cut_state == DRAINING || cut_state == DRAINED || cut_state == REBUILT;

	if (cut_state == OPEN)
		return true;
	if (!whole && !lost)
		return false;
	pthread_mutex_lock(&state_lock);
	for (struct comm *c = comms; c; c = c->next)
		if (!atomic_load(&c->real) && atomic_load(&c->state) != MAKING)
			atomic_store(&c->state, LOST);
	/* A thread may still be at work; no new cut before it has ended. */
	cancelled = cut_state == DRAINING || cut_state == REBUILDING || cut_state == DESTROYING;
	if (!cancelled)
		cut_state = OPEN;
	atomic_store(&gate.closed, 0);
	gate_moved();
	pthread_mutex_unlock(&state_lock);
	return true;
}

static void ended(enum cut_state state, const char *why)
{
	pthread_mutex_lock(&state_lock);
	cut_state = cancelled ? OPEN : state;
	cancelled = false;
	snprintf(cut_why, sizeof(cut_why), "%s", why ? why : "");
	pthread_mutex_unlock(&state_lock);
}

static bool start(enum cut_state state, void *(*work)(void *))
{
	sigset_t all, old;
	pthread_attr_t attr;
	pthread_t thread;
	int failed;

	cut_state = state;
	cut_why[0] = 0;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	failed = pthread_create(&thread, &attr, work, NULL);
	pthread_attr_destroy(&attr);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (failed)
		ended(FAILED, "no thread could be started");
	return true;
}

static int by_gid(const void *a, const void *b)
{
	const struct comm *x = *(struct comm *const *)a, *y = *(struct comm *const *)b;

	return x->gid != y->gid ? (x->gid < y->gid ? -1 : 1) : x->rank - y->rank;
}

/* The living communicators in an order that all ranks share. */
static struct comm **in_order(int *count)
{
	struct comm **list;
	int n = 0;

	pthread_mutex_lock(&state_lock);
	for (struct comm *c = comms; c; c = c->next)
		n++;
	list = calloc((size_t)n + 1, sizeof(*list));
	if (!list)
		abort();
	n = 0;
	for (struct comm *c = comms; c; c = c->next)
		list[n++] = c;
	pthread_mutex_unlock(&state_lock);
	qsort(list, (size_t)n, sizeof(*list), by_gid);
	*count = n;
	return list;
}

static void nap(void)
{
	nanosleep(&(struct timespec){0, 200000}, NULL);
}

static void *drain(void *arg)
{
	const char *why = NULL;
	int n;
	struct comm **list = in_order(&n);

	thread_is_ours();
	captures_hold();
	for (int i = 0; i < n && !why; i++) {
		if (i && list[i]->context == list[i - 1]->context)
			continue;
		if (!cuda_use(list[i]->context))
			why = "the CUDA context of a communicator cannot be used";
		else if (!cuda_wait())
			why = "waiting for the GPU failed";
	}
	captures_go_on();
	free(list);
	ended(why ? FAILED : DRAINED, why);
	if (why)
		cut_open(true);
	return arg;
}

bool cut_drain(void)
{
	return cut_state == CLOSED && start(DRAINING, drain);
}

static bool anyone_busy(void)
{
	bool found = false;

	pthread_mutex_lock(&state_lock);
	for (struct thread *t = threads; t && !found; t = t->next)
		found = atomic_load(&t->busy) != 0;
	pthread_mutex_unlock(&state_lock);
	return found;
}

static void settle(ncclComm_t r)
{
	ncclResult_t async = ncclSuccess;

	while (real.ncclCommGetAsyncError(r, &async) == ncclSuccess && async == ncclInProgress)
		nap();
}

static bool blocks(const struct comm *c)
{
	return !c->config || c->config->size < offsetof(ncclConfig_t, blocking) + sizeof(int) || c->config->blocking != 0;
}

static void *destroy(void *arg)
{
	int n;
	struct comm **list = in_order(&n);
	ncclComm_t *handles = calloc((size_t)n + 1, sizeof(*handles));
	const char *why = NULL;

	thread_is_ours();
	if (!handles)
		abort();
	for (int i = 0; i < n; i++)
		handles[i] = atomic_exchange(&list[i]->real, NULL);
	while (anyone_busy()) /* questions that began before */
		nap();
	for (int i = 0; i < n; i++) {
		struct comm *c = list[i];

		if (!handles[i])
			continue;
		cuda_use(c->context);
		for (struct buffer *b = c->buffers; b; b = b->next)
			real.ncclCommDeregister(handles[i], b->real);
		for (int k = 0; k < c->nredops; k++)
			if (c->redops[k].used)
				real.ncclRedOpDestroy(c->redops[k].real, handles[i]);
		if (!blocks(c) && !c->finalized) {
			real.ncclCommFinalize(handles[i]);
			settle(handles[i]);
		}
		if (real.ncclCommDestroy(handles[i]) != ncclSuccess)
			why = "a communicator was not destroyed cleanly"; /* it is gone all the same */
	}
	free(handles);
	free(list);
	ended(GONE, why);
	return arg;
}

bool cut_destroy(void)
{
	return cut_state == DRAINED && start(DESTROYING, destroy);
}

static const ncclUniqueId *id_of(uint64_t gid)
{
	for (int i = 0; i < new_count; i++)
		if (new_ids[i].gid == gid)
			return &new_ids[i].id;
	return NULL;
}

static const char *make_again(struct comm **list, int n)
{
	const ncclUniqueId *id = id_of(list[0]->gid);
	ncclResult_t r = ncclSuccess;
	char card[33];

	if (!id) {
		for (int i = 0; i < n; i++)
			atomic_store(&list[i]->state, LOST); /* a rank has left it already: nothing but its end can come */
		return NULL;
	}
	/* Several ranks of it in this process must be made at once. */
	if (n > 1 && real.ncclGroupStart() != ncclSuccess)
		return "ncclGroupStart failed";
	for (int i = 0; i < n && r == ncclSuccess; i++) {
		struct comm *c = list[i];

		if (!cuda_use(c->context))
			return "the CUDA context of a communicator cannot be used";
		if (c->config && real.ncclCommInitRankConfig)
			r = real.ncclCommInitRankConfig((ncclComm_t *)&c->real, c->nranks, *id, c->rank, c->config);
		else
			r = real.ncclCommInitRank((ncclComm_t *)&c->real, c->nranks, *id, c->rank);
		if (r == ncclInProgress) {
			if (n == 1)
				settle(atomic_load(&c->real));
			r = ncclSuccess;
		}
	}
	if (n > 1 && real.ncclGroupEnd() != ncclSuccess)
		r = ncclSystemError;
	for (int i = 0; i < n && r == ncclSuccess; i++) {
		struct comm *c = list[i];
		ncclComm_t handle = atomic_load(&c->real);

		for (struct buffer *b = c->buffers; b && r == ncclSuccess; b = b->next)
			r = real.ncclCommRegister(handle, b->start, b->size, &b->real);
		for (int k = 0; k < c->nredops && r == ncclSuccess; k++) {
			struct redop *o = &c->redops[k];

			if (o->used)
				r = real.ncclRedOpCreatePreMulSum(&o->real, o->residence == HOST_SCALAR ? o->copy : o->scalar, o->type,
				                                  o->residence, handle);
		}
		atomic_store(&c->state, READY);
		cuda_card(c->device, card); /* it may be another one by now */
		pthread_mutex_lock(&state_lock);
		memcpy(c->card, card, sizeof(card));
		pthread_mutex_unlock(&state_lock);
	}
	return r == ncclSuccess ? NULL : "NCCL could not make a communicator again";
}

static void *rebuild(void *arg)
{
	const char *why = NULL;
	int n, same;
	struct comm **list = in_order(&n);

	thread_is_ours();
	for (int i = 0; i < n && !why; i += same) {
		for (same = 1; i + same < n && list[i + same]->gid == list[i]->gid; same++)
			;
		if (atomic_load(&list[i]->real) || atomic_load(&list[i]->state) == LOST || list[i]->finalized)
			continue;
		why = make_again(list + i, same);
	}
	free(list);
	ended(why ? FAILED : REBUILT, why);
	return arg;
}

bool cut_rebuild(struct new_id *ids, int count)
{
	if (cut_state != GONE) {
		free(ids);
		return false;
	}
	free(new_ids);
	new_ids = ids;
	new_count = count;
	return start(REBUILDING, rebuild);
}
