/* SPDX-License-Identifier: Apache-2.0 */
/* gpucr-task, the supervisor: state shared by its parts. */
#ifndef GPUCR_TASK_H
#define GPUCR_TASK_H

#include <signal.h>
#include <stdbool.h>

#include "wire.h"

struct task_args {
	const char *socket, *job, *step, *dir, *interval;
	long long rank, nodes, signal;
	bool fail_unprotected;
	long long restart; /* SLURM_RESTART_COUNT */
	int pmi_fd;        /* -1 without PMI */
	char **argv;       /* the command */
};

enum phase {
	P_WAITING,  /* no decision of the agent yet: nothing runs */
	P_SPAWNING, /* connected to the shepherd, SPAWN or ATTACHTASK sent */
	P_RUNNING,  /* attached to the task */
	P_DETACHED, /* the task is being dumped, has moved or comes back: the agent will tell */
	P_LOST,     /* the shepherd's connection ended without DETACHED */
	P_ENDED,    /* the task has ended; telling the agent */
};

/* task_args.c */
int task_parse(struct task_args *a, int argc, char **argv); /* 0, or -1 after a line on stderr */
void build_hello(struct msg *m, const struct task_args *a, bool again, bool attached, int notice);
void build_spawn(struct msg *m, const struct task_args *a, const struct frame *start);
/* Descriptors 0, 1, 2 and PMI for SPAWN and ATTACHTASK; returns their number. */
int stdio_fds(const struct task_args *a, int fds[4]);
/* Become the command, with the signal mask that slurmstepd gave. */
void run_unprotected(const struct task_args *a, const sigset_t *mask) __attribute__((noreturn));
/* The agent did not come: run without it, or say why not and exit. */
void unreachable(const struct task_args *a, const sigset_t *mask, int err) __attribute__((noreturn));

#endif
