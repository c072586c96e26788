/* SPDX-License-Identifier: Apache-2.0 */
/* libnccl.so.2 for tests without a card. It moves real bytes between processes, asynchronously on the fake driver's
 * streams, and refuses (by abort) what the real one may not be given: a communicator of another kind or after its end,
 * ranks whose operations differ, an end while operations are missing. As the real one does, it may wait in a call: for
 * all ranks to make a communicator, at the first use of one, at its end. Values are 64-bit integers. */
#ifndef FAKE_NCCL_H
#define FAKE_NCCL_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../abi.h"
#include "cuda.h"

#define API __attribute__((visibility("default")))
#define DIE(...) do { fprintf(stderr, "fake NCCL, process %d: ", (int)getpid()); fprintf(stderr, __VA_ARGS__); \
	fputc('\n', stderr); abort(); } while (0)
enum { MAGIC = 0x4e43434c, MAX_RANKS = 8, MAX_BYTES = 4096, MAX_OPS = 64 };
enum kind { ALL_REDUCE = 1, ALL_GATHER, BROADCAST, REDUCE, REDUCE_SCATTER, SEND, RECEIVE, TALK };

struct op { enum kind kind; const void *in; void *out; size_t count; int op, root; struct ncclComm *comm; stream_t stream; };
struct ncclComm {
	unsigned magic;
	int nranks, rank;
	int listener, peers[MAX_RANKS]; /* sockets */
	uint64_t issued, done, collectives, sent[MAX_RANKS], received[MAX_RANKS];
	int64_t scalars[8];
	int nscalars;
	unsigned char met[MAX_RANKS + 1]; /* first uses that the caller waits for */
	void *peer_memory;
	int registered, blocking;
};

extern pthread_mutex_t fake_lock;
extern pthread_cond_t fake_moved;
extern __thread int fake_depth; /* of groups */

/* socket.c: within one machine by names that the kernel chooses, with FAKE_NCCL_HOST (this host's name) by TCP. */
struct address { struct sockaddr_storage a; socklen_t size; };
void put(int fd, const void *data, size_t size);
void get(int fd, void *data, size_t size);
int listen_at(struct address *a);
int connect_to(const struct address *a);

/* operations.c */
struct ncclComm *check(ncclComm_t c);
void exchange(struct ncclComm *c, enum kind kind, const void *mine, size_t bytes, char *all);
uint64_t next_turn(struct ncclComm *c);
void take_turn(struct ncclComm *c, uint64_t turn);
void end_turn(struct ncclComm *c);
void wait_done(struct ncclComm *c, uint64_t count);

/* communicators.c */
void make_grouped(void);

#endif
