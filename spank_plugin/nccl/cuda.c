/* SPDX-License-Identifier: Apache-2.0 */
/* The few calls of the CUDA driver that are needed. libcuda is in every process that uses NCCL, and never loaded here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

#include "state.h"

static struct {
	int (*current)(void **);
	int (*device)(int *);
	int (*set)(void *);
	int (*wait)(void);
	int (*capturing)(cudaStream_t, int *);
	int (*primary)(void **, int);
	int (*uuid)(unsigned char *, int);
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
		*(void **)&cuda.uuid = dlsym(lib, "cuDeviceGetUuid_v2");
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

void cuda_card(int device, char digits[33])
{
	unsigned char uuid[16];

	find();
	digits[0] = 0;
	if (!cuda.uuid || cuda.uuid(uuid, device) != 0)
		return;
	for (int i = 0; i < 16; i++)
		snprintf(digits + 2 * i, 3, "%02x", uuid[i]);
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
