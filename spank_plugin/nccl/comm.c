/* SPDX-License-Identifier: Apache-2.0 */
/* How communicators come and go: each has a record with what is needed to make it again. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

#define API __attribute__((visibility("default")))

static uint64_t hash(uint64_t h, const void *data, size_t size)
{
	const unsigned char *p = data;

	for (size_t i = 0; i < size; i++)
		h = (h ^ p[i]) * 0x100000001b3ULL;
	return h ^ (h >> 29);
}

static uint64_t hash_int(uint64_t h, uint64_t value)
{
	return hash(h, &value, sizeof(value));
}
#define HASH 0xcbf29ce484222325ULL

/* A whole copy: the strings in it are the program's, and may be gone later. */
static ncclConfig_t *config_copy(const ncclConfig_t *config)
{
	ncclConfig_t *copy;

	if (!config || config->size < offsetof(ncclConfig_t, blocking) || config->size > 4096)
		return NULL;
	copy = malloc(config->size);
	if (!copy)
		return NULL;
	memcpy(copy, config, config->size);
	if (config->size >= offsetof(ncclConfig_t, net_name) + sizeof(char *) && config->net_name)
		copy->net_name = strdup(config->net_name);
	if (config->size >= sizeof(ncclConfig_t) && config->comm_name)
		copy->comm_name = strdup(config->comm_name);
	return copy;
}

static struct comm *comm_new(struct thread *t, uint64_t gid, int nranks, int rank, const ncclConfig_t *config,
                             struct comm *parent)
{
	struct comm *c = calloc(1, sizeof(*c));

	if (!c)
		return NULL;
	c->magic = LIVE;
	c->gid = gid;
	c->nranks = nranks;
	c->rank = rank;
	c->context = cuda_context(&c->device);
	c->config = config_copy(config);
	c->parent = parent;
	c->by_id = !parent;
	pthread_mutex_lock(&state_lock);
	c->next = comms;
	comms = c;
	pthread_mutex_unlock(&state_lock);
	c->made_next = t->made;
	t->made = c;
	control_start();
	return c;
}

void comm_forget(struct comm *c)
{
	pthread_mutex_lock(&state_lock);
	for (struct comm **p = &comms; *p; p = &(*p)->next)
		if (*p == c) {
			*p = c->next;
			c->next = dead_comms;
			dead_comms = c;
			c->magic = DEAD;
			break;
		}
	pthread_mutex_unlock(&state_lock);
}

/* A call or group that made communicators has ended. What the new ones are is asked of NCCL. */
void comms_made(struct thread *t)
{
	struct comm *c;

	while ((c = t->made) != NULL) {
		ncclComm_t r = atomic_load(&c->real);
		ncclResult_t async = ncclSuccess;
		int nranks, rank, device;
		char card[33];

		t->made = c->made_next;
		t->inside = true;
		while (!r && c->parent && atomic_load(&c->parent->real) && async != ncclInvalidArgument) {
			if (real.ncclCommGetAsyncError(atomic_load(&c->parent->real), &async) != ncclSuccess || async != ncclInProgress)
				async = ncclInvalidArgument; /* the parent has done it: one more look */
			else
				usleep(200);
			r = atomic_load(&c->real);
		}
		if (!r) {
			t->inside = false;
			comm_forget(c); /* the group that should have made it failed */
			continue;
		}
		while (real.ncclCommGetAsyncError(r, &async) == ncclSuccess && async == ncclInProgress)
			usleep(200); /* a communicator that does not block is ready when its call returns */
		if (async != ncclSuccess || real.ncclCommCount(r, &nranks) != ncclSuccess ||
		    real.ncclCommUserRank(r, &rank) != ncclSuccess || real.ncclCommCuDevice(r, &device) != ncclSuccess) {
			atomic_store(&c->state, LOST);
		} else {
			cuda_card(device, card);
			pthread_mutex_lock(&state_lock);
			memcpy(c->card, card, sizeof(card));
			c->nranks = nranks;
			c->rank = rank;
			c->device = device;
			if (!c->context) /* the driver was not there before */
				c->context = cuda_primary(device);
			atomic_store(&c->state, READY);
			pthread_mutex_unlock(&state_lock);
		}
		t->inside = false;
	}
}

struct pair *pairs_of(struct comm *c)
{
	struct pair *p = atomic_load_explicit(&c->pairs, memory_order_acquire), *fresh;

	if (LIKELY(p != NULL) || c->nranks <= 0)
		return p;
	fresh = calloc((size_t)c->nranks, sizeof(*fresh));
	if (!fresh)
		abort();
	if (atomic_compare_exchange_strong(&c->pairs, &p, fresh))
		return fresh;
	free(fresh);
	return p;
}

static ncclResult_t by_id(ncclComm_t *out, int nranks, uint64_t gid, int rank, const ncclConfig_t *config,
                          ncclResult_t (*call)(void *, ncclComm_t *), void *arg)
{
	struct thread *t;
	struct comm *c;
	ncclResult_t r;

	if (!unit_begin(&t))
		return call(arg, out);
	c = comm_new(t, gid, nranks, rank, config, NULL);
	if (!c) {
		unit_end(t);
		return ncclSystemError;
	}
	r = call(arg, (ncclComm_t *)&c->real);
	if (r == ncclSuccess || r == ncclInProgress) {
		*out = (ncclComm_t)(void *)c;
		r = ncclSuccess;
	} else {
		atomic_store(&c->real, NULL);
	}
	unit_end(t);
	return r;
}

struct init { int nranks, rank, nids; const ncclUniqueId *ids; ncclConfig_t *config; int kind; };

static ncclResult_t call_init(void *arg, ncclComm_t *out)
{
	struct init *i = arg;

	if (i->kind == 0)
		return real.ncclCommInitRank(out, i->nranks, *i->ids, i->rank);
	if (i->kind == 1)
		return real.ncclCommInitRankConfig(out, i->nranks, *i->ids, i->rank, i->config);
	return real.ncclCommInitRankScalable(out, i->nranks, i->rank, i->nids, (ncclUniqueId *)(uintptr_t)i->ids, i->config);
}

static ncclResult_t init(ncclComm_t *out, struct init *i)
{
	uint64_t gid;

	if (!wrapping() || !out || i->nids < 1 || !i->ids)
		return call_init(i, out);
	gid = hash_int(hash(HASH, i->ids, (size_t)i->nids * sizeof(*i->ids)), (uint64_t)i->nranks);
	return by_id(out, i->nranks, gid, i->rank, i->config, call_init, i);
}

API ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank)
{
	return init(comm, &(struct init){nranks, rank, 1, &commId, NULL, 0});
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t *config)
{
	return init(comm, &(struct init){nranks, rank, 1, &commId, config, 1});
}

API ncclResult_t ncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank, int nId, ncclUniqueId *commIds,
                                          ncclConfig_t *config)
{
	return init(newcomm, &(struct init){nranks, myrank, nId, commIds, config, 2});
}

API ncclResult_t ncclCommInitAll(ncclComm_t *comm, int ndev, const int *devlist)
{
	static _Atomic unsigned number;
	struct thread *t;
	struct timespec now;
	uint64_t gid;
	ncclResult_t r;

	if (!wrapping() || !comm || ndev < 1)
		return real.ncclCommInitAll(comm, ndev, devlist);
	if (!unit_begin(&t))
		return real.ncclCommInitAll(comm, ndev, devlist);
	clock_gettime(CLOCK_REALTIME, &now);
	gid = hash_int(hash(HASH, &now, sizeof(now)), ((uint64_t)getpid() << 32) | atomic_fetch_add(&number, 1));
	r = real.ncclCommInitAll(comm, ndev, devlist);
	for (int i = 0; r == ncclSuccess && i < ndev; i++) {
		struct comm *c = comm_new(t, gid, ndev, i, NULL, NULL);

		if (!c)
			abort();
		atomic_store(&c->real, comm[i]);
		pthread_mutex_lock(&state_lock);
		c->device = devlist ? devlist[i] : i;
		c->context = cuda_primary(c->device);
		pthread_mutex_unlock(&state_lock);
		comm[i] = (ncclComm_t)(void *)c;
	}
	unit_end(t);
	return r;
}

/* Splitting and shrinking: every rank of the parent takes part, so it counts as an operation of the parent. */
struct derive { int a, b, flags; int *list; ncclConfig_t *config; bool shrink; };

static ncclResult_t call_derive(struct derive *d, ncclComm_t parent, ncclComm_t *out)
{
	if (d->shrink)
		return real.ncclCommShrink(parent, d->list, d->a, out, d->config, d->flags);
	return real.ncclCommSplit(parent, d->a, d->b, out, d->config);
}

static ncclResult_t derive(ncclComm_t parent, ncclComm_t *out, struct derive *d)
{
	struct comm *p = wrapping() ? ours(parent) : NULL, *c = NULL;
	struct thread *t;
	ncclResult_t r;
	uint64_t gid;

	if (!p || !out)
		return call_derive(d, parent, out);
	if (!unit_begin(&t))
		return call_derive(d, atomic_load(&p->real), out);
	r = usable(p);
	if (r == ncclSuccess) {
		atomic_fetch_add(&p->collectives, 1);
		atomic_store(&p->user, t);
		gid = hash_int(hash_int(p->gid, ++p->children), d->shrink);
		gid = d->shrink ? hash(gid, d->list, (size_t)d->a * sizeof(int)) : hash_int(gid, (uint64_t)d->a);
		if (d->shrink || d->a != NO_COLOUR) {
			c = comm_new(t, gid, 0, -1, d->config ? d->config : p->config, p);
			r = c ? ncclSuccess : ncclSystemError;
		}
	}
	if (r == ncclSuccess)
		r = call_derive(d, atomic_load(&p->real), c ? (ncclComm_t *)&c->real : out);
	if (r == ncclSuccess || r == ncclInProgress) {
		if (c)
			*out = (ncclComm_t)(void *)c;
		if (t->groups == 0)
			r = ncclSuccess; /* comms_made() waits */
	} else if (c) {
		atomic_store(&c->real, NULL);
	}
	unit_end(t);
	return r;
}

API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config)
{
	return derive(comm, newcomm, &(struct derive){.a = color, .b = key, .config = config});
}

API ncclResult_t ncclCommShrink(ncclComm_t comm, int *excludeRanksList, int excludeRanksCount, ncclComm_t *newcomm,
                                ncclConfig_t *config, int shrinkFlags)
{
	return derive(comm, newcomm, &(struct derive){.a = excludeRanksCount, .list = excludeRanksList, .flags = shrinkFlags,
	                                              .config = config, .shrink = true});
}

/* Ending. A communicator that could not be made again is only forgotten. */
static ncclResult_t end(ncclComm_t comm, bool forget)
{
	struct comm *c = wrapping() ? ours(comm) : NULL;
	ncclResult_t (*call)(ncclComm_t) = forget ? real.ncclCommDestroy : real.ncclCommFinalize;
	struct thread *t;
	ncclResult_t r = ncclSuccess;

	if (!c)
		return call(comm);
	if (!unit_begin(&t))
		return call(atomic_load(&c->real));
	if (c->magic == DEAD) {
		r = ncclInvalidArgument;
	} else {
		if (atomic_load(&c->real)) {
			atomic_store(&c->state, ENDING);
			r = call(atomic_load(&c->real));
			atomic_store(&c->state, READY);
		}
		c->finalized = true;
		if (forget)
			comm_forget(c);
	}
	unit_end(t);
	return r;
}

API ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
	return end(comm, true);
}

API ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
	return end(comm, false);
}

/* Never waits: it is called when something hangs. */
API ncclResult_t ncclCommAbort(ncclComm_t comm)
{
	struct comm *c = wrapping() ? ours(comm) : NULL;
	ncclComm_t r;

	if (!c)
		return real.ncclCommAbort(comm);
	if (c->magic == DEAD)
		return ncclInvalidArgument;
	atomic_store(&c->state, LOST);
	r = atomic_exchange(&c->real, NULL);
	comm_forget(c);
	return r ? real.ncclCommAbort(r) : ncclSuccess;
}

API ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags)
{
	struct comm *c = wrapping() ? ours(comm) : NULL;
	ncclComm_t r;

	if (!c)
		return real.ncclCommRevoke(comm, revokeFlags);
	atomic_store(&c->state, LOST); /* nothing can be done with it but its end */
	r = atomic_load(&c->real);
	return r ? real.ncclCommRevoke(r, revokeFlags) : ncclSuccess;
}
