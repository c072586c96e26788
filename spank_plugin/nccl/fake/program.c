/* SPDX-License-Identifier: Apache-2.0 */
/* Random programs on NCCL: all ranks make the same steps from one seed, each at its own pace, and print a digest of every
 * value that came out. usage: program FOLDER RANK RANKS FIRST-SEED COUNT STEPS THREADS
 * FOLDER: where ranks leave each other what NCCL does not carry. One line `SEED THREAD DIGEST` for each program. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../abi.h"
#include "cuda.h"

ncclResult_t ncclGetUniqueId(ncclUniqueId *), ncclCommInitRankConfig(ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *),
	ncclCommInitRank(ncclComm_t *, int, ncclUniqueId, int), ncclCommSplit(ncclComm_t, int, int, ncclComm_t *, ncclConfig_t *),
	ncclCommDestroy(ncclComm_t), ncclCommFinalize(ncclComm_t), ncclGroupStart(void), ncclGroupEnd(void),
	ncclAllReduce(const void *, void *, size_t, int, int, ncclComm_t, cudaStream_t),
	ncclReduce(const void *, void *, size_t, int, int, int, ncclComm_t, cudaStream_t),
	ncclReduceScatter(const void *, void *, size_t, int, int, ncclComm_t, cudaStream_t),
	ncclAllGather(const void *, void *, size_t, int, ncclComm_t, cudaStream_t),
	ncclBroadcast(const void *, void *, size_t, int, int, ncclComm_t, cudaStream_t),
	ncclSend(const void *, size_t, int, int, ncclComm_t, cudaStream_t),
	ncclRecv(void *, size_t, int, int, ncclComm_t, cudaStream_t),
	ncclCommCount(ncclComm_t, int *), ncclCommUserRank(ncclComm_t, int *), ncclCommGetAsyncError(ncclComm_t, int *),
	ncclRedOpCreatePreMulSum(int *, void *, int, int, ncclComm_t), ncclRedOpDestroy(int, ncclComm_t),
	ncclCommRegister(ncclComm_t, void *, size_t, void **), ncclCommDeregister(ncclComm_t, void *);

enum { INT64 = 4, WORDS = 64, STREAMS = 2, COMMS = 6, N = 8 };
#define OK(call) do { int r_ = (call); if (r_) { fprintf(stderr, "rank %d: %s: %d\n", rank, #call, r_); abort(); } } while (0)

static const char *folder;
static int rank, ranks, first, programs, steps;

static uint64_t next(uint64_t *s)
{
	*s ^= *s << 13;
	*s ^= *s >> 7;
	*s ^= *s << 17;
	return *s;
}

struct lane { /* a stream with its memory */
	stream_t stream;
	int64_t in[WORDS], out[WORDS];
	uint64_t digest;
};

/* What a kernel would do: take in the result, make the next input of it. */
static void kernel(void *arg)
{
	struct lane *l = arg;

	for (int i = 0; i < WORDS; i++) {
		l->digest = (l->digest ^ (uint64_t)l->out[i]) * 0x9e3779b97f4a7c15ULL;
		l->digest ^= l->digest >> 31;
		l->in[i] = (int64_t)(l->digest >> 20) + l->in[i] * 3;
	}
}

struct member { ncclComm_t comm; unsigned mask; int me, size, list[8], op; void *buffer; };

/* Ranks out of `mask`, ordered; the same on all. */
static void fill(struct member *m, unsigned mask)
{
	memset(m, 0, sizeof(*m));
	m->mask = mask;
	m->me = -1;
	for (int r = 0; r < ranks; r++)
		if (mask >> r & 1) {
			if (r == rank)
				m->me = m->size;
			m->list[m->size++] = r;
		}
}

static void check(struct member *m)
{
	int value;

	OK(ncclCommCount(m->comm, &value));
	if (value != m->size)
		OK(1000 + value);
	OK(ncclCommUserRank(m->comm, &value));
	if (value != m->me)
		OK(2000 + value);
	OK(ncclCommGetAsyncError(m->comm, &value));
	OK(value);
}

static void id_by_file(ncclUniqueId *id, bool make, unsigned seed, int thread, int number)
{
	char path[300], part[320];
	int fd;

	snprintf(path, sizeof(path), "%s/id-%u-%d-%d", folder, seed, thread, number);
	snprintf(part, sizeof(part), "%s.part", path);
	if (make) {
		OK(ncclGetUniqueId(id));
		fd = open(part, O_WRONLY | O_CREAT | O_EXCL, 0600);
		if (fd < 0 || write(fd, id, sizeof(*id)) != sizeof(*id) || close(fd) || rename(part, path))
			abort();
		return;
	}
	while ((fd = open(path, O_RDONLY)) < 0)
		usleep(300); /* as a store of the framework would be asked */
	if (read(fd, id, sizeof(*id)) != sizeof(*id))
		abort();
	close(fd);
}

static void init(struct member *m, unsigned seed, int thread, int number)
{
	ncclConfig_t config = {sizeof(config), 0xcafebeef, 22809, UNDEFINED, UNDEFINED, UNDEFINED, UNDEFINED, NULL, UNDEFINED,
	                       UNDEFINED, NULL};
	ncclUniqueId id;

	if (m->me < 0)
		return;
	id_by_file(&id, m->me == 0, seed, thread, number);
	if (number % 2)
		OK(ncclCommInitRankConfig(&m->comm, m->size, id, m->me, &config));
	else
		OK(ncclCommInitRank(&m->comm, m->size, id, m->me));
}

static void operation(struct member *m, struct lane *l, int what, int root, size_t count, int op)
{
	cudaStream_t s = (cudaStream_t)l->stream;
	int next_rank = (m->me + 1) % m->size, last = (m->me + m->size - 1) % m->size;

	if (what >= 5 && m->size < 2)
		what = 0;
	switch (what) {
	case 0: OK(ncclAllReduce(l->in, l->out, count, INT64, op, m->comm, s)); break;
	case 1: OK(ncclReduce(l->in, l->out, count, INT64, op, root, m->comm, s)); break;
	case 2: OK(ncclReduceScatter(l->in, l->out, N, INT64, op, m->comm, s)); break;
	case 3: OK(ncclAllGather(l->in, l->out, N, INT64, m->comm, s)); break;
	case 4: OK(ncclBroadcast(l->in, l->out, count, INT64, root, m->comm, s)); break;
	case 5: /* a ring */
		OK(ncclGroupStart());
		OK(ncclSend(l->in, count, INT64, next_rank, m->comm, s));
		OK(ncclRecv(l->out, count, INT64, last, m->comm, s));
		OK(ncclGroupEnd());
		break;
	default: /* one rank to another, the rest not involved */
		if (m->me == root)
			OK(ncclSend(l->in, count, INT64, (root + 1) % m->size, m->comm, s));
		else if (m->me == (root + 1) % m->size)
			OK(ncclRecv(l->out, count, INT64, root, m->comm, s));
	}
}

static void end(struct member *m, bool finalize)
{
	if (m->comm) {
		if (m->op)
			OK(ncclRedOpDestroy(m->op, m->comm));
		if (m->buffer)
			OK(ncclCommDeregister(m->comm, m->buffer));
		if (finalize)
			OK(ncclCommFinalize(m->comm));
		OK(ncclCommDestroy(m->comm));
	}
	memset(m, 0, sizeof(*m));
}

static void program(unsigned seed, int thread)
{
	uint64_t random = seed * 2654435761u + (unsigned)thread * 977u + 88172645463325252ULL;
	uint64_t own = random ^ (0x1234567ULL * (unsigned)(rank + 1)); /* pace only */
	struct member members[COMMS] = {{0}};
	struct lane *lanes = calloc(STREAMS, sizeof(*lanes));
	unsigned all = (1u << ranks) - 1;
	int number = 0;

	if (!lanes)
		abort();
	for (int i = 0; i < STREAMS; i++) {
		lanes[i].stream = fake_stream();
		for (int k = 0; k < WORDS; k++)
			lanes[i].in[k] = rank * 1000 + k;
	}
	for (int i = 0; i < 20; i++)
		next(&random);
	fill(&members[0], all);
	init(&members[0], seed, thread, number++);
	for (int step = 0; step < steps; step++) {
		unsigned what = next(&random) % 24, a = (unsigned)next(&random), b = (unsigned)next(&random);
		struct member *m = &members[a % COMMS];
		struct lane *l = &lanes[b % STREAMS];
		int root = m->size ? (int)(a / 7 % (unsigned)m->size) : 0;
		size_t count = 1 + b / 3 % (WORDS - 1);
		bool mine = m->size && m->me >= 0;

		if (next(&own) % 4 == 0)
			usleep((useconds_t)(next(&own) % 3000));
		if (what < 13) {
			if (mine)
				operation(m, l, (int)(what % 7), root, count,
				          m->op && b % 3 == 0 ? m->op : (int)(b % 2) * 2);
			fake_enqueue(l->stream, kernel, l);
		} else if (what < 17) { /* a group over several communicators */
			OK(ncclGroupStart());
			for (int i = 0; i < COMMS; i++)
				if (members[i].size && members[i].me >= 0 && (b >> i & 1))
					operation(&members[i], l, (int)((a >> i) % 6), (int)(a % (unsigned)members[i].size), count, 0);
			OK(ncclGroupEnd());
			fake_enqueue(l->stream, kernel, l);
		} else if (what < 18) { /* the program waits for its GPU */
			fake_stream_wait(l->stream);
		} else if (what < 20 && !members[1 + b % (COMMS - 1)].size) { /* split */
			struct member *fresh = &members[1 + b % (COMMS - 1)];
			unsigned mask = 0;

			for (int i = 0; i < m->size; i++)
				mask |= (a >> (8 + i) & 1) << m->list[i];
			if (!mask)
				continue;
			fill(fresh, mask);
			if (!mine)
				continue;
			OK(ncclCommSplit(m->comm, fresh->me >= 0 ? 7 : NO_COLOUR, m->me, &fresh->comm, NULL));
			if ((fresh->comm != NULL) != (fresh->me >= 0))
				OK(3000);
		} else if (what < 21 && !members[1 + b % (COMMS - 1)].size) { /* a new one by an id */
			struct member *fresh = &members[1 + b % (COMMS - 1)];
			unsigned mask = (a >> 4 & all) ? (a >> 4 & all) : 1;

			fill(fresh, mask);
			init(fresh, seed, thread, number++);
			if (fresh->me < 0)
				fresh->comm = NULL;
		} else if (what < 22 && a % COMMS) {
			end(m, b % 2);
		} else if (what < 23 && mine) {
			int64_t scalar = 3 + rank;

			check(m);
			if (!m->op)
				OK(ncclRedOpCreatePreMulSum(&m->op, &scalar, INT64, HOST_SCALAR, m->comm));
			if (!m->buffer)
				OK(ncclCommRegister(m->comm, l->in, sizeof(l->in), &m->buffer));
		}
	}
	for (int i = COMMS - 1; i >= 0; i--)
		end(&members[i], false);
	for (int i = 0; i < STREAMS; i++)
		fake_stream_wait(lanes[i].stream);
	printf("%u %d %016llx\n", seed, thread, (unsigned long long)(lanes[0].digest ^ lanes[1].digest * 31));
	for (int i = 0; i < STREAMS; i++)
		fake_stream_end(lanes[i].stream);
	free(lanes);
}

static void *run(void *arg)
{
	for (int i = 0; i < programs; i++)
		program((unsigned)(first + i), (int)(intptr_t)arg);
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t threads[4];
	int n;

	if (argc != 8)
		return 2;
	setvbuf(stdout, NULL, _IOLBF, 0);
	folder = argv[1];
	rank = atoi(argv[2]);
	ranks = atoi(argv[3]);
	first = atoi(argv[4]);
	programs = atoi(argv[5]);
	steps = atoi(argv[6]);
	n = atoi(argv[7]);
	for (int i = 1; i < n; i++)
		if (pthread_create(&threads[i], NULL, run, (void *)(intptr_t)i))
			abort();
	run(NULL);
	for (int i = 1; i < n; i++)
		pthread_join(threads[i], NULL);
	return 0;
}
