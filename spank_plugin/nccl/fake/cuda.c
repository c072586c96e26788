/* SPDX-License-Identifier: Apache-2.0 */
/* libcuda.so.1 for tests without a card: one context, streams that work by themselves, one thread each, and a thread of
 * the driver's own as long as the process lives. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda.h"

struct task { void (*work)(void *); void *arg; struct task *next; };
struct CUstream_st {
	pthread_t thread;
	struct task *first, **last;
	int waiting, ending, capturing, spoilt;
	struct CUstream_st *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static struct CUstream_st *streams;
static int context;
static __thread void *current;

static void *run(void *arg)
{
	struct CUstream_st *s = arg;

	pthread_mutex_lock(&lock);
	for (;;) {
		struct task *t = s->first;

		if (!t) {
			if (s->ending)
				break;
			pthread_cond_wait(&moved, &lock);
			continue;
		}
		pthread_mutex_unlock(&lock);
		t->work(t->arg);
		pthread_mutex_lock(&lock);
		s->first = t->next;
		if (!s->first)
			s->last = &s->first;
		s->waiting--;
		free(t);
		pthread_cond_broadcast(&moved);
	}
	pthread_mutex_unlock(&lock);
	return NULL;
}

static void *driver(void *arg)
{
	pthread_setname_np(pthread_self(), "cuda-fake");
	for (;;)
		pause();
	return arg;
}

__attribute__((constructor)) static void begin(void)
{
	pthread_t thread;
	sigset_t all, old;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	if (pthread_create(&thread, NULL, driver, NULL) || pthread_detach(thread))
		abort();
	pthread_sigmask(SIG_SETMASK, &old, NULL);
}

stream_t fake_stream(void)
{
	struct CUstream_st *s = calloc(1, sizeof(*s));

	if (!s)
		abort();
	s->last = &s->first;
	pthread_mutex_lock(&lock);
	s->next = streams;
	streams = s;
	pthread_mutex_unlock(&lock);
	if (pthread_create(&s->thread, NULL, run, s))
		abort();
	return s;
}

void fake_stream_end(stream_t s)
{
	pthread_mutex_lock(&lock);
	s->ending = 1;
	pthread_cond_broadcast(&moved);
	pthread_mutex_unlock(&lock);
	pthread_join(s->thread, NULL);
	pthread_mutex_lock(&lock);
	for (struct CUstream_st **p = &streams; *p; p = &(*p)->next)
		if (*p == s) {
			*p = s->next;
			break;
		}
	pthread_mutex_unlock(&lock);
	free(s);
}

void fake_enqueue(stream_t s, void (*work)(void *), void *arg)
{
	struct task *t = calloc(1, sizeof(*t));

	if (!t)
		abort();
	t->work = work;
	t->arg = arg;
	pthread_mutex_lock(&lock);
	*s->last = t;
	s->last = &t->next;
	s->waiting++;
	pthread_cond_broadcast(&moved);
	pthread_mutex_unlock(&lock);
}

void fake_stream_wait(stream_t s)
{
	pthread_mutex_lock(&lock);
	while (s->waiting)
		pthread_cond_wait(&moved, &lock);
	pthread_mutex_unlock(&lock);
}

void fake_capture(stream_t s, int on)
{
	s->capturing = on;
}

int cuCtxGetCurrent(void **out)
{
	*out = current ? current : &context;
	return 0;
}

int cuCtxGetDevice(int *device)
{
	*device = 0;
	return 0;
}

int cuCtxSetCurrent(void *wanted)
{
	if (wanted != &context)
		return 201; /* CUDA_ERROR_INVALID_CONTEXT */
	current = wanted;
	return 0;
}

int cuDevicePrimaryCtxRetain(void **out, int device)
{
	*out = &context;
	return device == 0 ? 0 : 101;
}

/* A process has the card that FAKE_CARD names; without it one of its own, as it has one of its own for the agent's fake. */
int cuDeviceGetUuid_v2(unsigned char uuid[16], int device)
{
	const char *card = getenv("FAKE_CARD") ? getenv("FAKE_CARD") : getenv("GPUCR_FAKE_GPU");
	pid_t own = getpid();

	memset(uuid, 0, 16);
	if (card)
		strncpy((char *)uuid, card, 15);
	else
		memcpy(uuid, &own, sizeof(own));
	return device == 0 ? 0 : 101;
}

int cuStreamBeginCapture_v2(struct CUstream_st *s, int mode)
{
	(void)mode;
	pthread_mutex_lock(&lock);
	s->capturing = 1;
	pthread_mutex_unlock(&lock);
	return 0;
}

int cuStreamEndCapture(struct CUstream_st *s, void **graph)
{
	int spoilt;

	pthread_mutex_lock(&lock);
	spoilt = s->spoilt;
	s->capturing = s->spoilt = 0;
	pthread_mutex_unlock(&lock);
	*graph = NULL;
	return spoilt ? 901 : 0; /* CUDA_ERROR_STREAM_CAPTURE_INVALIDATED */
}

int cuCtxSynchronize(void)
{
	struct CUstream_st *s;
	int spoilt = 0;

	pthread_mutex_lock(&lock);
	for (s = streams; s; s = s->next)
		spoilt |= s->spoilt = s->capturing;
	if (spoilt) {
		pthread_mutex_unlock(&lock);
		return 900; /* CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED */
	}
	for (;;) {
		for (s = streams; s && !s->waiting; s = s->next)
			;
		if (!s)
			break;
		pthread_cond_wait(&moved, &lock);
	}
	pthread_mutex_unlock(&lock);
	return 0;
}

int cuStreamIsCapturing(struct CUstream_st *s, int *status)
{
	*status = s ? s->capturing : 0;
	return 0;
}

/* Memory for other processes: nothing lies behind the handles. */
int cuIpcGetMemHandle(char handle[64], uint64_t memory)
{
	memset(handle, 1, 64);
	return memory ? 0 : 1;
}

int cuMemExportToShareableHandle(int *handle, uint64_t memory, int type, uint64_t flags)
{
	(void)type, (void)flags;
	*handle = -1;
	return memory ? 0 : 1;
}
