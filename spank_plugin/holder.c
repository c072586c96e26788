/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The holder: root of the dumped tree, session leader and child subreaper, so that daemons of the job stay in the tree at
 * the first start and after every restore (CRIU lets orphans of dead session leaders fall to PID 1, which is not dumped:
 * without the holder a second checkpoint would silently lose them).
 *
 * At rest it has the user's identity and no descriptor but 0, 1, 2. It obeys nobody's signals: a job that kills "all my
 * processes" must not lose its capsule that way. A later holder ends it by SIGKILL.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "capsule.h"
#include "util.h"

static void ignore_signals(void)
{
	for (int s = 1; s < NSIG; s++)
		if (s != SIGCHLD && s != SIGSEGV && s != SIGBUS && s != SIGILL && s != SIGFPE && s != SIGABRT)
			signal(s, SIG_IGN);
}

int holder_main(const struct capsule_args *a)
{
	pid_t shepherd = 0, pid;
	int status;

	set_name("gpucr-holder");
	set_cloexec(a->sync, true);
	set_cloexec(a->control, true);
	setsid();
	if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) < 0) {
		sync_failed(a->sync, "become subreaper", errno);
		return 1;
	}
	if (a->restore) {
		sync_ready(a->sync, 0);
		if (holder_restore(a, &shepherd) < 0)
			return 1;
	} else {
		close(a->control);
		if (a->hide_io_uring && hide_io_uring() < 0) {
			sync_failed(a->sync, "hide io_uring", errno);
			return 1;
		}
		if (become_user(a->uid, a->gid, a->groups, a->ngroups) < 0) {
			sync_failed(a->sync, "become the user", errno);
			return 1;
		}
		shepherd = fork();
		if (shepherd < 0) {
			sync_failed(a->sync, "fork", errno);
			return 1;
		}
		if (shepherd == 0)
			_exit(shepherd_main(a));
	}
	/* Whatever mode: nothing but stdio stays open. */
	close_range(3, UINT_MAX, 0);
	ignore_signals();
	for (;;) {
		pid = waitpid(-1, &status, 0);
		/* Without its shepherd a capsule can neither relay nor be dumped and restored. */
		if ((pid > 0 && pid == shepherd) || (pid < 0 && errno == ECHILD))
			return DIED_WITH_CAPSULE;
	}
}
