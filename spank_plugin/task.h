/* SPDX-License-Identifier: Apache-2.0 */
/* gpucr-task, the supervisor: state shared by its parts. */
#ifndef GPUCR_TASK_H
#define GPUCR_TASK_H

#include <signal.h>
#include <stdbool.h>

#include "wire.h"

#define MAX_OPTIONS 8

struct task_args {
	const char *socket, *job, *step, *dir, *interval;
	const char *options[MAX_OPTIONS]; /* KEY=VALUE for the agent */
	int n_options;
	bool restores; /* from another job's checkpoint: its own command is never run */
	long long rank, nodeid, nodes, signal;
	bool fail_unprotected;
	long long restart; /* SLURM_RESTART_COUNT */
	int pmi_fd;        /* -1 without PMI */
	char **argv;       /* the command */
};

enum phase {
	P_WAITING,  /* no decision of the agent yet: nothing runs */
	P_SPAWNING, /* connected to the shepherd, SPAWN or ATTACHTASK sent */
	P_PLACING,  /* the task is held until the agent has put it into its control groups */
	P_RUNNING,  /* attached to the task */
	P_DETACHED, /* the task is being dumped, has moved or comes back: the agent will tell */
	P_LOST,     /* the shepherd's connection ended without DETACHED */
	P_ENDED,    /* the task has ended; telling the agent */
};

/* State of the one supervisor that a process is; task.c and task_link.c. */
#define RETRY_MS 1000
#define FIRST_RETRY_MS 100
#define NEVER (-1LL)

extern struct task_args args;
extern enum phase phase;
extern struct rx agent, shepherd;
extern bool decided;          /* a first HELLO has been answered */
extern int hellos_open;       /* HELLO MODE=again without an answer; its OK must not be taken for that of ENDED */
extern bool attaching;        /* the open request is ATTACHTASK, not SPAWN */
extern bool attach_wanted;    /* ATTACH came, the connection did not work yet */
extern bool restored;         /* that ATTACH said so */
extern bool queued[NSIG];     /* signals for the task while there is no connection to it */
extern bool asked[NSIG];      /* the agent was told, or shall be, and has not answered */
extern long long lost_since, away_since, retry_at;
extern long long held_pid;    /* inside the capsule's namespace; 0: the task is not held */

/* task_link.c */
void give_signal(int s);
void agent_gone(void);
int agent_connect(void);
void send_notice(int s);
void ask_place(void);
void let_go(void);
void start(const struct frame *f);
void remember(const struct frame *f);
void try_attach(void);
void shepherd_gone(bool expected);
void print_msg(const struct frame *f);

/* task_args.c */
int task_parse(struct task_args *a, int argc, char **argv); /* 0, or -1 after a line on stderr */
bool is_step(const struct task_args *a); /* not the batch script */
void build_hello(struct msg *m, const struct task_args *a, bool again, bool attached, int notice);
void build_spawn(struct msg *m, const struct task_args *a, const struct frame *start);
/* Descriptors 0, 1, 2 and PMI for SPAWN and ATTACHTASK; returns their number. */
int stdio_fds(const struct task_args *a, int fds[4]);
/* Become the command, with the signal mask that slurmstepd gave. */
void run_unprotected(const struct task_args *a, const sigset_t *mask) __attribute__((noreturn));
/* The agent did not come: run without it, or say why not and exit. */
void unreachable(const struct task_args *a, const sigset_t *mask, int err) __attribute__((noreturn));

#endif
