/* SPDX-License-Identifier: Apache-2.0 */
/* Whoever waits for a GPU while any stream of the process is being captured spoils what is captured (CUDA programming guide,
 * prohibited operations). So draining waits for the end of captures, and captures for the end of draining. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "state.h"

#define API __attribute__((visibility("default")))

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static int captures;
static bool held;

static void change(int by)
{
	pthread_mutex_lock(&lock);
	while (by > 0 && held)
		pthread_cond_wait(&moved, &lock);
	captures = captures + by > 0 ? captures + by : 0;
	pthread_cond_broadcast(&moved);
	pthread_mutex_unlock(&lock);
}

void captures_hold(void)
{
	pthread_mutex_lock(&lock);
	while (captures)
		pthread_cond_wait(&moved, &lock);
	held = true;
	pthread_mutex_unlock(&lock);
}

void captures_go_on(void)
{
	pthread_mutex_lock(&lock);
	held = false;
	pthread_cond_broadcast(&moved);
	pthread_mutex_unlock(&lock);
}

void captures_forked(void)
{
	pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
	pthread_cond_t fresh_cond = PTHREAD_COND_INITIALIZER;

	memcpy(&lock, &fresh, sizeof(fresh));
	memcpy(&moved, &fresh_cond, sizeof(fresh_cond));
	captures = 0;
	held = false;
}

#define WRAP(library, name, parameters, arguments, before, after) \
	API int name parameters \
	{ \
		static int (*call) parameters; \
		int error; \
		if (!call && !(*(void **)&call = real_symbol(library, #name))) \
			return 999; \
		before; \
		error = call arguments; \
		after; \
		return error; \
	}
#define BEGIN(library, name, parameters, arguments) \
	WRAP(library, name, parameters, arguments, change(1), if (error) change(-1))
#define END(library, name) \
	WRAP(library, name, (cudaStream_t stream, void **graph), (stream, graph), (void)0, change(-1))
BEGIN("libcudart", cudaStreamBeginCapture, (cudaStream_t stream, int mode), (stream, mode))
END("libcudart", cudaStreamEndCapture)
BEGIN("libcuda.so", cuStreamBeginCapture_v2, (cudaStream_t stream, int mode), (stream, mode))
BEGIN("libcuda.so", cuStreamBeginCaptureToGraph,
      (cudaStream_t stream, void *graph, const void *on, const void *data, size_t count, int mode),
      (stream, graph, on, data, count, mode))
END("libcuda.so", cuStreamEndCapture)
