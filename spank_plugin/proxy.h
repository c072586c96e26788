/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpucr-srun, the proxy: what its parts share. It is part of every image, so it uses only what CRIU can dump: pipes, Unix
 * and TCP sockets, a signalfd and poll(). It looks at no clock, which may jump in a restore: waiting is counted in rounds
 * of poll().
 */
#ifndef GPUCR_PROXY_H
#define GPUCR_PROXY_H

#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "wire.h"

#define TOKEN_LEN 32
#define KEY_LEN 16
#define STDIO_HEADER 5     /* kind, length */
#define STDIO_MAX 65536    /* longest payload of one piece of stdio */
#define LINE_MAX_BYTES 65536 /* a longer line is printed in parts, each with its label */

/* proxy_sink.c: where bytes go that come from tasks or from srun itself. */
struct sink {
	int fd;       /* -1: thrown away */
	bool broken;  /* nobody reads any more: thrown away, as srun does */
	size_t off, len, cap;
	char *buf;    /* not written yet */
};

extern struct sink own_sink[2];    /* our descriptors 1 and 2 */
extern struct sink *task_sink[2];  /* the same, or files of the plan */

void sinks_init(void);
/* STDOUT and STDERR of the plan; 0, or -1 after a line on stderr. */
int sinks_plan(const char *out, const char *err, bool append);
bool sink_busy(const struct sink *s);
void sink_put(struct sink *s, const void *data, size_t len);
/* What poll() shall watch; fd -1: nothing. */
struct pollfd sink_poll(const struct sink *s);
void sink_step(struct sink *s); /* after poll() said so: it may block else */
void sink_try(struct sink *s);  /* write what the descriptor takes now */
bool sinks_idle(void);
void sinks_each(void (*what)(struct sink *));

/* proxy_stdin.c: our input or a file, kept once in a ring for all tasks; each has its own place in it. */
void stdin_plan(const char *what);    /* all, none, RANK, file:PATH; exits when the file cannot be opened */
bool stdin_takes(long long rank);
uint64_t stdin_join(void);            /* place of a task that comes now */
/* `slowest`: place of the last of the tasks that take input; readers: how many there are. */
struct pollfd stdin_poll(bool ready, size_t readers, uint64_t slowest);
void stdin_step(uint64_t slowest);
/* Bytes from a place on, in one piece. */
size_t stdin_at(uint64_t place, const unsigned char **data);

/* proxy_tasks.c: the connections of the tasks. */
int tasks_listen(const char *token); /* port, or -1 with errno */
void tasks_plan(long long count, bool label);
/* Adds to a growing vector and returns its new end; tasks_step() gets the same place. */
size_t tasks_poll(struct pollfd **p, size_t *cap, size_t at);
void tasks_step(const struct pollfd *p);
/* Those that take input and are still there, and the place of the slowest. */
size_t tasks_readers(uint64_t *slowest);
size_t tasks_seen(void); /* connections that ever named themselves */
/* Connections that have not ended. *moved: whether anything came from them since the last question. */
size_t tasks_open(bool *moved);
void tasks_stop(void); /* wait no more: print what is left of unfinished lines */

/* Room for one more in a growing vector; exits when there is no memory. */
void *grow(void *p, size_t *cap, size_t need, size_t size);
void complain(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* proxy_outside.c: become the real srun. */
void real_srun(char **argv) __attribute__((noreturn));

#endif
