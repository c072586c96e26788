/* SPDX-License-Identifier: Apache-2.0 */
/* Made by api.py from api.txt, not by hand. F(name, result type, parameters, arguments) */
#ifndef GPUCR_NCCL_API_H
#define GPUCR_NCCL_API_H
#define NCCL_NEWEST_KNOWN 23203 /* 2.32.3 */
#define NCCL_COLLECTIVE(F) \
	F(ncclAllGather, ncclResult_t, (const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, sendcount, datatype, comm, stream)) \
	F(ncclAlltoAll, ncclResult_t, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, count, datatype, comm, stream)) \
	F(ncclBcast, ncclResult_t, (void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream), (buff, count, datatype, root, comm, stream)) \
	F(ncclBroadcast, ncclResult_t, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, count, datatype, root, comm, stream)) \
	F(ncclGather, ncclResult_t, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, count, datatype, root, comm, stream)) \
	F(ncclScatter, ncclResult_t, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, count, datatype, root, comm, stream)) \

#define NCCL_REDUCTION(F) \
	F(ncclAllReduce, ncclResult_t, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, count, datatype, op, comm, stream)) \
	F(ncclReduce, ncclResult_t, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, count, datatype, op, root, comm, stream)) \
	F(ncclReduceScatter, ncclResult_t, (const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, recvcount, datatype, op, comm, stream)) \

#define NCCL_SEND(F) \
	F(ncclSend, ncclResult_t, (const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream), (sendbuff, count, datatype, peer, comm, stream)) \

#define NCCL_RECEIVE(F) \
	F(ncclRecv, ncclResult_t, (void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream), (recvbuff, count, datatype, peer, comm, stream)) \

#define NCCL_OWN(F) \
	F(ncclGetErrorString, const char *, (ncclResult_t result), (result)) \
	F(ncclGetLastError, const char *, (ncclComm_t comm), (comm)) \
	F(ncclCommAbort, ncclResult_t, (ncclComm_t comm), (comm)) \
	F(ncclCommCount, ncclResult_t, (const ncclComm_t comm, int *count), (comm, count)) \
	F(ncclCommCuDevice, ncclResult_t, (const ncclComm_t comm, int *device), (comm, device)) \
	F(ncclCommDeregister, ncclResult_t, (const ncclComm_t comm, void *handle), (comm, handle)) \
	F(ncclCommDestroy, ncclResult_t, (ncclComm_t comm), (comm)) \
	F(ncclCommFinalize, ncclResult_t, (ncclComm_t comm), (comm)) \
	F(ncclCommGetAsyncError, ncclResult_t, (ncclComm_t comm, ncclResult_t *asyncError), (comm, asyncError)) \
	F(ncclCommInitAll, ncclResult_t, (ncclComm_t *comm, int ndev, const int *devlist), (comm, ndev, devlist)) \
	F(ncclCommInitRank, ncclResult_t, (ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank), (comm, nranks, commId, rank)) \
	F(ncclCommInitRankConfig, ncclResult_t, (ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t *config), (comm, nranks, commId, rank, config)) \
	F(ncclCommInitRankScalable, ncclResult_t, (ncclComm_t *newcomm, int nranks, int myrank, int nId, ncclUniqueId *commIds, ncclConfig_t *config), (newcomm, nranks, myrank, nId, commIds, config)) \
	F(ncclCommRegister, ncclResult_t, (const ncclComm_t comm, void *buff, size_t size, void **handle), (comm, buff, size, handle)) \
	F(ncclCommRevoke, ncclResult_t, (ncclComm_t comm, int revokeFlags), (comm, revokeFlags)) \
	F(ncclCommShrink, ncclResult_t, (ncclComm_t comm, int *excludeRanksList, int excludeRanksCount, ncclComm_t *newcomm, ncclConfig_t *config, int shrinkFlags), (comm, excludeRanksList, excludeRanksCount, newcomm, config, shrinkFlags)) \
	F(ncclCommSplit, ncclResult_t, (ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config), (comm, color, key, newcomm, config)) \
	F(ncclCommUserRank, ncclResult_t, (const ncclComm_t comm, int *rank), (comm, rank)) \
	F(ncclGetUniqueId, ncclResult_t, (ncclUniqueId *uniqueId), (uniqueId)) \
	F(ncclGetVersion, ncclResult_t, (int *version), (version)) \
	F(ncclGroupEnd, ncclResult_t, (void), ()) \
	F(ncclGroupSimulateEnd, ncclResult_t, (ncclSimInfo_t *simInfo), (simInfo)) \
	F(ncclGroupStart, ncclResult_t, (void), ()) \
	F(ncclMemAlloc, ncclResult_t, (void **ptr, size_t size), (ptr, size)) \
	F(ncclMemFree, ncclResult_t, (void *ptr), (ptr)) \
	F(ncclRedOpCreatePreMulSum, ncclResult_t, (ncclRedOp_t *op, void *scalar, ncclDataType_t datatype, ncclScalarResidence_t residence, ncclComm_t comm), (op, scalar, datatype, residence, comm)) \
	F(ncclRedOpDestroy, ncclResult_t, (ncclRedOp_t op, ncclComm_t comm), (op, comm)) \
	F(ncclResetDebugInit, void, (void), ()) \

#define NCCL_OTHER(F) \
	F(ncclAllGatherConfig, ncclResult_t, (const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config), (sendbuff, recvbuff, sendcount, datatype, comm, stream, config)) \
	F(ncclAllReduceConfig, ncclResult_t, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config), (sendbuff, recvbuff, count, datatype, op, comm, stream, config)) \
	F(ncclAlltoAllConfig, ncclResult_t, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config), (sendbuff, recvbuff, count, datatype, comm, stream, config)) \
	F(ncclBroadcastConfig, ncclResult_t, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config), (sendbuff, recvbuff, count, datatype, root, comm, stream, config)) \
	F(ncclCommGetUniqueId, ncclResult_t, (ncclComm_t comm, ncclUniqueId *uniqueId), (comm, uniqueId)) \
	F(ncclCommGrow, ncclResult_t, (ncclComm_t comm, int nRanks, const ncclUniqueId *uniqueId, int rank, ncclComm_t *newcomm, ncclConfig_t *config), (comm, nRanks, uniqueId, rank, newcomm, config)) \
	F(ncclCommMemStats, ncclResult_t, (ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value), (comm, stat, value)) \
	F(ncclCommQueryProperties, ncclResult_t, (ncclComm_t comm, ncclCommProperties_t *props), (comm, props)) \
	F(ncclCommResume, ncclResult_t, (ncclComm_t comm), (comm)) \
	F(ncclCommSuspend, ncclResult_t, (ncclComm_t comm, int flags), (comm, flags)) \
	F(ncclCommWindowDeregister, ncclResult_t, (ncclComm_t comm, ncclWindow_t win), (comm, win)) \
	F(ncclCommWindowRegister, ncclResult_t, (ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int winFlags), (comm, buff, size, win, winFlags)) \
	F(ncclDevCommCreate, ncclResult_t, (ncclComm_t comm, const ncclDevCommRequirements_t *reqs, ncclDevComm_t *outDevComm), (comm, reqs, outDevComm)) \
	F(ncclDevCommDestroy, ncclResult_t, (ncclComm_t comm, const ncclDevComm_t *devComm), (comm, devComm)) \
	F(ncclGatherConfig, ncclResult_t, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config), (sendbuff, recvbuff, count, datatype, root, comm, stream, config)) \
	F(ncclGinBarrierCreateRequirement, ncclResult_t, (ncclComm_t comm, ncclTeam_t team, int nBarriers, ncclGinBarrierHandle_t *outHandle, ncclDevResourceRequirements_t *outReq), (comm, team, nBarriers, outHandle, outReq)) \
	F(ncclPutSignal, ncclResult_t, (const void *localbuff, size_t count, ncclDataType_t datatype, int peer, ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream), (localbuff, count, datatype, peer, peerWin, peerWinOffset, sigIdx, ctx, flags, comm, stream)) \
	F(ncclReduceConfig, ncclResult_t, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config), (sendbuff, recvbuff, count, datatype, op, root, comm, stream, config)) \
	F(ncclReduceScatterConfig, ncclResult_t, (const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config), (sendbuff, recvbuff, recvcount, datatype, op, comm, stream, config)) \
	F(ncclScatterConfig, ncclResult_t, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config), (sendbuff, recvbuff, count, datatype, root, comm, stream, config)) \
	F(ncclSignal, ncclResult_t, (int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream), (peer, sigIdx, ctx, flags, comm, stream)) \
	F(ncclTeamCft, ncclTeam_t, (ncclComm_t comm, ncclCftTeamMode_t mode), (comm, mode)) \
	F(ncclTeamCftMultimem, ncclTeam_t, (ncclComm_t comm), (comm)) \
	F(ncclTeamLsa, ncclTeam_t, (ncclComm_t comm), (comm)) \
	F(ncclTeamRail, ncclTeam_t, (ncclComm_t comm), (comm)) \
	F(ncclTeamRankToLsa, int, (ncclComm_t comm, ncclTeam_t team, int rank), (comm, team, rank)) \
	F(ncclTeamRankToWorld, int, (ncclComm_t comm, ncclTeam_t team, int rank), (comm, team, rank)) \
	F(ncclTeamWorld, ncclTeam_t, (ncclComm_t comm), (comm)) \
	F(ncclWaitSignal, ncclResult_t, (int nDesc, ncclWaitSignalDesc_t *signalDescs, ncclComm_t comm, cudaStream_t stream), (nDesc, signalDescs, comm, stream)) \
	F(ncclWinGetUserPtr, ncclResult_t, (ncclComm_t comm, ncclWindow_t win, void **outUserPtr), (comm, win, outUserPtr)) \

#define NCCL_PLAIN(F) \
	F(ncclCftBarrierCreateRequirement) \
	F(ncclGetCftDeviceLeInfo) \
	F(ncclGetLsaDevicePointer) \
	F(ncclGetLsaMultimemDevicePointer) \
	F(ncclGetMultimemDeviceLeInfo) \
	F(ncclGetMultimemDevicePointer) \
	F(ncclGetPeerDeviceLeInfo) \
	F(ncclGetPeerDevicePointer) \
	F(ncclGinInboxA2ACreateRequirement) \
	F(ncclGinOutboxCreateRequirement) \
	F(ncclLLA2ACalcSlots) \
	F(ncclLLA2ACreateRequirement) \
	F(ncclLsaBarrierCreateRequirement) \
	F(ncclParamBind) \
	F(ncclParamDumpAll) \
	F(ncclParamGet) \
	F(ncclParamGetAllParameterKeys) \
	F(ncclParamGetI16) \
	F(ncclParamGetI32) \
	F(ncclParamGetI64) \
	F(ncclParamGetI8) \
	F(ncclParamGetParameter) \
	F(ncclParamGetStr) \
	F(ncclParamGetU16) \
	F(ncclParamGetU32) \
	F(ncclParamGetU64) \
	F(ncclParamGetU8) \
	F(ncclSetEncryption) \

#define NCCL_WRAPPED(F) \
	NCCL_COLLECTIVE(F) NCCL_REDUCTION(F) NCCL_SEND(F) NCCL_RECEIVE(F) NCCL_OWN(F) NCCL_OTHER(F)
#endif
