/* SPDX-License-Identifier: Apache-2.0 */
/* The few calls of the CUDA driver that are needed. libcuda is in every process that uses NCCL, and never loaded here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

#include "state.h"

static struct {
	int (*current)(void **);
	int (*device)(int *);
	int (*set)(void *);
	int (*wait)(void);
	int (*capturing)(cudaStream_t, int *);
	int (*primary)(void **, int);
} cuda;
static _Atomic bool found;

/* Until it is there: NCCL's first communicator may be what loads the driver. */
static void find(void)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	void *lib;

	if (LIKELY(atomic_load_explicit(&found, memory_order_acquire)))
		return;
	pthread_mutex_lock(&lock);
	lib = atomic_load(&found) ? NULL : dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
	if (lib) {
		*(void **)&cuda.current = dlsym(lib, "cuCtxGetCurrent");
		*(void **)&cuda.device = dlsym(lib, "cuCtxGetDevice");
		*(void **)&cuda.set = dlsym(lib, "cuCtxSetCurrent");
		*(void **)&cuda.wait = dlsym(lib, "cuCtxSynchronize");
		*(void **)&cuda.capturing = dlsym(lib, "cuStreamIsCapturing");
		*(void **)&cuda.primary = dlsym(lib, "cuDevicePrimaryCtxRetain");
		atomic_store_explicit(&found, true, memory_order_release);
	}
	pthread_mutex_unlock(&lock);
}

void *cuda_context(int *device)
{
	void *context = NULL;

	find();
	*device = -1;
	if (cuda.current && cuda.current(&context) == 0 && context && cuda.device && cuda.device(device) != 0)
		*device = -1;
	return context;
}

void *cuda_primary(int device)
{
	void *context = NULL;

	find();
	return cuda.primary && cuda.primary(&context, device) == 0 ? context : NULL;
}

bool cuda_use(void *context)
{
	find();
	return context && cuda.set && cuda.set(context) == 0;
}

bool cuda_wait(void)
{
	return cuda.wait && cuda.wait() == 0;
}

bool cuda_capturing(cudaStream_t stream)
{
	int status = 0;

	find();
	return cuda.capturing && cuda.capturing(stream, &status) == 0 && status != 0;
}
