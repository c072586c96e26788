/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "util.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

long long now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (long long)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

void say(const char *fmt, ...)
{
	char line[4096] = "gpucr: ";
	size_t n = strlen(line);
	va_list ap;
	int r;

	va_start(ap, fmt);
	r = vsnprintf(line + n, sizeof(line) - n - 1, fmt, ap);
	va_end(ap);
	if (r < 0)
		return;
	n = strlen(line);
	while (n && line[n - 1] == '\n')
		n--;
	line[n++] = '\n';
	write_all(2, line, n);
}

bool parse_number(const char *text, long long min, long long max, long long *out)
{
	char *end;
	long long v;

	if (!text || !*text)
		return false;
	errno = 0;
	v = strtoll(text, &end, 10);
	if (errno || *end || v < min || v > max)
		return false;
	*out = v;
	return true;
}

void set_cloexec(int fd, bool on)
{
	fcntl(fd, F_SETFD, on ? FD_CLOEXEC : 0);
}

int write_all(int fd, const void *data, size_t len)
{
	const char *p = data;

	while (len) {
		ssize_t n = write(fd, p, len);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -1;
		p += n;
		len -= (size_t)n;
	}
	return 0;
}

int write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC), r, saved;

	if (fd < 0)
		return -1;
	r = write_all(fd, text, strlen(text));
	saved = errno;
	close(fd);
	errno = saved;
	return r;
}

void reset_signals(void)
{
	sigset_t none;

	for (int s = 1; s < NSIG; s++)
		if (s != SIGKILL && s != SIGSTOP)
			signal(s, SIG_DFL); /* glibc refuses its own 32 and 33: they stay as exec leaves them */
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
}

int null_stdio(void)
{
	int fd = open("/dev/null", O_RDWR | O_CLOEXEC);

	if (fd < 0)
		return -1;
	for (int i = 0; i < 3; i++)
		if (fd == i)
			set_cloexec(fd, false);
		else if (dup2(fd, i) < 0)
			return -1;
	if (fd > 2)
		close(fd);
	return 0;
}

int shell_status(int status)
{
	return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

void exit_like(int status)
{
	if (WIFSIGNALED(status)) {
		struct rlimit none = { 0, 0 };
		int s = WTERMSIG(status);
		sigset_t set;

		setrlimit(RLIMIT_CORE, &none); /* the task has left its core file already */
		signal(s, SIG_DFL);
		sigemptyset(&set);
		sigaddset(&set, s);
		sigprocmask(SIG_UNBLOCK, &set, NULL);
		raise(s);
	}
	_exit(shell_status(status));
}
