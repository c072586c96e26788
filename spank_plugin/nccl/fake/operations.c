/* SPDX-License-Identifier: Apache-2.0 */
/* Operations and groups of the fake NCCL. */
#define _GNU_SOURCE
#include <string.h>

#include "nccl.h"

struct batch { struct ncclComm *comm; uint64_t turn; int n; struct op ops[MAX_OPS]; struct batch *next; };
struct head { uint32_t kind, bytes; uint64_t number; };

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t fake_moved = PTHREAD_COND_INITIALIZER;
__thread int fake_depth;
static __thread struct op grouped[MAX_OPS];
static __thread int ngrouped;

struct ncclComm *check(ncclComm_t c)
{
	if (!c || c->magic != MAGIC)
		DIE("not a communicator, or one after its end: %p", (void *)c);
	return c;
}

static void say_to(struct ncclComm *c, int peer, enum kind kind, uint64_t number, const void *data, size_t bytes)
{
	struct head h = {kind, (uint32_t)bytes, number};

	put(c->peers[peer], &h, sizeof(h));
	put(c->peers[peer], data, bytes);
}

static void hear_from(struct ncclComm *c, int peer, enum kind kind, uint64_t number, void *data, size_t bytes)
{
	struct head h;

	get(c->peers[peer], &h, sizeof(h));
	if (h.kind != kind || h.number != number || h.bytes != bytes)
		DIE("rank %d does kind %d number %llu of %zu bytes, rank %d kind %u number %llu of %u", c->rank, kind,
		    (unsigned long long)number, bytes, peer, h.kind, (unsigned long long)h.number, h.bytes);
	get(c->peers[peer], data, bytes);
}

/* Everybody's bytes to everybody, in rank order. */
void exchange(struct ncclComm *c, enum kind kind, const void *mine, size_t bytes, char *all)
{
	uint64_t number = c->collectives++;

	if (bytes > MAX_BYTES)
		DIE("%zu bytes are too many", bytes);
	for (int r = 0; r < c->nranks; r++)
		if (r != c->rank)
			say_to(c, r, kind, number, mine, bytes);
	for (int r = 0; r < c->nranks; r++) {
		if (r == c->rank)
			memcpy(all + (size_t)r * bytes, mine, bytes);
		else
			hear_from(c, r, kind, number, all + (size_t)r * bytes, bytes);
	}
}

static int64_t reduce(struct ncclComm *c, int op, int64_t a, int64_t b)
{
	if (op >= NUM_OPS && op - NUM_OPS >= c->nscalars)
		DIE("operator %d is not known", op);
	if (op == 2)
		return a > b ? a : b;
	if (op == 3)
		return a < b ? a : b;
	return (int64_t)((uint64_t)a + (uint64_t)b);
}

static void execute(struct ncclComm *c, const struct op *o)
{
	static __thread char all[MAX_RANKS * MAX_BYTES];
	static __thread int64_t scaled[MAX_BYTES / 8];
	size_t bytes = o->count * 8, whole = o->kind == REDUCE_SCATTER ? bytes * (size_t)c->nranks : bytes;
	const int64_t *in = o->in;

	if (o->kind == SEND) {
		say_to(c, o->root, SEND, c->sent[o->root]++, o->in, bytes);
		return;
	}
	if (o->kind == RECEIVE) {
		hear_from(c, o->root, SEND, c->received[o->root]++, o->out, bytes);
		return;
	}
	if (o->op >= NUM_OPS) {
		if (o->op - NUM_OPS >= c->nscalars)
			DIE("operator %d is not known", o->op);
		for (size_t i = 0; i < whole / 8; i++)
			scaled[i] = (int64_t)((uint64_t)in[i] * (uint64_t)c->scalars[o->op - NUM_OPS]);
		in = scaled;
	}
	exchange(c, o->kind, in, whole, all);
	if (o->kind == ALL_GATHER) {
		memcpy(o->out, all, bytes * (size_t)c->nranks);
	} else if (o->kind == BROADCAST) {
		memcpy(o->out, all + (size_t)o->root * bytes, bytes);
	} else if (o->kind != REDUCE || o->root == c->rank) {
		size_t at = o->kind == REDUCE_SCATTER ? (size_t)c->rank * o->count : 0;

		for (size_t i = 0; i < o->count; i++) {
			int64_t value = ((int64_t *)all)[at + i];

			for (int r = 1; r < c->nranks; r++)
				value = reduce(c, o->op, value, ((int64_t *)(all + (size_t)r * whole))[at + i]);
			((int64_t *)o->out)[i] = value;
		}
	}
}

void take_turn(struct ncclComm *c, uint64_t turn)
{
	pthread_mutex_lock(&fake_lock);
	while (c->done != turn)
		pthread_cond_wait(&fake_moved, &fake_lock);
	pthread_mutex_unlock(&fake_lock);
}

void end_turn(struct ncclComm *c)
{
	pthread_mutex_lock(&fake_lock);
	c->done++;
	pthread_cond_broadcast(&fake_moved);
	pthread_mutex_unlock(&fake_lock);
}

static void run(void *arg)
{
	struct batch *b = arg;

	take_turn(b->comm, b->turn);
	/* Sends and receives of a group go at once: buffers of sockets hold what is small. */
	for (int i = 0; i < b->n; i++)
		if (b->ops[i].kind == SEND)
			execute(b->comm, &b->ops[i]);
	for (int i = 0; i < b->n; i++)
		if (b->ops[i].kind != SEND)
			execute(b->comm, &b->ops[i]);
	end_turn(b->comm);
	free(b);
}

uint64_t next_turn(struct ncclComm *c)
{
	uint64_t turn;

	pthread_mutex_lock(&fake_lock);
	turn = c->issued++;
	pthread_mutex_unlock(&fake_lock);
	return turn;
}

/* Queue operations of one communicator; the turn to wait for, or 0. */
static uint64_t launch(struct ncclComm *c, const struct op *ops, int n)
{
	struct batch *b = calloc(1, sizeof(*b));
	int first = 0;

	if (!b)
		abort();
	b->comm = c;
	for (int i = 0; i < n; i++) {
		unsigned char *met = &c->met[ops[i].kind == SEND || ops[i].kind == RECEIVE ? ops[i].root : MAX_RANKS];

		if (ops[i].comm != c)
			continue;
		first |= !*met;
		*met = 1;
		b->ops[b->n++] = ops[i];
	}
	pthread_mutex_lock(&fake_lock);
	b->turn = c->issued++;
	first = first ? (int)c->issued : 0;
	fake_enqueue(b->ops[0].stream, run, b);
	pthread_mutex_unlock(&fake_lock);
	return (uint64_t)first;
}

void wait_done(struct ncclComm *c, uint64_t count)
{
	pthread_mutex_lock(&fake_lock);
	while (c->done < count)
		pthread_cond_wait(&fake_moved, &fake_lock);
	pthread_mutex_unlock(&fake_lock);
}

static ncclResult_t add(struct op o)
{
	check(o.comm);
	if (o.count * 8 > MAX_BYTES || o.root < 0 || o.root >= o.comm->nranks)
		DIE("bad count or rank");
	if (fake_depth) {
		if (ngrouped == MAX_OPS)
			DIE("too many operations in a group");
		grouped[ngrouped++] = o;
	} else {
		uint64_t turn = launch(o.comm, &o, 1);

		if (turn)
			wait_done(o.comm, turn);
	}
	return ncclSuccess;
}

#define OP(...) add((struct op){__VA_ARGS__, .comm = comm, .stream = (stream_t)stream})
API ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, int type, int op, ncclComm_t comm, cudaStream_t stream)
{
	(void)type;
	return OP(ALL_REDUCE, in, out, count, op);
}
API ncclResult_t ncclReduce(const void *in, void *out, size_t count, int type, int op, int root, ncclComm_t comm, cudaStream_t stream)
{
	(void)type;
	return OP(REDUCE, in, out, count, op, root);
}
API ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, int type, int op, ncclComm_t comm, cudaStream_t stream)
{
	(void)type;
	return OP(REDUCE_SCATTER, in, out, count, op);
}
API ncclResult_t ncclAllGather(const void *in, void *out, size_t count, int type, ncclComm_t comm, cudaStream_t stream)
{
	(void)type;
	return OP(ALL_GATHER, in, out, count);
}
API ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, int type, int root, ncclComm_t comm, cudaStream_t stream)
{
	(void)type;
	return OP(BROADCAST, in, out, count, .root = root);
}
API ncclResult_t ncclSend(const void *in, size_t count, int type, int peer, ncclComm_t comm, cudaStream_t stream)
{
	(void)type;
	return OP(SEND, in, NULL, count, .root = peer);
}
API ncclResult_t ncclRecv(void *out, size_t count, int type, int peer, ncclComm_t comm, cudaStream_t stream)
{
	(void)type;
	return OP(RECEIVE, NULL, out, count, .root = peer);
}

API ncclResult_t ncclGroupStart(void)
{
	fake_depth++;
	return ncclSuccess;
}

API ncclResult_t ncclGroupEnd(void)
{
	struct { struct ncclComm *comm; uint64_t turn; } waits[MAX_OPS];
	int n = 0;

	if (fake_depth == 0)
		DIE("the end of no group");
	if (--fake_depth)
		return ncclSuccess;
	make_grouped();
	for (int i = 0; i < ngrouped; i++) {
		int seen = 0;

		for (int k = 0; k < i; k++)
			seen |= grouped[k].comm == grouped[i].comm;
		if (seen)
			continue;
		waits[n].comm = grouped[i].comm;
		waits[n++].turn = launch(grouped[i].comm, grouped, ngrouped);
	}
	ngrouped = 0;
	for (int i = 0; i < n; i++)
		if (waits[i].turn)
			wait_done(waits[i].comm, waits[i].turn);
	return ncclSuccess;
}
