/* SPDX-License-Identifier: Apache-2.0 */
/* What one call costs: a program that calls an operation on nothing again and again and prints nanoseconds for each call,
 * and (built with -DLIBRARY) a libnccl.so.2 whose operations do nothing. The program runs on the real library, too.
 * usage: bench CALLS */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "../abi.h"

#ifdef LIBRARY
#define API __attribute__((visibility("default")))
static int it[4];
API ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, int type, int op, ncclComm_t comm, cudaStream_t stream)
{
	(void)in, (void)out, (void)count, (void)type, (void)op, (void)stream;
	return comm == (ncclComm_t)(void *)it ? ncclSuccess : ncclInvalidArgument;
}
API ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
	*id = (ncclUniqueId){{0}};
	return ncclSuccess;
}
API ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank)
{
	(void)nranks, (void)id, (void)rank;
	*comm = (ncclComm_t)(void *)it;
	return ncclSuccess;
}
API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
	(void)comm;
	return *error = ncclSuccess;
}
#define ANSWER(name, value) API ncclResult_t name(ncclComm_t comm, int *out) { (void)comm; *out = value; return ncclSuccess; }
ANSWER(ncclCommCount, 1)
ANSWER(ncclCommUserRank, 0)
ANSWER(ncclCommCuDevice, 0)
API ncclResult_t ncclGetVersion(int *version)
{
	*version = 22809;
	return ncclSuccess;
}
#else
ncclResult_t ncclGetUniqueId(ncclUniqueId *),
	ncclAllReduce(const void *, void *, size_t, int, int, ncclComm_t, cudaStream_t),
	ncclCommInitRank(ncclComm_t *, int, ncclUniqueId, int);

int main(int argc, char **argv)
{
	long calls = argc > 1 ? atol(argv[1]) : 0;
	struct timespec a, b;
	ncclUniqueId id;
	ncclComm_t comm;

	if (calls < 1 || ncclGetUniqueId(&id) || ncclCommInitRank(&comm, 1, id, 0))
		return 2;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
	for (long i = 0; i < calls; i++)
		if (ncclAllReduce(NULL, NULL, 0, 4, 0, comm, NULL))
			return 3;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
	printf("%.3f\n", ((double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec)) / (double)calls);
	return 0;
}
#endif
