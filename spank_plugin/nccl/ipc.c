/* SPDX-License-Identifier: Apache-2.0 */
/* GPU memory that a program shares with other processes by itself: multiprocessing's CUDA tensors, PyTorch's symmetric
 * memory, CUDA-aware MPI. The driver saves such processes and cannot bring them back, so the agent must know. NCCL has a
 * CUDA runtime of its own inside and does not come by here. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "state.h"

#define API __attribute__((visibility("default")))

typedef struct { char bytes[64]; } ipc_handle; /* cudaIpcMemHandle_t, CUipcMemHandle */

static int shares(const char *name)
{
	shared("it has called %s, and shares memory of its GPU with other processes", name);
	return 0;
}

/* The library whose file name begins so has it. */
#define WRAP(library, name, parameters, arguments) \
	API int name parameters \
	{ \
		static int (*call) parameters; \
		if (!call && !(*(void **)&call = real_symbol(library, #name))) \
			return 999; \
		return shares(#name), call arguments; \
	}
WRAP("libcudart", cudaIpcGetMemHandle, (ipc_handle * handle, void *memory), (handle, memory))
WRAP("libcudart", cudaIpcOpenMemHandle, (void **memory, ipc_handle handle, unsigned flags), (memory, handle, flags))
WRAP("libcuda.so", cuIpcGetMemHandle, (ipc_handle * handle, uint64_t memory), (handle, memory))
WRAP("libcuda.so", cuIpcOpenMemHandle_v2, (uint64_t * memory, ipc_handle handle, unsigned flags), (memory, handle, flags))
WRAP("libcuda.so", cuMemExportToShareableHandle, (void *handle, uint64_t memory, int type, uint64_t flags),
     (handle, memory, type, flags))
WRAP("libcuda.so", cuMemImportFromShareableHandle, (uint64_t * memory, void *handle, int type), (memory, handle, type))

/* How PyTorch finds the driver's functions. */
API int cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags, int *status)
{
	static int (*call)(const char *, void **, unsigned, unsigned long long, int *);
	int error;

	if (!call && !(*(void **)&call = real_symbol("libcudart", "cudaGetDriverEntryPointByVersion")))
		return 999;
	error = call(name, found, version, flags, status);
	if (error == 0 && name && found && *found && cuda_ours(name))
		*found = cuda_ours(name);
	return error;
}

static const struct { const char *name; void *ours; } calls[] = {
	{"cudaIpcGetMemHandle", (void *)cudaIpcGetMemHandle},
	{"cudaIpcOpenMemHandle", (void *)cudaIpcOpenMemHandle},
	{"cuIpcGetMemHandle", (void *)cuIpcGetMemHandle},
	{"cuIpcOpenMemHandle", (void *)cuIpcOpenMemHandle_v2}, /* as it is asked for by version */
	{"cuIpcOpenMemHandle_v2", (void *)cuIpcOpenMemHandle_v2},
	{"cuMemExportToShareableHandle", (void *)cuMemExportToShareableHandle},
	{"cuMemImportFromShareableHandle", (void *)cuMemImportFromShareableHandle},
	{"cudaGetDriverEntryPointByVersion", (void *)cudaGetDriverEntryPointByVersion},
	{"cudaStreamBeginCapture", (void *)cudaStreamBeginCapture},
	{"cudaStreamEndCapture", (void *)cudaStreamEndCapture},
	{"cuStreamBeginCapture", (void *)cuStreamBeginCapture_v2},
	{"cuStreamBeginCapture_v2", (void *)cuStreamBeginCapture_v2},
	{"cuStreamBeginCaptureToGraph", (void *)cuStreamBeginCaptureToGraph},
	{"cuStreamEndCapture", (void *)cuStreamEndCapture},
};

void *cuda_ours(const char *name)
{
	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++)
		if (strcmp(calls[i].name, name) == 0)
			return calls[i].ours;
	return NULL;
}
