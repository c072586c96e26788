/* SPDX-License-Identifier: Apache-2.0 */
/* The shepherd: state shared by its parts. No memory grows with what the job writes: each task has one block of fixed
 * size while it runs; of the step requests that wait, the shepherd keeps the frames. */
#ifndef GPUCR_SHEPHERD_H
#define GPUCR_SHEPHERD_H

#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "wire.h"

#define MAX_TASKS 512
#define MAX_CONNS 2048
#define RELAY_BYTES 65536
#define MAX_TASK_POLLS 10
#define TASK_MEMORY (7 * (size_t)RELAY_BYTES) /* three channels, both ways of net and of pmi */

/* One direction of relaying. Output: src inside, dst outward. Input: src outward, dst inside. */
struct chan {
	int src, dst;   /* -1: none (now) */
	bool used;      /* this direction exists */
	bool net;       /* its outward side is the task's connection to the proxy */
	bool src_eof;   /* nothing more will come from inside, or (input) from outside, ever */
	bool last;      /* the task has ended: only `left` bytes more are read */
	size_t left;
	uint64_t read;  /* bytes taken from src since the start */
	uint32_t off, len;
	unsigned char *buf;
};

enum { C_IN, C_OUT, C_ERR, C_COUNT };

#define NET_HEADER 5

/* A task's connection to the proxy of its step. Inside the dump: it stays over DETACH. */
struct net {
	int fd; /* -1: none, or closed */
	bool used, reading, failed, shut;
	bool end_sent[C_COUNT]; /* the piece of length 0 is in the buffer or gone */
	unsigned char header[NET_HEADER];
	uint32_t header_len, left; /* of the piece that comes in */
	uint32_t in_off, in_len, out_off, out_len;
	unsigned char *in, *out; /* RELAY_BYTES each */
};

/* Between the task's end of a socket pair and slurmstepd's PMI socket. */
struct pmi {
	int inside, outside; /* -1: none (now) */
	bool used, said;     /* said: the task has sent something */
	bool v2, init_done, init_answered;
	bool swallow;        /* the next line from slurmstepd is for us */
	uint32_t init_len, replay_off;
	char init[256];      /* the task's first line, newline included */
	uint32_t req_len, req_sent; /* what the task sent since the last answer */
	uint32_t ans_off, ans_len;
	char *req, *ans; /* RELAY_BYTES each */
};

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
	bool lost;     /* its supervisor was killed: nobody comes for it again */
	int go, error; /* pipe ends towards the held child */
	int conn;      /* index of the attached supervisor's connection, -1 none */
	bool merged;   /* stdout and stderr share one pipe, so that the order of lines is kept */
	unsigned char *memory;
	struct chan chan[C_COUNT];
	struct net net;
	struct pmi pmi;
};

/* shepherd.c: connections */
int conn_fd(int c);
unsigned conn_uid(int c);
void conn_drop(int c);
void conn_send(int c, struct msg *m); /* drops a peer that takes nothing */

/* tasks.c: requests of supervisors, and the ends of tasks */
void tasks_init(void);
void tasks_request(int c, struct frame *f);
void tasks_conn_gone(int c);
size_t tasks_poll(struct pollfd *p);         /* at most MAX_TASKS * MAX_TASK_POLLS */
void tasks_step(const struct pollfd *p);     /* after poll() of the same array */
void tasks_detach(struct msg *to_agent);     /* flushes, lets go what leads out, adds TASKS */
void tell_failed(int c, const char *key, int err, const char *text);

/* relay.c */
void relay_init(struct task *t);
/* Give outward descriptors (taken over) to a task's channels. fds[i] may be -1. */
void relay_attach(struct task *t, int fds[3]);
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

/* net.c */
/* Connect to ADDRESS:PORT and say who we are; descriptor, or -1 with errno. Waits up to 10 s. */
int net_connect(const char *where, const char *token, long long rank);
void net_open(struct net *n, int fd, unsigned char *memory);
int net_poll(const struct task *t, struct pollfd *p); /* adds up to 4 */
void net_step(struct task *t);
/* All output of an ended task is in the kernel's hands, with the end behind it. */
bool net_done(const struct task *t);
/* Then: the connection is closed when the proxy has closed it. Closing it earlier, with input unread, would throw away
 * output that is still on the way. */
void net_linger(struct net *n);
void net_close(struct net *n);

/* pmi.c */
void pmi_open(struct pmi *p, int inside, char *memory);
void pmi_attach(struct pmi *p, int outside, bool restored);
void pmi_detach(struct pmi *p, long long deadline_ms);
void pmi_close(struct pmi *p);
int pmi_poll(const struct pmi *p, struct pollfd *polls); /* adds up to 2 */
void pmi_step(struct pmi *p);
const char *pmi_state(const struct pmi *p);

/* spawn.c: fork the held child; 0, or an errno with *what naming the step. Takes the outward fds in any case. */
int spawn_task(struct task *t, const struct frame *f, int fds[4], const char **what);
/* Read what the child reports on t->error: 0 exec worked, 1 nothing yet, -1 failed (errno, *what). */
int spawn_result(struct task *t, char *what, size_t size);

#endif
