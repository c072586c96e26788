/* SPDX-License-Identifier: Apache-2.0 */
/* What belongs to a communicator and is made again with it: operators and registered buffers. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "state.h"

#define API __attribute__((visibility("default")))

static const unsigned char type_bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
                                          ncclScalarResidence_t residence, ncclComm_t comm)
{
	struct comm *c = wrapping() ? ours(comm) : NULL;
	struct redop *made = NULL, fresh = {.type = datatype, .residence = residence, .scalar = scalar, .used = true};
	struct thread *t;
	ncclResult_t r;

	if (!c)
		return real.ncclRedOpCreatePreMulSum(op, scalar, datatype, residence, comm);
	if (!unit_begin(&t))
		return real.ncclRedOpCreatePreMulSum(op, scalar, datatype, residence, atomic_load(&c->real));
	r = usable(c);
	if (r == ncclSuccess)
		r = real.ncclRedOpCreatePreMulSum(&fresh.real, scalar, datatype, residence, atomic_load(&c->real));
	if (r == ncclSuccess && residence == HOST_SCALAR && datatype >= 0 && (size_t)datatype < sizeof(type_bytes))
		memcpy(fresh.copy, scalar, type_bytes[datatype]);
	if (r == ncclSuccess) {
		pthread_mutex_lock(&state_lock);
		for (int i = 0; i < c->nredops && !made; i++)
			if (!c->redops[i].used)
				made = &c->redops[i];
		if (!made) {
			struct redop *more = realloc(c->redops, (size_t)(c->nredops + 1) * sizeof(*more));

			if (!more)
				abort();
			c->redops = more;
			made = &more[c->nredops++];
		}
		*made = fresh;
		*op = NUM_OPS + (int)(made - c->redops);
		pthread_mutex_unlock(&state_lock);
	}
	unit_end(t);
	return r;
}

API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm)
{
	struct comm *c = wrapping() ? ours(comm) : NULL;
	struct thread *t;
	ncclResult_t r;

	if (!c)
		return real.ncclRedOpDestroy(op, comm);
	if (!unit_begin(&t))
		return real.ncclRedOpDestroy(op, atomic_load(&c->real));
	r = usable(c);
	if (r == ncclSuccess)
		r = real.ncclRedOpDestroy(redop_real(c, op), atomic_load(&c->real));
	if (r == ncclSuccess)
		c->redops[op - NUM_OPS].used = false;
	unit_end(t);
	return r;
}

API ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle)
{
	struct comm *c = wrapping() ? ours(comm) : NULL;
	struct buffer *b;
	struct thread *t;
	ncclResult_t r;

	if (!c)
		return real.ncclCommRegister(comm, buff, size, handle);
	if (!unit_begin(&t))
		return real.ncclCommRegister(atomic_load(&c->real), buff, size, handle);
	b = calloc(1, sizeof(*b));
	r = b ? usable(c) : ncclSystemError;
	if (r == ncclSuccess)
		r = real.ncclCommRegister(atomic_load(&c->real), buff, size, &b->real);
	if (r == ncclSuccess) {
		b->start = buff;
		b->size = size;
		pthread_mutex_lock(&state_lock);
		b->next = c->buffers;
		c->buffers = b;
		pthread_mutex_unlock(&state_lock);
		*handle = b;
	} else {
		free(b);
	}
	unit_end(t);
	return r;
}

API ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle)
{
	struct comm *c = wrapping() ? ours(comm) : NULL;
	struct buffer *b = NULL;
	struct thread *t;
	ncclResult_t r;

	if (!c)
		return real.ncclCommDeregister(comm, handle);
	if (!unit_begin(&t))
		return real.ncclCommDeregister(atomic_load(&c->real), handle);
	pthread_mutex_lock(&state_lock);
	for (struct buffer **p = &c->buffers; *p; p = &(*p)->next)
		if (*p == handle) {
			b = *p;
			*p = b->next;
			break;
		}
	pthread_mutex_unlock(&state_lock);
	r = !b ? ncclInvalidArgument : usable(c);
	if (r == ncclSuccess)
		r = real.ncclCommDeregister(atomic_load(&c->real), b->real);
	free(b);
	unit_end(t);
	return r;
}
