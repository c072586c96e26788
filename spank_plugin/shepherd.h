/* SPDX-License-Identifier: Apache-2.0 */
/* The shepherd: state shared by its parts. Everything is static: no memory grows with what the job writes. */
#ifndef GPUCR_SHEPHERD_H
#define GPUCR_SHEPHERD_H

#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "wire.h"

#define MAX_TASKS 64
#define MAX_CONNS 80
#define RELAY_BYTES 65536

/* One direction of relaying. Output: src inside, dst outward. Input: src outward, dst inside. */
struct chan {
	int src, dst;   /* -1: none (now) */
	bool used;      /* this direction exists */
	bool src_eof;   /* nothing more will come from inside, or (input) from outside, ever */
	bool discard;   /* outward writes failed for good: read and drop */
	bool last;      /* the task has ended: only `left` bytes more are read */
	size_t left;
	uint64_t read;  /* bytes taken from src since the start */
	uint32_t off, len;
	unsigned char *buf;
};

enum { C_IN, C_OUT, C_ERR, C_PMI_IN, C_PMI_OUT, C_COUNT };

enum task_state {
	T_FREE,
	T_HELD,    /* forked, waits for GO */
	T_EXEC,    /* released; exec has not been reported yet */
	T_RUNNING,
	T_EXITED,  /* status known; output may still be relayed */
};

struct task {
	enum task_state state;
	char key[256];
	pid_t pid;
	int status;
	bool told;     /* EXITED was sent to a supervisor */
	int go, error; /* pipe ends towards the held child */
	int conn;      /* index of the attached supervisor's connection, -1 none */
	bool merged;   /* stdout and stderr share one pipe, so that the order of lines is kept */
	struct chan chan[C_COUNT];
};

struct conn {
	struct rx rx; /* fd -1: free slot */
	unsigned uid;
};

/* relay.c */
void relay_init(struct task *t, unsigned char *memory);
/* Give outward descriptors (taken over) to a task's channels. fds[i] may be -1. */
void relay_attach(struct task *t, int fds[4]);
void relay_detach(struct task *t); /* close everything outward */
void relay_close(struct task *t);  /* close everything */
/* What poll() shall watch for this channel; fd -1: nothing. */
struct pollfd relay_poll(const struct chan *c);
void relay_step(struct chan *c, bool input);
/* The task has ended: bytes that are in its pipes now are the last ones. */
void relay_last(struct task *t);
bool relay_done(const struct task *t);
/* Write out what is buffered and what lies in the pipes now, until the deadline (now_ms()); the rest stays inside. */
void relay_flush(struct task *t, long long deadline_ms);

/* spawn.c: fork the held child; 0, or an errno with *what naming the step. Takes the outward fds in any case. */
int spawn_task(struct task *t, const struct frame *f, int fds[4], const char **what);
/* Read what the child reports on t->error: 0 exec worked, 1 nothing yet, -1 failed (errno, *what). */
int spawn_result(struct task *t, char *what, size_t size);

#endif
