/* SPDX-License-Identifier: Apache-2.0 */
/* What the interposer knows of a process: its communicators, its threads, the gate. docs/nccl-cut.md says why so. */
#ifndef GPUCR_NCCL_STATE_H
#define GPUCR_NCCL_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "abi.h"
#include "api.h"

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#define LIVE 0x6770756372636f6dULL /* first word of our handles; NCCL's own have another */
#define DEAD 0x6770756372646561ULL

/* MAKING until the call that makes it has ended; ENDING while the program finalizes or destroys it; LOST: it could not
 * be made again, or was aborted. */
enum comm_state { MAKING, READY, ENDING, LOST };

struct pair { _Atomic uint64_t sent, received; uint64_t send_target, receive_target; };
struct redop { ncclRedOp_t real; ncclDataType_t type; ncclScalarResidence_t residence; void *scalar; char copy[16]; bool used; };
struct buffer { void *start, *real; size_t size; struct buffer *next; };

/* The handle that the program has. Never freed, so that a late use is an error and not an accident. */
struct comm {
	_Atomic uint64_t magic;
	_Atomic(ncclComm_t) real; /* NCCL's; NULL while the communicators are torn down */
	_Atomic uint64_t collectives;
	_Atomic(struct thread *) user; /* the last to call an operation; only compared */
	_Atomic(struct pair *) pairs; /* one for each rank, made at the first send or receive */
	uint64_t target;
	uint64_t gid; /* the same on every rank, and for ever */
	int nranks, rank, device;
	char card[33]; /* UUID of the device, in hexadecimal digits; empty: the driver does not say */
	void *context;
	_Atomic int state;
	bool by_id;
	_Atomic bool finalized;
	uint32_t children;
	ncclConfig_t *config;
	struct redop *redops;
	int nredops;
	struct buffer *buffers;
	struct comm *parent, *next, *made_next;
};

struct thread {
	_Atomic int busy; /* inside a call or a group */
	bool inside;      /* NCCL runs: what it calls of itself passes through */
	int groups;
	struct comm *made;
	struct thread *next;
};

struct gate {
	_Atomic int closed;
	bool free; /* closed, but all may pass: a communicator is being made */
	unsigned version;
	long long changed_ms; /* when a target last changed */
};

extern struct gate gate;
extern pthread_mutex_t state_lock; /* lists, targets, gate */
extern struct comm *comms, *dead_comms;
extern struct thread *threads;
extern __thread struct thread *this_thread __attribute__((tls_model("initial-exec")));

/* NCCL's own functions; NULL where this version has none. */
#define F(name, result, parameters, arguments) result(*name) parameters;
struct real { NCCL_WRAPPED(F) };
#undef F
extern struct real real;
extern _Atomic int real_ready; /* 1: found; 2: found, and its handles pass through untouched */
void real_find(void);
void *real_symbol(const char *begins, const char *name); /* of the library loaded whose file name begins so, or NULL */
static inline bool wrapping(void)
{
	if (UNLIKELY(!atomic_load_explicit(&real_ready, memory_order_acquire)))
		real_find();
	return LIKELY(atomic_load_explicit(&real_ready, memory_order_relaxed) == 1);
}

/* Say once on standard error, and keep for the agent, that and why this process cannot be protected. */
void unprotected(const char *format, ...) __attribute__((format(printf, 1, 2)));
extern char unprotected_why[512];
/* The same, of memory that the program shares by itself: also where no communicator is. */
void shared(const char *format, ...) __attribute__((format(printf, 1, 2)));
extern char shared_why[512];
void *cuda_ours(const char *name); /* our function for a name of CUDA's, or NULL */

/* capture.c */
void captures_hold(void); /* wait for the end of those under way; no other begins before captures_go_on() */
void captures_go_on(void);
void captures_forked(void);
int cudaStreamBeginCapture(cudaStream_t, int), cudaStreamEndCapture(cudaStream_t, void **),
	cuStreamBeginCapture_v2(cudaStream_t, int), cuStreamEndCapture(cudaStream_t, void **),
	cuStreamBeginCaptureToGraph(cudaStream_t, void *, const void *, const void *, size_t, int);

struct thread *thread_new(void);
void thread_is_ours(void); /* what NCCL calls of itself in this thread passes through */
void gate_wait(struct thread *t);
void gate_moved(void); /* state_lock is held: targets or gate have changed */
/* Before a call of NCCL outside a group, or a whole group: waits while a cut is made. False: NCCL calls itself. */
static inline bool unit_begin(struct thread **out)
{
	struct thread *t = this_thread;

	if (UNLIKELY(!t))
		t = thread_new();
	*out = t;
	if (UNLIKELY(t->inside))
		return false;
	if (t->groups == 0) {
		/* Before the look at the gate, seen by who closes it: one locked instruction. */
		atomic_exchange(&t->busy, 1);
		if (UNLIKELY(atomic_load(&gate.closed)))
			gate_wait(t);
	}
	t->inside = true;
	return true;
}
void comms_made(struct thread *t);
static inline void unit_end(struct thread *t)
{
	t->inside = false;
	if (t->groups == 0) {
		if (UNLIKELY(t->made != NULL))
			comms_made(t);
		atomic_store_explicit(&t->busy, 0, memory_order_release);
	}
}

static inline struct comm *ours(ncclComm_t handle)
{
	struct comm *c = (struct comm *)(void *)handle;

	return c && (c->magic == LIVE || c->magic == DEAD) ? c : NULL;
}
/* What the program shall have that uses c now: 0, or an error, and then NCCL must not be called. */
static inline ncclResult_t usable(struct comm *c)
{
	if (LIKELY(c->magic == LIVE && atomic_load(&c->real)))
		return ncclSuccess;
	return c->magic == LIVE ? ncclRemoteError : ncclInvalidArgument;
}
ncclRedOp_t redop_real(struct comm *c, ncclRedOp_t op);
struct pair *pairs_of(struct comm *c);
void comm_forget(struct comm *c); /* the program has destroyed or aborted it */

/* cuda.c: the driver, without linking to it. */
void *cuda_context(int *device);
void *cuda_primary(int device);
void cuda_card(int device, char digits[33]);
bool cuda_use(void *context);
bool cuda_wait(void); /* until everything in the current context is done */
bool cuda_capturing(cudaStream_t stream);

/* cut.c: one long action at a time, in a thread of its own. */
enum cut_state { OPEN, CLOSED, DRAINING, DRAINED, DESTROYING, GONE, REBUILDING, REBUILT, FAILED };
extern _Atomic enum cut_state cut_state;
extern char cut_why[256];
struct new_id { uint64_t gid; ncclUniqueId id; };
extern struct new_id *new_ids; /* of the last rebuild; changed by the helper alone, while nothing is under way */
extern int new_count;
bool cut_close(void);
bool cut_open(bool lost);
bool cut_drain(void);
bool cut_destroy(void);
bool cut_rebuild(struct new_id *ids, int count); /* takes ids */

/* control.c */
void control_start(void);
void control_forked(void);

#endif
