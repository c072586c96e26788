/* SPDX-License-Identifier: Apache-2.0 */
/* How communicators of the fake NCCL are made and ended, and what is asked of them. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "nccl.h"

static __thread struct { ncclComm_t *out; int nranks, rank; ncclUniqueId id; ncclConfig_t *config; } inits[8];
static __thread int ninits;

struct hello { int rank, nranks; struct address at; };

/* Brings the ranks of one communicator together: learns from each where it listens, tells all of it to each. */
static void *root(void *arg)
{
	struct hello h, all[MAX_RANKS];
	int listener = (int)(intptr_t)arg, fds[MAX_RANKS], n = 0, total;

	do {
		int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);

		if (fd < 0)
			DIE("accept: %s", strerror(errno));
		get(fd, &h, sizeof(h));
		total = h.nranks;
		all[h.rank] = h;
		fds[n++] = fd;
	} while (n < total);
	for (int i = 0; i < n; i++) {
		put(fds[i], all, sizeof(all));
		close(fds[i]);
	}
	close(listener);
	return NULL;
}

API ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
	struct address a;
	pthread_t t;
	int fd = listen_at(&a);

	memset(id, 0, sizeof(*id));
	memcpy(id->internal, &a.size, sizeof(a.size));
	memcpy(id->internal + sizeof(a.size), &a.a, a.size);
	if (pthread_create(&t, NULL, root, (void *)(intptr_t)fd))
		abort();
	pthread_detach(t);
	return ncclSuccess;
}

static struct ncclComm *make(int nranks, int rank, const ncclUniqueId *id, const ncclConfig_t *config)
{
	struct ncclComm *c = calloc(1, sizeof(*c));
	struct address root_at = {.size = 0};
	struct hello all[MAX_RANKS], mine = {.rank = rank, .nranks = nranks};
	int fd, memory, listener = listen_at(&mine.at);

	if (!c || nranks < 1 || nranks > MAX_RANKS || rank < 0 || rank >= nranks)
		DIE("bad rank %d of %d", rank, nranks);
	c->magic = MAGIC;
	c->nranks = nranks;
	c->rank = rank;
	c->blocking = !config || config->blocking != 0;
	c->listener = listener; /* open as long as it lives, as the real one's */
	memcpy(&root_at.size, id->internal, sizeof(root_at.size));
	memcpy(&root_at.a, id->internal + sizeof(root_at.size), sizeof(id->internal) - sizeof(root_at.size));
	fd = connect_to(&root_at);
	put(fd, &mine, sizeof(mine));
	get(fd, all, sizeof(all));
	close(fd);
	for (int r = 0; r < rank; r++) {
		c->peers[r] = connect_to(&all[r].at);
		put(c->peers[r], &rank, sizeof(rank));
	}
	for (int r = rank + 1; r < nranks; r++) {
		int who;

		fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
		get(fd, &who, sizeof(who));
		c->peers[who] = fd;
	}
	/* What a look at the process's maps shall find as long as the communicator lives. */
	memory = memfd_create("fake-nccl-peer", MFD_CLOEXEC);
	if (memory < 0 || ftruncate(memory, 4096) < 0)
		DIE("no memory");
	c->peer_memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
	close(memory);
	return c;
}

void make_grouped(void)
{
	for (int i = 0; i < ninits; i++)
		*inits[i].out = make(inits[i].nranks, inits[i].rank, &inits[i].id, inits[i].config);
	ninits = 0;
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config)
{
	if (config && config->magic != 0xcafebeef)
		DIE("bad configuration");
	if (fake_depth) {
		inits[ninits].out = comm;
		inits[ninits].nranks = nranks;
		inits[ninits].rank = rank;
		inits[ninits].config = config;
		inits[ninits++].id = id;
	} else {
		*comm = make(nranks, rank, &id, config);
	}
	return ncclSuccess;
}

API ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank)
{
	return ncclCommInitRankConfig(comm, nranks, id, rank, NULL);
}

API ncclResult_t ncclCommSplit(ncclComm_t comm, int colour, int key, ncclComm_t *out, ncclConfig_t *config)
{
	struct { int colour, key; } mine = {colour, key}, all[MAX_RANKS];
	ncclUniqueId id = {{0}}, ids[MAX_RANKS];
	int nranks = 0, rank = 0, first = -1;

	check(comm);
	if (fake_depth)
		DIE("a split in a group");
	take_turn(comm, next_turn(comm));
	exchange(comm, TALK, &mine, sizeof(mine), (char *)all);
	for (int r = 0; r < comm->nranks && colour != NO_COLOUR; r++) {
		if (all[r].colour != colour)
			continue;
		nranks++;
		rank += all[r].key < key || (all[r].key == key && r < comm->rank);
		if (first < 0)
			first = r;
	}
	if (first == comm->rank)
		ncclGetUniqueId(&id);
	exchange(comm, TALK, &id, sizeof(id), (char *)ids);
	end_turn(comm);
	*out = colour == NO_COLOUR ? NULL : make(nranks, rank, &ids[first], config);
	return ncclSuccess;
}

/* --- ending ------------------------------------------------------------------------------------------------- */

static void leave(struct ncclComm *c)
{
	munmap(c->peer_memory, 4096);
	close(c->listener);
	for (int r = 0; r < c->nranks; r++)
		if (r != c->rank)
			close(c->peers[r]);
}

API ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
	char all[MAX_RANKS], mine = 0;

	check(comm);
	if (comm->registered)
		DIE("an end with buffers registered");
	take_turn(comm, next_turn(comm));
	exchange(comm, TALK, &mine, 1, all); /* all ranks have done all */
	leave(comm);
	memset(comm, 0xdb, sizeof(*comm));
	free(comm);
	return ncclSuccess;
}

API ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
	check(comm);
	wait_done(comm, comm->issued);
	return ncclSuccess;
}

API ncclResult_t ncclCommAbort(ncclComm_t comm)
{
	check(comm);
	leave(comm);
	comm->magic = 0;
	free(comm);
	return ncclSuccess;
}

API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, int type, int residence, ncclComm_t comm)
{
	(void)type;
	check(comm);
	if (residence != HOST_SCALAR || comm->nscalars == 8)
		return ncclInvalidArgument;
	memcpy(&comm->scalars[comm->nscalars], scalar, 8);
	*op = NUM_OPS + comm->nscalars++;
	return ncclSuccess;
}

API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm)
{
	check(comm);
	return op >= NUM_OPS && op - NUM_OPS < comm->nscalars ? ncclSuccess : ncclInvalidArgument;
}

API ncclResult_t ncclCommRegister(const ncclComm_t comm, void *start, size_t size, void **handle)
{
	(void)start;
	(void)size;
	check(comm)->registered++;
	*handle = comm;
	return ncclSuccess;
}

API ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle)
{
	if (handle != (void *)check(comm) || !comm->registered)
		DIE("not a buffer of this communicator");
	comm->registered--;
	return ncclSuccess;
}

API ncclResult_t ncclCommCount(const ncclComm_t comm, int *out)
{
	*out = check(comm)->nranks;
	return ncclSuccess;
}
API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *out)
{
	*out = check(comm)->rank;
	return ncclSuccess;
}
API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *out)
{
	check(comm);
	*out = 0;
	return ncclSuccess;
}
API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out)
{
	check(comm);
	*out = ncclSuccess;
	return ncclSuccess;
}
API ncclResult_t ncclGetVersion(int *version)
{
	*version = 22809;
	return ncclSuccess;
}
API const char *ncclGetErrorString(ncclResult_t result)
{
	return result ? "an error" : "no error";
}
API const char *ncclGetLastError(ncclComm_t comm)
{
	(void)comm;
	return "";
}
