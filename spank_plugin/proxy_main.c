/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpucr-srun lies over srun in a capsule. It asks the agent, by way of the shepherd, to run the real srun outside, and
 * is to the job's script what srun would be: the tasks' output, their input, signals, the exit status. After a restore it
 * goes on in poll() and notices nothing: the agent starts another srun, the tasks' connections were saved.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proxy.h"
#include "util.h"

#define TICK_MS 100
#define LAST_TICKS 50           /* how long tasks are waited for that srun no longer waits for, while nothing comes */
#define SETTLED 1000            /* number of tasks unknown: the input waits so many rounds for another one */
#define TICK_ROUNDS 50
#define OUTPUT_HIGH (1u << 20)  /* more of srun's own words than this wait in the shepherd */

extern char **environ;

static struct rx shepherd = { .fd = -1 };
static char key[KEY_LEN + 1], token[TOKEN_LEN + 1];
static int signals = -1;
static long long expected;
static bool planned, ended;
static int end_status;

void complain(const char *fmt, ...)
{
	char line[4096] = "srun: error: ";
	size_t n = strlen(line);
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(line + n, sizeof(line) - n - 1, fmt, ap);
	va_end(ap);
	strcat(line, "\n");
	write_all(2, line, strlen(line));
}

static void die(const char *what, int err) __attribute__((noreturn));
static void die(const char *what, int err)
{
	complain("gpucr: %s%s%s", what, err ? ": " : "", err ? strerror(err) : "");
	exit(1);
}

void *grow(void *p, size_t *cap, size_t need, size_t size)
{
	if (need <= *cap)
		return p;
	*cap = 2 * need;
	p = realloc(p, *cap * size);
	if (!p)
		die("no memory", 0);
	return p;
}

static void random_hex(char *to, size_t digits)
{
	unsigned char bytes[TOKEN_LEN / 2];

	if (getrandom(bytes, digits / 2, 0) != (ssize_t)(digits / 2))
		die("getrandom", errno);
	for (size_t i = 0; i < digits / 2; i++)
		sprintf(to + 2 * i, "%02x", bytes[i]);
}

/* --- shepherd --- */

static void connect_shepherd(const char *path)
{
	int fd;

	/* Many sruns at once fill its backlog for a moment. */
	for (int tries = 0; (fd = wire_connect_trusted(path)) < 0; tries++) {
		if ((errno != EAGAIN && errno != EINTR) || tries == 200)
			die("the capsule's shepherd cannot be reached", errno);
		poll(NULL, 0, 50);
	}
	rx_init(&shepherd, fd);
}

static void request(int port, char **argv)
{
	char *cwd = getcwd(NULL, 0);
	mode_t mask = umask(0);
	struct msg m;

	umask(mask);
	msg_init(&m, GC_SRUN);
	msg_str(&m, "KEY", key);
	msg_int(&m, "PORT", port);
	msg_str(&m, "TOKEN", token);
	msg_str(&m, "CWD", cwd ? cwd : "/");
	free(cwd);
	msg_fmt(&m, "UMASK", "%o", (unsigned)mask);
	for (int i = 0; i < RLIM_NLIMITS; i++) { /* srun hands its own on to the tasks */
		struct rlimit r;

		if (getrlimit(i, &r) == 0)
			msg_fmt(&m, "RLIMIT", "%d:%llu:%llu", i, (unsigned long long)r.rlim_cur,
				(unsigned long long)r.rlim_max);
	}
	while (*++argv)
		msg_str(&m, "ARG", *argv);
	for (char **e = environ; *e; e++)
		msg_str(&m, "ENV", *e);
	if (msg_send(&m, shepherd.fd, NULL, 0) < 0)
		die("could not tell the capsule's shepherd", errno);
}

static void on_plan(const struct frame *f)
{
	/* Another plan, after a restore, may only tell the number of tasks. */
	expected = frame_int(f, "TASKS", 0);
	if (!planned) {
		if (sinks_plan(frame_get(f, "STDOUT"), frame_get(f, "STDERR"), frame_int(f, "APPEND", 0)) < 0)
			exit(1);
		stdin_plan(frame_get(f, "STDIN"));
	}
	tasks_plan(expected, frame_int(f, "LABEL", 0));
	planned = true;
}

/* A frame cannot carry NUL bytes: they stand between one DATA and the next. */
static void on_output(const struct frame *f)
{
	struct sink *s = &own_sink[frame_int(f, "FD", 1) == 2];
	size_t pos = 0, n = 0;
	const char *v;

	while ((v = frame_next(f, "DATA", &pos))) {
		if (n++)
			sink_put(s, "", 1);
		sink_put(s, v, strlen(v));
	}
}

static void on_frame(struct frame *f)
{
	const char *whose = frame_get(f, "KEY"), *why = frame_get(f, "MSG");

	if (f->type == GC_FAILED)
		die(why && *why ? why : "refused", 0);
	if (!whose || strcmp(whose, key))
		return;
	if (f->type == GC_PLAN)
		on_plan(f);
	else if (f->type == GC_OUTPUT)
		on_output(f);
	else if (f->type == GC_SRUNEND && !ended) {
		ended = true;
		end_status = (int)frame_int(f, "STATUS", 1 << 8);
	}
}

static bool too_much_output(void)
{
	return own_sink[0].len > OUTPUT_HIGH || own_sink[1].len > OUTPUT_HIGH;
}

static void on_shepherd(void)
{
	struct frame f;
	int r = 0;

	while (!too_much_output() && (r = rx_read(&shepherd, &f)) == 1) {
		on_frame(&f);
		frame_clear(&f);
	}
	if (r >= 0)
		return;
	rx_close(&shepherd);
	if (!ended)
		die("the capsule's shepherd is gone", 0);
}

/* --- signals --- */

static void block_signals(void)
{
	static const int forwarded[] = { SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGCONT };
	sigset_t set;

	signal(SIGPIPE, SIG_IGN);
	signal(SIGTTOU, SIG_IGN); /* a background srun may write */
	sigemptyset(&set);
	for (size_t i = 0; i < sizeof(forwarded) / sizeof(*forwarded); i++)
		sigaddset(&set, forwarded[i]);
	/* Exactly these are blocked: whoever started us may have left others so. What is ignored (nohup) stays ignored. */
	sigprocmask(SIG_SETMASK, &set, NULL);
	signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	if (signals < 0)
		die("signalfd", errno);
}

static void on_signals(void)
{
	struct signalfd_siginfo si;
	struct msg m;

	while (read(signals, &si, sizeof(si)) == sizeof(si)) {
		if (shepherd.fd < 0)
			continue;
		msg_init(&m, GC_SRUNSIGNAL);
		msg_str(&m, "KEY", key);
		msg_int(&m, "SIGNAL", si.ssi_signo);
		if (msg_send(&m, shepherd.fd, NULL, 0) < 0)
			on_shepherd(); /* the reason shows itself there */
	}
}

/* --- the loop --- */

static struct pollfd *p;
static size_t room;

static size_t add(size_t n, struct pollfd one)
{
	p = grow(p, &room, n + 1, sizeof(*p));
	p[n] = one;
	return n + 1;
}

static size_t filled;
static void add_sink(struct sink *s)
{
	filled = add(filled, sink_poll(s));
}

static void step_sink(struct sink *s)
{
	if (p[filled].fd >= 0 && p[filled].fd == s->fd && p[filled].revents)
		sink_step(s);
	filled++;
}

static bool input_ready(unsigned rounds)
{
	if (!planned || !tasks_seen())
		return false;
	return expected > 0 ? tasks_seen() >= (size_t)expected : rounds >= SETTLED;
}

/* false: everything is done. */
static bool loop_once(void)
{
	static unsigned rounds, last;
	static size_t before;
	static bool looked; /* for connections that were there when srun ended */
	uint64_t slowest = 0;
	size_t readers, tasks, open;
	bool moved, settling = planned && !expected && tasks_seen() && rounds < SETTLED;
	int r;

	if (tasks_seen() != before)
		rounds = 0;
	before = tasks_seen();
	filled = add(0, (struct pollfd){ .fd = signals, .events = POLLIN });
	filled = add(filled, (struct pollfd){ .fd = too_much_output() ? -1 : shepherd.fd, .events = POLLIN });
	readers = tasks_readers(&slowest);
	filled = add(filled, stdin_poll(input_ready(rounds), readers, slowest));
	sinks_each(add_sink);
	tasks = filled;
	filled = tasks_poll(&p, &room, tasks);
	r = poll(p, (nfds_t)filled, ended && !looked ? 0 : ended || settling ? TICK_MS : -1);
	if (r < 0 && errno != EINTR)
		die("poll", errno);
	if (r < 0)
		return true;
	if (settling)
		rounds += r ? 1 : TICK_ROUNDS;
	if (p[0].revents)
		on_signals();
	filled = 3;
	sinks_each(step_sink);
	/* Input before tasks: their places, and so the room in the ring, are still those that poll() was asked with. */
	if (p[2].fd >= 0 && p[2].revents)
		stdin_step(slowest);
	tasks_step(p + tasks);
	if (p[1].fd >= 0 && p[1].revents)
		on_shepherd();
	open = tasks_open(&moved);
	if (!ended || !sinks_idle())
		return true;
	if (!looked) {
		looked = true;
		return true;
	}
	/* Its own output does not hold us up. A task that is silent for so long belongs to a node that is lost. */
	last = r || moved ? 0 : last + 1;
	if (open && last < LAST_TICKS)
		return true;
	tasks_stop();
	return !sinks_idle();
}

int main(int argc, char **argv)
{
	const char *path = getenv("GPUCR_SHEPHERD");
	struct rlimit files;
	int port;

	(void)argc;
	if (!path || !*path || !getenv("GPUCR_CAPSULE"))
		real_srun(argv);
	block_signals();
	sinks_init();
	for (int fd = 0; fd < 3; fd++) /* no other file of ours may get these numbers */
		if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd)
			die("open /dev/null", errno);
	random_hex(key, KEY_LEN);
	random_hex(token, TOKEN_LEN);
	port = tasks_listen(token);
	if (port < 0)
		die("could not listen for the tasks", errno);
	connect_shepherd(path);
	request(port, argv);
	if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
		files.rlim_cur = files.rlim_max; /* one connection for each task */
		setrlimit(RLIMIT_NOFILE, &files);
	}
	while (loop_once())
		;
	exit(shell_status(end_status));
}
