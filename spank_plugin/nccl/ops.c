/* SPDX-License-Identifier: Apache-2.0 */
/* Operations, groups and questions. An operation is counted when it is called, not when it returns: NCCL may wait in the
 * call for the other ranks, and the count is what brings them. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "state.h"

#define API __attribute__((visibility("default")))

struct call { struct thread *thread; struct comm *comm; };

/* 1: go on with the real handle in *comm; 0: not ours, or NCCL's own call; -1: *error is the answer. */
static inline int begin(struct call *call, ncclComm_t *comm, cudaStream_t stream, ncclResult_t *error)
{
	struct comm *c;

	if (UNLIKELY(!wrapping()) || UNLIKELY(!(c = ours(*comm))))
		return 0;
	if (UNLIKELY(!unit_begin(&call->thread))) {
		*comm = atomic_load(&c->real);
		return 0;
	}
	*error = usable(c);
	if (UNLIKELY(*error != ncclSuccess)) {
		unit_end(call->thread);
		return -1;
	}
	if (UNLIKELY(cuda_capturing(stream)) && !unprotected_why[0])
		unprotected("a CUDA graph holds NCCL operations, which cannot be made again");
	call->comm = c;
	atomic_store_explicit(&c->user, call->thread, memory_order_relaxed);
	*comm = atomic_load_explicit(&c->real, memory_order_relaxed);
	return 1;
}

ncclRedOp_t redop_real(struct comm *c, ncclRedOp_t op)
{
	if (LIKELY(op < NUM_OPS) || op - NUM_OPS >= c->nredops || !c->redops[op - NUM_OPS].used)
		return op < NUM_OPS ? op : 0x7fffffff; /* NCCL refuses this one */
	return c->redops[op - NUM_OPS].real;
}

#define CALL(name, arguments, count) \
	struct call call; \
	ncclResult_t error; \
	int ours_ = begin(&call, &comm, stream, &error); \
	if (UNLIKELY(ours_ < 0)) \
		return error; \
	if (UNLIKELY(ours_ == 0)) \
		return real.name arguments; \
	count; \
	error = real.name arguments; \
	unit_end(call.thread); \
	return error;
#define COUNT atomic_fetch_add_explicit(&call.comm->collectives, 1, memory_order_relaxed)
#define PAIR(which) do { \
	struct pair *p = pairs_of(call.comm); \
	if (p && peer >= 0 && peer < call.comm->nranks) \
		atomic_fetch_add_explicit(&p[peer].which, 1, memory_order_relaxed); \
} while (0)

#define F(name, result, parameters, arguments) API result name parameters { CALL(name, arguments, COUNT) }
NCCL_COLLECTIVE(F)
#undef F
#define F(name, result, parameters, arguments) \
	API result name parameters { CALL(name, arguments, COUNT; op = redop_real(call.comm, op)) }
NCCL_REDUCTION(F)
#undef F
#define F(name, result, parameters, arguments) API result name parameters { CALL(name, arguments, PAIR(sent)) }
NCCL_SEND(F)
#undef F
#define F(name, result, parameters, arguments) API result name parameters { CALL(name, arguments, PAIR(received)) }
NCCL_RECEIVE(F)
#undef F

/* What takes a communicator and cannot be made again. */
static ncclComm_t bare(const char *name, ncclComm_t handle)
{
	struct comm *c = wrapping() ? ours(handle) : NULL;

	if (!c)
		return handle;
	if (!unprotected_why[0])
		unprotected("it uses %s, whose effect cannot be made again", name);
	return atomic_load(&c->real);
}
#define F(name, result, parameters, arguments) \
	API result name parameters { comm = bare(#name, comm); return real.name arguments; }
NCCL_OTHER(F)
#undef F

API ncclResult_t ncclGroupStart(void)
{
	struct thread *t;
	ncclResult_t r;

	if (!wrapping() || !unit_begin(&t))
		return real.ncclGroupStart();
	r = real.ncclGroupStart();
	if (r == ncclSuccess)
		t->groups++;
	unit_end(t);
	return r;
}

static ncclResult_t group_end(ncclSimInfo_t *info, bool simulate)
{
	struct thread *t;
	ncclResult_t r;

	if (!wrapping() || !unit_begin(&t))
		return simulate ? real.ncclGroupSimulateEnd(info) : real.ncclGroupEnd();
	r = simulate ? real.ncclGroupSimulateEnd(info) : real.ncclGroupEnd();
	if (t->groups > 0)
		t->groups--;
	unit_end(t);
	return r;
}

API ncclResult_t ncclGroupEnd(void)
{
	return group_end(NULL, false);
}

API ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *simInfo)
{
	(void)wrapping();
	if (!unprotected_why[0])
		unprotected("it uses ncclGroupSimulateEnd, whose operations are counted and not done");
	return group_end(simInfo, true);
}

/* Questions: answered while the gate is closed too, from the record when there is nothing else. */
#define RECORD(field, name, parameter) \
	API ncclResult_t name(const ncclComm_t comm, int *parameter) \
	{ \
		struct comm *c = wrapping() ? ours(comm) : NULL; \
		if (!c) \
			return real.name(comm, parameter); \
		if (c->magic == DEAD || !parameter) \
			return ncclInvalidArgument; \
		*parameter = c->field; \
		return ncclSuccess; \
	}
RECORD(nranks, ncclCommCount, count)
RECORD(rank, ncclCommUserRank, rank)
RECORD(device, ncclCommCuDevice, device)

/* Keeps who tears down waiting while NCCL's own handle is in use; the gate does not hold it up. */
static ncclComm_t ask(struct thread **t, struct comm *c, bool *marked)
{
	*t = this_thread ? this_thread : thread_new();
	*marked = !(*t)->inside && (*t)->groups == 0;
	if (*marked)
		atomic_exchange(&(*t)->busy, 1);
	return atomic_load(&c->real);
}

static void asked(struct thread *t, bool marked)
{
	if (marked)
		atomic_store(&t->busy, 0);
}

API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError)
{
	struct comm *c = wrapping() ? ours(comm) : NULL;
	struct thread *t;
	ncclResult_t r = ncclSuccess;
	ncclComm_t handle;
	bool marked;

	if (!c)
		return real.ncclCommGetAsyncError(comm, asyncError);
	if (c->magic == DEAD || !asyncError)
		return ncclInvalidArgument;
	handle = ask(&t, c, &marked);
	if (handle)
		r = real.ncclCommGetAsyncError(handle, asyncError);
	else
		*asyncError = atomic_load(&c->state) == LOST ? ncclRemoteError : ncclSuccess;
	asked(t, marked);
	return r;
}

API const char *ncclGetLastError(ncclComm_t comm)
{
	struct comm *c = wrapping() ? ours(comm) : NULL;
	const char *text = "";
	struct thread *t;
	ncclComm_t handle;
	bool marked;

	if (!c)
		return real.ncclGetLastError(comm);
	handle = c->magic == DEAD ? NULL : ask(&t, c, &marked);
	if (handle)
		text = real.ncclGetLastError(handle);
	if (c->magic != DEAD)
		asked(t, marked);
	return text;
}

#define PASS(result, name, parameters, arguments) \
	API result name parameters { (void)wrapping(); return real.name arguments; }
PASS(const char *, ncclGetErrorString, (ncclResult_t result), (result))
PASS(ncclResult_t, ncclGetUniqueId, (ncclUniqueId *uniqueId), (uniqueId))
PASS(ncclResult_t, ncclGetVersion, (int *version), (version))
PASS(ncclResult_t, ncclMemFree, (void *ptr), (ptr))

API void ncclResetDebugInit(void)
{
	(void)wrapping();
	if (real.ncclResetDebugInit)
		real.ncclResetDebugInit();
}

API ncclResult_t ncclMemAlloc(void **ptr, size_t size)
{
	(void)wrapping();
	if (!unprotected_why[0])
		unprotected("it uses ncclMemAlloc: whether the driver can save such memory is not known");
	return real.ncclMemAlloc(ptr, size);
}
