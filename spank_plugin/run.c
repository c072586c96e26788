/* SPDX-License-Identifier: Apache-2.0 */
/* `gpucr-init run --status FILE -- COMMAND`: a parent that remembers. The agent starts srun below it; when the agent dies and
 * comes back, srun is not its child any more, but how it ended stands in FILE. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "capsule.h"
#include "util.h"

static const int forwarded[] = { SIGTERM, SIGINT, SIGUSR1, SIGUSR2, SIGHUP, SIGQUIT, SIGCONT, SIGALRM };

/* Whole or not at all: the file appears with its content. */
static int write_status(const char *path, int status)
{
	char temporary[PATH_MAX], text[16];
	int fd, n = snprintf(text, sizeof(text), "%d", status);

	if (snprintf(temporary, sizeof(temporary), "%s.%d", path, getpid()) >= (int)sizeof(temporary)) {
		errno = ENAMETOOLONG;
		return -1;
	}
	fd = open(temporary, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0644);
	if (fd < 0)
		return -1;
	if (write_all(fd, text, (size_t)n) < 0 || close(fd) < 0 || rename(temporary, path) < 0) {
		int saved = errno;

		unlink(temporary);
		errno = saved;
		return -1;
	}
	return 0;
}

static void exec_child(char **argv) __attribute__((noreturn));
static void exec_child(char **argv)
{
	setsid();
	reset_signals();
	execvp(argv[0], argv);
	say("run: %s: %s", argv[0], strerror(errno));
	_exit(errno == ENOENT ? 127 : 126);
}

int run_main(int argc, char **argv)
{
	static const struct option options[] = { { "status", 1, NULL, 's' }, { NULL, 0, NULL, 0 } };
	const char *path = NULL;
	int c, status = 0, s;
	sigset_t set;
	pid_t child;

	while ((c = getopt_long(argc, argv, "+", options, NULL)) == 's')
		path = optarg;
	if (c != -1 || !path || !argv[optind]) {
		say("usage: gpucr-init run --status FILE -- COMMAND...");
		return 125;
	}
	setsid();
	sigemptyset(&set);
	for (size_t i = 0; i < sizeof(forwarded) / sizeof(*forwarded); i++)
		sigaddset(&set, forwarded[i]);
	sigaddset(&set, SIGCHLD);
	signal(SIGCHLD, SIG_DFL); /* ignored by whoever started us, it would hide the child's status */
	sigprocmask(SIG_SETMASK, &set, NULL);
	child = fork();
	if (child < 0) {
		say("run: fork: %s", strerror(errno));
		return 125;
	}
	if (child == 0)
		exec_child(argv + optind);
	while (waitpid(child, &status, WNOHANG) != child) {
		s = sigwaitinfo(&set, NULL);
		if (s > 0 && s != SIGCHLD)
			kill(child, s);
	}
	if (write_status(path, status) < 0) {
		say("run: %s: %s", path, strerror(errno));
		return 125;
	}
	return shell_status(status);
}
