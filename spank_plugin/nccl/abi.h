/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's types as far as they pass through us; no header of NCCL or CUDA is needed to build. Sizes are those of the
 * x86-64 and aarch64 ABI in all versions of api.txt. */
#ifndef GPUCR_NCCL_ABI_H
#define GPUCR_NCCL_ABI_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ncclComm *ncclComm_t;
typedef struct CUstream_st *cudaStream_t;
typedef struct ncclWindow_vidmem *ncclWindow_t;
typedef int ncclResult_t, ncclDataType_t, ncclRedOp_t, ncclScalarResidence_t, ncclCommMemStat_t, ncclCftTeamMode_t;
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { int ranks, rank, stride; } ncclTeam_t;
typedef void ncclSimInfo_t, ncclWaitSignalDesc_t, ncclCommProperties_t, ncclCollConfig_t, ncclDevComm_t,
	ncclDevCommRequirements_t, ncclDevResourceRequirements_t, ncclGinBarrierHandle_t, ncclLsaBarrierHandle_t;

enum {
	ncclSuccess = 0, ncclSystemError = 2, ncclInvalidArgument = 4, ncclInvalidUsage = 5, ncclRemoteError = 6,
	ncclInProgress = 7,
};
enum { NUM_OPS = 5 /* built-in operators are below */, HOST_SCALAR = 1, NO_COLOUR = -1, UNDEFINED = INT_MIN };

/* The head of ncclConfig_t; later versions append, `size` says how much there is. */
typedef struct {
	size_t size;
	unsigned magic, version;
	int blocking, cga_cluster_size, min_ctas, max_ctas;
	const char *net_name;
	int split_share, traffic_class;
	const char *comm_name;
} ncclConfig_t;

#endif
