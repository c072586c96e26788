/* SPDX-License-Identifier: Apache-2.0 */
/* A real shepherd without capsule and root: we are its supervisor. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <fcntl.h>
#include <unistd.h>

#include "capsule.h"
#include "test_check.h"
#include "util.h"
#include "wire.h"

static char dir[64], path[128];
static struct rx rx;

static pid_t shepherd;

static void end_shepherd(void)
{
	if (shepherd > 0)
		kill(shepherd, SIGKILL);
}

static pid_t start(void)
{
	static struct capsule_args a = { .control = -1 };
	char text[64];
	int sync[2];
	pid_t pid;

	CHECK(pipe2(sync, O_CLOEXEC) == 0);
	a.run_dir = dir;
	a.sync = sync[1];
	pid = fork();
	if (pid == 0)
		_exit(shepherd_main(&a));
	close(sync[1]);
	CHECK(read(sync[0], text, sizeof(text)) > 2 && text[0] == 'R');
	close(sync[0]);
	return pid;
}

static void expect(uint32_t type, struct frame *f)
{
	CHECK(rx_wait(&rx, f, 10000) == 1);
	if (f->type != type)
		fprintf(stderr, "got %u: %s\n", f->type, frame_get(f, "MSG"));
	CHECK(f->type == type);
}

static void request(uint32_t type, const char *task)
{
	struct msg m;

	msg_init(&m, type);
	msg_str(&m, "TASK", task);
	msg_int(&m, "SIGNAL", SIGUSR1);
	CHECK(msg_send(&m, rx.fd, NULL, 0) == 0);
}

static void spawn(const char *task, const char *program, const char *script, int fds[3])
{
	struct frame f;
	struct msg m;

	msg_init(&m, GC_SPAWN);
	msg_str(&m, "TASK", task);
	msg_str(&m, "CWD", "/no/such/directory");
	msg_str(&m, "UMASK", "027");
	msg_str(&m, "AFFINITY", "0-3,8");
	msg_str(&m, "RLIMIT", "7:64:64");
	msg_str(&m, "RLIMIT", "junk");
	msg_str(&m, "ARG", program);
	msg_str(&m, "ARG", "-c");
	msg_str(&m, "ARG", script);
	msg_str(&m, "ENV", "PATH=/usr/bin:/bin");
	CHECK(msg_send(&m, rx.fd, fds, 3) == 0);
	expect(GC_SPAWNED, &f);
	CHECK(frame_int(&f, "PID", 0) > 1);
	frame_clear(&f);
}

static void ended(const char *task, int status)
{
	struct frame f;

	expect(GC_EXITED, &f);
	CHECK_STR(task, frame_get(&f, "TASK"));
	CHECK(frame_int(&f, "STATUS", -1) == status);
	frame_clear(&f);
}

static void output(int fd, const char *want)
{
	char got[4096];
	size_t n = 0;
	ssize_t r;

	while (n < sizeof(got) - 1 && (r = read(fd, got + n, sizeof(got) - 1 - n)) > 0)
		n += (size_t)r;
	got[n] = '\0';
	CHECK_STR(want, got);
}

int main(void)
{
	int out[2], err[2], null = open("/dev/null", O_RDWR | O_CLOEXEC), fds[3];
	struct frame f;

	snprintf(dir, sizeof(dir), "/tmp/gpucr-test.XXXXXX");
	CHECK(mkdtemp(dir));
	snprintf(path, sizeof(path), "%s/user", dir);
	CHECK(mkdir(path, 0700) == 0);
	snprintf(path, sizeof(path), "%s/user/shepherd.sock", dir);
	shepherd = start();
	atexit(end_shepherd);
	rx_init(&rx, wire_connect(path));
	CHECK(rx.fd >= 0);

	/* output, limits, umask, exit status; nothing runs before GO */
	CHECK(pipe2(out, O_CLOEXEC) == 0 && pipe2(err, O_CLOEXEC) == 0);
	memcpy(fds, (int[]){ null, out[1], err[1] }, sizeof(fds));
	spawn("t", "sh", "pwd; umask; ulimit -n; exit 5", fds);
	close(out[1]);
	close(err[1]);
	struct pollfd p = { .fd = out[0], .events = POLLIN };
	CHECK(poll(&p, 1, 100) == 0);
	request(GC_SPAWN, "t"); /* no descriptors, no command */
	expect(GC_FAILED, &f);
	CHECK(frame_int(&f, "ERRNO", 0) == EINVAL);
	frame_clear(&f);
	request(GC_GO, "t");
	ended("t", 5 << 8);
	output(out[0], "/tmp\n0027\n64\n");
	output(err[0], "gpucr: could not chdir to /no/such/directory: No such file or directory; /tmp is used\n");

	/* told again to whoever attaches; unknown tasks fail */
	struct msg m;
	msg_init(&m, GC_ATTACHTASK);
	msg_str(&m, "TASK", "t");
	memcpy(fds, (int[]){ null, null, null }, sizeof(fds));
	CHECK(msg_send(&m, rx.fd, fds, 3) == 0);
	expect(GC_ATTACHED, &f);
	frame_clear(&f);
	ended("t", 5 << 8);
	request(GC_ATTACHTASK, "u");
	expect(GC_FAILED, &f);
	CHECK(frame_int(&f, "ERRNO", 0) == ESRCH);
	frame_clear(&f);

	/* exec failure, signal, reuse of a name */
	spawn("t", "/no/such/program", "", fds);
	request(GC_GO, "t");
	expect(GC_FAILED, &f);
	CHECK(frame_int(&f, "ERRNO", 0) == ENOENT);
	frame_clear(&f);
	spawn("t", "sh", "sleep 100", fds);
	request(GC_GO, "t");
	request(GC_SIGNAL, "t");
	ended("t", SIGUSR1);

	/* more tasks than slots, since ended ones make room */
	for (int i = 0; i < 100; i++) {
		char key[16];

		snprintf(key, sizeof(key), "n%d", i);
		spawn(key, "sh", "exit 0", fds);
		request(GC_GO, key);
		ended(key, 0);
	}

	/* a supervisor that goes before GO takes its task with it; DETACH is for root */
	spawn("held", "sh", "exit 0", fds);
	rx_close(&rx);
	rx_init(&rx, wire_connect(path));
	request(GC_DETACH, "");
	expect(geteuid() ? GC_FAILED : GC_DETACHED, &f);
	CHECK(geteuid() || frame_count(&f, "TASKS"));
	frame_clear(&f);
	CHECK(waitpid(shepherd, NULL, WNOHANG) == 0);
	kill(shepherd, SIGTERM); /* not obeyed */
	usleep(50000);
	CHECK(waitpid(shepherd, NULL, WNOHANG) == 0);
	kill(shepherd, SIGKILL);
	waitpid(shepherd, NULL, 0);
	shepherd = 0;
	rx_close(&rx);
	unlink(path);
	snprintf(path, sizeof(path), "%s/user", dir);
	rmdir(path);
	rmdir(dir);
	puts("shepherd: ok");
	return 0;
}
